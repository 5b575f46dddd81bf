"""Content that a grammar lets through, against readers of its own: json, a small schema check, the strict parser."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

import dsv4nb
from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE
from dsv4nb.encoding.grammar import Matcher, compile_constraint, constraint_of
from dsv4nb.encoding.parse import ToolCall, parse_strict
from dsv4nb.encoding.stream_parse import Splitter
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.encoding.tools import calls_block
from dsv4nb.errors import RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", None]},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
    },
    "required": ["name", "scores"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "near": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "string", "pattern": "^[a-z]+$"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
INVOKE, INVOKE_CLOSE = f'<{DSML}invoke name="', f"</{DSML}invoke>\n"


@pytest.fixture(scope="module")
def toy() -> ChatTokenizer:
    """The bundled model's tokenizer: 1,280 ids."""
    return ChatTokenizer.from_file(Path(dsv4nb.__file__).parent / "toy" / "model" / "tokenizer.json")


def matcher_of(tokens: Any, width: int | None = None, **given: Any) -> Matcher:
    nothing: dict[str, Any] = {"response_format": None, "tool_choice": None, "tools": None}
    given.setdefault("tools_enabled", bool(given.get("tools")))
    constraint = constraint_of(**{**nothing, "thinking": False, **given})
    assert constraint is not None
    return compile_constraint(constraint, tokens).matcher(width or tokens.vocab_size)


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema}


def refused_at(matcher: Matcher, tokens: Any, ids: Iterable[int]) -> str | None:
    """The token at which a text departs from the grammar, None when it is whole and complete."""
    for token in (*ids, tokens.eos_id):
        if not matcher.mask()[token]:
            return str(tokens.token_bytes(token).decode(errors="replace"))
        matcher.advance(token)
    return None


def walk(matcher: Matcher, tokens: ChatTokenizer, rng: random.Random, *, free: int = 40) -> list[int]:
    """Take allowed tokens at random, and after `free` of them those that close what is open."""
    closers = [tokens.eos_id, tokens.id_of(DSML), *(tokens.encode_plain(t)[0] for t in ("</", '"', "}", "]", "0", ">"))]
    ids: list[int] = []
    while not ids or ids[-1] != tokens.eos_id:
        assert len(ids) < 600, tokens.decode(ids)
        mask = matcher.mask()
        allowed = np.flatnonzero(mask)
        token = int(rng.choice(allowed))
        if len(ids) >= free or (mask[tokens.eos_id] and rng.random() < 0.5):
            token = next((closer for closer in closers if mask[closer] and rng.random() < 0.9), token)
        matcher.advance(token)
        ids.append(token)
    return ids


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value against the keywords that this file uses."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    types: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float}
    if not isinstance(value, types[kind]) or isinstance(value, bool):
        return False
    if kind == "object":
        declared = schema.get("properties", {})
        in_order = [name for name in declared if name in value]
        if declared and list(value) != in_order:
            return False
        if not set(schema.get("required", ())) <= value.keys():
            return False
        return all(conforms(value[name], declared[name]) for name in in_order)
    if kind == "array":
        return len(value) <= schema.get("maxItems", 99) and all(conforms(item, schema["items"]) for item in value)
    if kind == "string":
        return True
    return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


@pytest.mark.parametrize("schema", [PERSON, {"type": "array", "items": PERSON, "maxItems": 2}, {"type": "number"}])
@pytest.mark.parametrize("seed", range(8))
def test_random_walks_of_a_schema_conform_to_it(schema: dict[str, Any], seed: int, toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, response_format=schema_of(schema))
    text = toy.decode(walk(matcher, toy, random.Random(seed))).removesuffix(EOS)
    assert conforms(json.loads(text), schema), text
    assert matcher.is_finished


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_of_json_object_are_objects(seed: int, toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, response_format={"type": "json_object"}, thinking=True)
    matcher.advance(toy.id_of(THINK_CLOSE))
    text = toy.decode(walk(matcher, toy, random.Random(seed))).removesuffix(EOS)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("blanks", "is_allowed"),
    [
        *((blanks, True) for blanks in ("", " ", "\n", "\n\t", "\n" + " " * 48)),
        *((blanks, False) for blanks in ("  ", "\n\n", "\t", " \n", "\n" + " " * 49)),
    ],
    ids=repr,
)
def test_blanks_between_json_tokens_have_an_end(blanks: str, is_allowed: bool, toy: ChatTokenizer) -> None:
    for text in (f'{{"a":{blanks}1}}', f'{{{blanks}"a": 1,{blanks}"b": 2}}', f'{{"a": [1{blanks}]}}'):
        matcher = matcher_of(toy, response_format={"type": "json_object"})
        assert (refused_at(matcher, toy, toy.encode_plain(text)) is None) == is_allowed


