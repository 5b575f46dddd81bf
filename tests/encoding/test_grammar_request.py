"""What a request asks of its reply; none of this needs the grammar library."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from dsv4nb.encoding.grammar import Constraint, compile_constraint, constraint_of
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import RequestError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
JSON_OBJECT = {"type": "json_object"}


def tool(name: str, parameters: object = None, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def asked(**given: Any) -> Constraint | None:
    nothing: dict[str, Any] = {"response_format": None, "tool_choice": None, "tools": None}
    given.setdefault("tools_enabled", bool(given.get("tools")) and given.get("tool_choice") != "none")
    return constraint_of(**{**nothing, "thinking": False, **given})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [tool("f")]},
        {"tools": [tool("f")], "tool_choice": "auto"},
        {"tools": [tool("f", strict=False)], "tool_choice": "auto"},
        {"tools": [tool("f", strict=True)], "tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_no_constraint(given: dict[str, Any]) -> None:
    assert asked(**given) is None


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": SCHEMA}},
    ],
    ids=["bare", "nested"],
)
def test_both_places_of_a_schema_are_read_and_its_keys_keep_their_order(response_format: dict[str, Any]) -> None:
    constraint = asked(response_format=response_format)
    assert constraint == Constraint(answer="json", pattern=json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("given", "answer", "calls", "functions"),
    [
        ({"tool_choice": "required"}, "none", "many", ["f", "g"]),
        ({"tool_choice": named("g")}, "none", "one", ["g"]),
        ({"tool_choice": "auto", "response_format": JSON_OBJECT}, "json", "many", ["f", "g"]),
        ({"regex": "a+"}, "regex", "many", ["f", "g"]),
        ({"regex": "a+", "tool_choice": "none"}, "regex", "none", []),
    ],
    ids=str,
)
def test_a_choice_decides_whether_and_what_may_be_called(
    given: dict[str, Any], answer: str, calls: str, functions: list[str]
) -> None:
    constraint = asked(tools=[tool("f"), tool("g")], thinking=True, **given)
    assert constraint is not None
    assert (constraint.answer, constraint.calls) == (answer, calls)
    assert [function["name"] for function in json.loads(constraint.functions)] == functions
    assert constraint.thinking


def test_a_strict_function_constrains_the_calls_of_auto() -> None:
    constraint = asked(tools=[tool("f", strict=True)], tool_choice="auto")
    assert constraint is not None
    assert (constraint.answer, constraint.calls, constraint.has_tools) == ("text", "many", True)


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object, not str"),
        ({"response_format": {"type": "jsonobject"}}, "response_format", "did you mean 'json_object'"),
        ({"response_format": {"type": "xml"}}, "response_format", "one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "lacks its schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            "response_format",
            "two schemas",
        ),
        ({"response_format": {"type": "json_schema", "schema": []}}, "response_format", "an object, not list"),
        ({"response_format": {"type": "json_schema", "schema": {"const": {1}}}}, "response_format", "as JSON"),
        ({"response_format": {"type": "json_schema", "schema": {"const": "\ud800"}}}, "response_format", "as JSON"),
        ({"regex": ""}, "regex", "at least one character"),
        ({"regex": 3}, "regex", "at least one character"),
        ({"regex": "a", "response_format": JSON_OBJECT}, "regex", "pass one of them"),
        ({"tool_choice": "required"}, "tool_choice", "given without tools"),
        ({"tool_choice": "auto"}, "tool_choice", "given without tools"),
        ({"tool_choice": named("f")}, "tool_choice", "given without tools"),
        ({"tool_choice": "reqired", "tools": [tool("f")]}, "tool_choice", "did you mean 'required'"),
        ({"tool_choice": 1, "tools": [tool("f")]}, "tool_choice", "one of auto, none, required"),
        ({"tool_choice": {"type": "function"}, "tools": [tool("f")]}, "tool_choice", '"function"'),
        ({"tool_choice": named("opn"), "tools": [tool("open"), tool("shut")]}, "tool_choice", "mean 'open'"),
        ({"tool_choice": "required", "tools": [tool("f")], "regex": "a"}, "tool_choice", "a call and regex a text"),
        ({"tool_choice": named("f"), "tools": [tool("f")], "response_format": JSON_OBJECT}, "tool_choice", "'auto'"),
        ({"tools": {}}, "tools", "must be a list, not dict"),
        ({"tools": [{"type": "function"}]}, "tools", "tool 0 must be an object with a 'function'"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_name(given: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        asked(**given)
    assert refusal.value.param == param


def test_a_constraint_survives_its_json() -> None:
    constraint = asked(tools=[tool("f", SCHEMA), tool("é")], tool_choice="required", thinking=True)
    assert constraint is not None
    assert Constraint.from_json(constraint.to_json()) == constraint


@pytest.mark.parametrize(
    "text", ["", "[]", '{"answer": "json"}', Constraint(answer="json").to_json().replace("son", "s")]
)
def test_json_that_is_no_constraint_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="constraint") as refusal:
        Constraint.from_json(text)
    assert refusal.value.param == "constraint"


def test_without_the_library_a_grammar_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tokenizer: ChatTokenizer
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for param, given in (
        ("response_format", {"response_format": JSON_OBJECT}),
        ("regex", {"regex": "a"}),
        ("tool_choice", {"tools": [tool("f")], "tool_choice": "required"}),
    ):
        constraint = asked(**given)
        assert constraint is not None
        with pytest.raises(RequestError, match=r"pip install 'dsv4nb\[constrained\]'") as refusal:
            compile_constraint(constraint, tokenizer)
        assert refusal.value.param == param
