"""The strict parser against the official one, and the tolerant one against it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.constants import ASSISTANT, BOS, CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.parse import ParsedMessage, ToolCall, parse_strict, parse_tolerant
from dsv4nb.encoding.render import render_text
from dsv4nb.errors import ParseError


def test_replies_parse_as_the_official_parser_does(parse_vector: dict[str, Any]) -> None:
    reference = parse_vector["reference"]
    thinking = parse_vector["thinking_mode"] == "thinking"
    if not reference["ok"]:
        with pytest.raises(ParseError):
            parse_strict(parse_vector["text"], thinking=thinking)
        return
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in reference["tool_calls"])
    expected = ParsedMessage(reference["reasoning"], reference["content"], calls)
    assert parse_strict(parse_vector["text"], thinking=thinking) == expected


def test_m68_any_reply_parses_as_the_serving_parser_does(parse_vector: dict[str, Any]) -> None:
    tolerant = parse_vector["tolerant"]
    thinking = parse_vector["thinking_mode"] == "thinking"
    parsed = parse_tolerant(parse_vector["text"], thinking=thinking, tools_enabled=parse_vector["tools_enabled"])
    assert (parsed.reasoning, parsed.content) == (tolerant["reasoning"], tolerant["content"])
    assert parsed.tool_calls == tuple(ToolCall(call["name"], call["arguments"]) for call in tolerant["tool_calls"])
    assert (sorted(parsed.anomalies), parsed.ending) == (tolerant["anomalies"], tolerant["ended"])
    # an argument that is no JSON, and a block where no tools were offered
    if parse_vector["reference"]["ok"] and parse_vector["id"] not in ("p37", "p45"):
        strict = parse_strict(parse_vector["text"], thinking=thinking)
        assert ParsedMessage(parsed.reasoning, parsed.content, parsed.tool_calls) == strict
        assert not parsed.anomalies


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a{EOS}", "stop"),
        ("a", "length"),
        (f"{CALLS_OPEN}\n{CALLS_CLOSE}{EOS}", "stop"),
        (f'{CALLS_OPEN}\n<{DSML}invoke name="f">\n</{DSML}invoke>\n{CALLS_CLOSE}', "tool_calls"),
        (f'{CALLS_OPEN}\n<{DSML}invoke name="f">\n</{DSML}invoke>\n{CALLS_CLOSE}{EOS}', "tool_calls"),
        (f'{CALLS_OPEN}\n<{DSML}invoke name="f">\n</{DSML}invoke>\n{EOS}', "tool_calls"),
        (f'{CALLS_OPEN}\n<{DSML}invoke name="f">\n</{DSML}invoke>\n', "length"),
    ],
)
def test_a_reply_says_why_it_ended(text: str, reason: str) -> None:
    assert parse_tolerant(text, thinking=False, tools_enabled=True).finish_reason == reason


def test_a_block_within_the_reasoning_ends_it() -> None:
    block = f'{CALLS_OPEN}\n<{DSML}invoke name="open_file">\n<{DSML}parameter name="path" string="true">notes.md'
    block += f"</{DSML}parameter>\n</{DSML}invoke>\n{CALLS_CLOSE}"
    parsed = parse_tolerant(f"I should read it first.\n\n{block}{EOS}", thinking=True, tools_enabled=True)
    assert (parsed.reasoning, parsed.content) == ("I should read it first.", "")
    assert parsed.tool_calls == (ToolCall("open_file", '{"path": "notes.md"}'),)
    assert parsed.finish_reason == "tool_calls"
    text = f"The tag <{DSML} is internal.{THINK_CLOSE}Done.{EOS}"
    parsed = parse_tolerant(text, thinking=True, tools_enabled=True)
    assert (parsed.reasoning, parsed.content) == (f"The tag <{DSML} is internal.", "Done.")
    assert (parsed.tool_calls, parsed.anomalies) == ((), ())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("no end", EOS),
        (f"a{EOS}b", "follows"),
        (f"a{THINK_OPEN}{EOS}", THINK_OPEN),
        (f"\n\n<{DSML}tool_calls>{EOS}", "newline"),
        (f"\n\n<{DSML}tool_calls>\nx", "invocations only"),
        (f"\n\n<{DSML}tool_calls>\n<{DSML}invoke nam", "name="),
    ],
)
def test_an_error_says_what_is_wrong(text: str, names: str) -> None:
    with pytest.raises(ParseError, match=names):
        parse_strict(text, thinking=False)


def generated(message: dict[str, Any], *, thinking: bool) -> str:
    """Return what the model would have written for `message`."""
    prompt = render_text([{"role": "user", "content": "q"}, message], revision="v0731", thinking=thinking)
    if thinking:
        return prompt.partition(f"{ASSISTANT}{THINK_OPEN}")[2]
    return prompt.partition(f"{ASSISTANT}{THINK_CLOSE}")[2]


FLAGGED = [
    ("a", "true", "5", '"5"'),
    ("b", "false", "5", "5"),
    ("c", "true", "true", '"true"'),
    ("d", "false", "null", "null"),
    ("e", "true", "007", '"007"'),
    ("f", "true", "[1, 2]", '"[1, 2]"'),
    ("g", "false", '{"x": {"y": [1, {"z": "}]"}]}}', '{"x": {"y": [1, {"z": "}]"}]}}'),
    ("h", "true", "", '""'),
    ("i", "true", " two\n lines ", '" two\\n lines "'),
    ("j", "true", '"q"', '"\\"q\\""'),
]


def test_the_string_flag_alone_decides_the_type() -> None:
    lines = [
        f'<{DSML}parameter name="{name}" string="{flag}">{raw}</{DSML}parameter>\n' for name, flag, raw, _ in FLAGGED
    ]
    invoke = f'<{DSML}invoke name="probe">\n{"".join(lines)}</{DSML}invoke>\n'
    text = f"{THINK_CLOSE}\n\n<{DSML}tool_calls>\n{invoke}</{DSML}tool_calls>{EOS}"
    parsed = parse_strict(text, thinking=True)
    arguments = ", ".join(f'"{name}": {value}' for name, _, _, value in FLAGGED)
    assert parsed == ParsedMessage("", "", (ToolCall("probe", f"{{{arguments}}}"),))
    tolerant = parse_tolerant(text, thinking=True, tools_enabled=True)
    assert (tolerant.tool_calls, tolerant.anomalies) == (parsed.tool_calls, ())
    # back in the history the call is written as it was generated
    call = {"function": {"name": "probe", "arguments": parsed.tool_calls[0].arguments_json}}
    assert generated({"role": "assistant", "content": "", "tool_calls": [call]}, thinking=True) == text


CONTROLS = (BOS, EOS, THINK_OPEN, THINK_CLOSE, DSML)
# drawn towards what the format is made of, short of its control tokens
texts = st.lists(
    st.sampled_from(
        ["<", ">", "/", "</", "｜", "DSML", "\n", "\n\n", '"', "\\", "name=", "{", "}", "7", "null", "é👍🏽"]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    max_size=6,
).map("".join)
texts = texts.filter(lambda text: not any(control in text for control in CONTROLS))
names = st.from_regex(r"[A-Za-z_.\-世]{1,12}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)


@settings(max_examples=80, deadline=None, derandomize=True)  # the fuzz scripts go on from here
@given(texts, texts, calls, st.booleans())
def test_a_rendered_message_parses_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    functions = [{"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} for name, arguments in calls]
    message = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }
    text = generated(message, thinking=thinking)
    parsed = parse_strict(text, thinking=thinking)
    expected = tuple(ToolCall(function["name"], function["arguments"]) for function in functions)
    assert parsed == ParsedMessage(reasoning if thinking else "", content, expected)
    tolerant = parse_tolerant(text, thinking=thinking, tools_enabled=True)
    assert ParsedMessage(tolerant.reasoning, tolerant.content, tolerant.tool_calls) == parsed
    assert not tolerant.anomalies
    again = {**message, "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments_json}} for c in expected]}
    assert generated(again, thinking=thinking) == generated(message, thinking=thinking)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts.filter(lambda text: "\n" not in text), st.dictionaries(texts, values, max_size=3))
def test_names_that_no_one_escapes_are_read_as_the_official_parser_does(name: str, arguments: dict[str, Any]) -> None:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    text = generated({"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, thinking=False)
    tolerant = parse_tolerant(text, thinking=False, tools_enabled=True)
    try:
        strict = parse_strict(text, thinking=False)
    except ParseError:
        return  # a name that looks like the end of its header
    assert tolerant.tool_calls == strict.tool_calls or "invalid_json_arg" in tolerant.anomalies