@pytest.mark.parametrize("style", [{}, {"indent": 4}, {"separators": (",", ":")}], ids=str)
def test_json_may_be_written_in_the_usual_styles(style: dict[str, Any], toy: ChatTokenizer) -> None:
    text = json.dumps({"a": [1, {"b": ["x", None]}], "c": {"d": {}}}, **style)
    matcher = matcher_of(toy, response_format={"type": "json_object"})
    assert refused_at(matcher, toy, toy.encode_plain(text)) is None


def test_nothing_stands_around_the_json(toy: ChatTokenizer) -> None:
    for text in (" {}", "{} ", "```json\n{}", "{}\n"):
        assert refused_at(matcher_of(toy, response_format={"type": "json_object"}), toy, toy.encode_plain(text))


def is_declared(call: ToolCall) -> bool:
    """Check names, order and types of a call to one of TOOLS."""
    arguments = json.loads(call.arguments_json)
    if call.name == "now":
        return not arguments
    names = [name for name in WEATHER["properties"] if name in arguments]
    return (
        call.name == "get_weather"
        and list(arguments) == names
        and {"city", "days"} <= arguments.keys()
        and isinstance(arguments["city"], str)
        and arguments["days"] in range(1, 10)
        and arguments.get("unit", "celsius") in ("celsius", "fahrenheit")
        and is_near(arguments.get("near"))
    )


def is_near(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch("[a-z]+", value) is not None
    return value is None or isinstance(value["x"], int | float)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_random_walks_of_a_demanded_call_are_declared_calls(choice: Any, seed: int, toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, tools=TOOLS, tool_choice=choice)
    text = toy.decode(walk(matcher, toy, random.Random(seed), free=90))
    message = parse_strict(text, thinking=False)
    assert message.content == "" and message.tool_calls
    assert all(map(is_declared, message.tool_calls)), message
    if choice != "required":
        assert [call.name for call in message.tool_calls] == ["get_weather"]
    splitter = Splitter(thinking=False, tools_enabled=True)
    assert (
        "".join(piece for channel, piece in splitter.feed(text) if channel == "tool") == text.strip("\n")[: -len(EOS)]
    )
    assert splitter.block_closed


def block(*invokes: str) -> str:
    return f"\n\n{CALLS_OPEN}\n" + "".join(invokes) + CALLS_CLOSE


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    tags = [f'<{DSML}parameter name="{n}" string="{flag}">{v}</{DSML}parameter>\n' for n, flag, v in parameters]
    return f'{INVOKE}{name}">\n' + "".join(tags) + INVOKE_CLOSE


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (block(invoke("now")), True),
        (block(f'{INVOKE}now">\n\n{INVOKE_CLOSE}'), True),  # as calls without arguments stand in the history
        (block(invoke("now"), invoke("get_weather", ("city", "true", "Oslo"), ("days", "false", "3"))), True),
        (block(invoke("get_weather", ("city", "true", "a </b>\n\n</ c"), ("days", "false", "3"))), True),
        (block(invoke("get_weather", ("city", "true", ""), ("days", "false", "3"))), True),
        (block(invoke("get_weather", ("city", "true", "x"), ("days", "false", "3"), ("near", "true", "bay"))), True),
        (block(invoke("get_weather", ("city", "true", "x"), ("days", "false", "3"), ("near", "true", "Bay"))), False),
        (block(invoke("get_weather", ("city", "true", "x"), ("days", "false", "3"), ("near", "false", "null"))), True),
        (
            block(invoke("get_weather", ("city", "true", "x"), ("unit", "true", "kelvin"), ("days", "false", "3"))),
            False,
        ),
        (block(invoke("get_weather", ("city", "false", '"x"'), ("days", "false", "3"))), False),
        (block(invoke("get_weather", ("city", "true", "x"), ("days", "true", "3"))), False),
        (block(invoke("get_weather", ("days", "false", "3"), ("city", "true", "x"))), False),
        (block(invoke("get_weather", ("city", "true", "x"))), False),
        (block(invoke("get_weather", ("city", "true", "x"), ("days", "false", "30"))), False),
        (block(invoke("weather")), False),
        (block(), False),
        (block(invoke("now")) + "\n", False),
        (block(invoke("now"))[1:], False),
        ("I look." + block(invoke("now")), False),
        ("{}", False),
    ],
)
def test_a_demanded_call_is_spelt_as_the_history_spells_it(text: str, is_allowed: bool, toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, tools=TOOLS, tool_choice="required")
    assert (refused_at(matcher, toy, toy.encode_trusted(text)) is None) == is_allowed


def test_a_named_function_is_called_once(toy: ChatTokenizer) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    for n in range(3):
        matcher = matcher_of(toy, tools=TOOLS, tool_choice=choice)
        outcome = refused_at(matcher, toy, toy.encode_trusted(block(*[invoke("now")] * n)))
        assert (outcome is None) == (n == 1)


def test_calls_of_auto_follow_the_grammar_once_they_are_opened(toy: ChatTokenizer) -> None:
    def outcome(text: str) -> str | None:
        return refused_at(matcher_of(toy, tools=TOOLS, tool_choice="auto"), toy, toy.encode_trusted(text))

    for text in ("", "Hello.\n\n<b>", "I look." + block(invoke("now")), block(invoke("now"))):
        assert outcome(text) is None, text
    assert outcome(f"see <{DSML}") == DSML
    assert outcome(f"\n\n<{DSML}function_calls>") is not None
    assert outcome(block(invoke("weather"))) is not None
    assert outcome(block(invoke("now")) + " and more") is not None


def test_a_format_leaves_the_reply_free_to_call(toy: ChatTokenizer) -> None:
    for given in ({"response_format": {"type": "json_object"}}, {"regex": r"\{.*\}"}):
        for text in ('{"a": 1}', block(invoke("now"))):
            assert refused_at(matcher_of(toy, tools=TOOLS, **given), toy, toy.encode_trusted(text)) is None
        assert refused_at(matcher_of(toy, tools=TOOLS, **given), toy, toy.encode_trusted("so " + block(invoke("now"))))


VALUE_CASES: list[tuple[Any, list[tuple[str, str]], list[tuple[str, str]]]] = [
    ({}, [("true", "x"), ("false", "1"), ("false", "[null]")], [("false", '"x"'), ("false", "x")]),
    (True, [("true", "x"), ("false", "{}")], [("false", '"x"')]),
    ({"type": ["string", "null"]}, [("true", "null"), ("false", "null")], [("false", "1")]),
    (
        {"enum": ["a/b", 'q"', "é\n\x01\u2028", 7]},
        [("true", 'q"'), ("true", "é\n\x01\u2028"), ("false", "7")],
        [("true", "7"), ("true", "a")],
    ),
    ({"const": "on"}, [("true", "on")], [("true", "o"), ("false", '"on"')]),
    ({"type": "string", "enum": ["abc", "xyz"], "pattern": "^a"}, [("true", "abc")], [("true", "xyz")]),
    ({"type": "string", "pattern": "b"}, [("true", "abc"), ("true", "b\n")], [("true", "ac"), ("true", "")]),
    ({"type": "string", "pattern": r"^a\d$|x$"}, [("true", "a1")], [("true", "a1 "), ("true", "1")]),
    ({"type": "string", "pattern": r"^\w+$"}, [("true", "a_1")], [("true", "é"), ("true", "a b")]),
    ({"type": "string", "pattern": r"\$"}, [("true", "1$2")], [("true", "12")]),
    (
        {"type": "string", "minLength": 2, "maxLength": 3},
        [("true", "éé"), ("true", "abc")],
        [("true", "a"), ("true", "abcd")],
    ),
    ({"type": "string", "minLength": 2, "pattern": "^a*$"}, [("true", "aaa")], [("true", "a"), ("true", "ab")]),
    (
        {"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
        [("true", "x"), ("false", "true")],
        [("false", "1")],
    ),
    ({"type": "object", "allOf": [{"required": ["q"]}]}, [("false", '{"q": 1}')], [("false", "{}"), ("true", "x")]),
    ({"type": "array", "items": {"$ref": "#/$defs/n"}}, [("false", "[1, 2]")], [("false", '["a"]')]),
    ({"$ref": "#/$defs/s"}, [("true", "hey")], [("true", "h"), ("false", "1")]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), VALUE_CASES, ids=lambda case: str(case)[:40])
def test_text_is_raw_and_all_else_is_json(
    schema: Any, good: list[tuple[str, str]], bad: list[tuple[str, str]], toy: ChatTokenizer
) -> None:
    shared = {"n": {"type": "integer"}, "s": {"type": "string", "minLength": 2, "title": "S"}}
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": shared}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for is_allowed, (flag, value) in [*((True, case) for case in good), *((False, case) for case in bad)]:
        text = block(invoke("f", ("v", flag, value)))
        matcher = matcher_of(toy, tools=tools, tool_choice="required")
        assert (refused_at(matcher, toy, toy.encode_trusted(text)) is None) == is_allowed, (flag, value)


def test_calls_of_the_history_are_calls_that_may_be_written(tokenizer: ChatTokenizer) -> None:
    calls = [
        {"function": {"name": "get_weather", "arguments": '{"city": "Zoë </b>", "days": 3, "near": {"x": -1.5e3}}'}},
        {"function": {"name": "now", "arguments": "{}"}},
        {"function": {"name": "get_weather", "arguments": '{"city": "", "unit": "celsius", "days": 9}'}},
    ]
    matcher = matcher_of(tokenizer, tools=TOOLS, tool_choice="required")
    text = "".join(piece for piece, _ in calls_block(calls, 0))
    assert refused_at(matcher, tokenizer, tokenizer.encode_trusted(text)) is None


def test_optional_parameters_may_each_be_left_out(toy: ChatTokenizer) -> None:
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in "abc"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for n in range(4):
        for names in itertools.permutations("abc", n):
            text = block(invoke("f", *((name, "true", "x") for name in names)))
            outcome = refused_at(matcher_of(toy, tools=tools, tool_choice="required"), toy, toy.encode_trusted(text))
            assert (outcome is None) == (list(names) == sorted(names)), names


def tools_with(schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}, **more}
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": schema_of({"properties": {"a": {"uniqueItems": True}}})}, "response_format", "uniqueItems"),
    ({"response_format": schema_of({"not": {"type": "string"}})}, "response_format", '"not"'),
    ({"response_format": schema_of({"type": "strnig"})}, "response_format", "strnig"),
    ({"response_format": schema_of({"oneOf": [{"type": "number"}, {"type": "integer"}]})}, "response_format", "oneOf"),
    ({"response_format": schema_of({"type": "string", "format": "zzz"})}, "response_format", "zzz"),
    ({"response_format": schema_of({"type": "string", "pattern": "(?=a)b"})}, "response_format", "look-around"),
    ({"response_format": schema_of({"$ref": "#/$defs/a"})}, "response_format", r"\$defs/a"),
    ({"response_format": schema_of({"minimum": 5, "maximum": 3, "type": "integer"})}, "response_format", "greater"),
    ({"regex": "a("}, "regex", "unclosed group"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"regex": r"(a)\1"}, "regex", "backreferences"),
    ({"regex": "a\\"}, "regex", "half an escape"),
    ({"regex": r"[^\s\S]"}, "regex", "nothing can match"),
    ({"regex": "a^b"}, "regex", "lookarounds"),
    (tools_with({"type": "array", "uniqueItems": True}), "tools", "'x' of the tool 'f' .*uniqueItems"),
    (tools_with({"type": "string", "not": {"const": "a"}}), "tools", "'x' of the tool 'f' has 'not'"),
    (tools_with({"type": "string", "pattern": "a("}), "tools", "unclosed"),
    (tools_with({"type": "string", "pattern": "a\\"}), "tools", "half an escape"),
    (tools_with({"type": "string", "pattern": "^ab$", "minLength": 5}), "tools", "nothing can match"),
    (tools_with({"type": "string", "minLength": "2"}), "tools", "'minLength' .* of type int"),
    (tools_with({"type": "string", "enum": [1]}), "tools", "no value has its type"),
    (tools_with({"type": "wrong"}), "tools", "wrong"),
    (tools_with({"type": 5}), "tools", "'type' .* of type list"),
    (tools_with(False), "tools", "must be an object"),
    (tools_with({"$ref": "#/$defs/q"}), "tools", r"refers to '#/\$defs/q'"),
    (tools_with({"$ref": "#/$defs/q"}, **{"$defs": {"q": {"$ref": "#/$defs/q"}}}), "tools", "not in a circle"),
    (tools_with({"anyOf": [{"type": "string"}], "minLength": 2}), "tools", "'minLength' beside 'anyOf'"),
    (tools_with({"oneOf": [{"minLength": 2}, {"maxLength": 3}]}), "tools", "'oneOf' with several kinds"),
    (tools_with({"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "integer"}]}), "tools", "oneOf"),
    (tools_with({"$ref": "#/$defs/q"}, **{"$defs": []}), "tools", r"refers to '#/\$defs/q'"),
    (tools_with({}, required=[["x"]]), "tools", r"requires the parameter \['x'\]"),
    (tools_with({}, required=["y"]), "tools", "requires the parameter 'y'"),
    (tools_with({}, minProperties=1), "tools", "have 'minProperties'"),
    (tools_with({}, type="array"), "tools", "of type 'object'"),
    (tools_with({}, properties=[]), "tools", "an object as 'properties'"),
    (tools_with({}, properties={'a"': {}}), "tools", "cannot be called"),
]


@pytest.mark.parametrize(("given", "param", "message"), REFUSALS, ids=lambda case: str(case)[:50])
def test_m19_what_cannot_be_enforced_is_named_within_a_second(
    given: dict[str, Any], param: str, message: str, tokenizer: ChatTokenizer
) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message) as refusal:
        matcher_of(tokenizer, **given)
    assert time.perf_counter() - start < 1
    assert refusal.value.param == param
    assert "\n" not in str(refusal.value)
