"""What a request may hold, and what becomes of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.constants import ASSISTANT, DSML, THINK_CLOSE, THINK_OPEN, Revision
from dsv4nb.encoding.policy import Reasoning, normalize, reasoning
from dsv4nb.encoding.render import render, render_text
from dsv4nb.errors import EncodingError, PromptEmpty

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
USER = {"role": "user", "content": "q"}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def calling(arguments: object) -> list[Any]:
    return [USER, assistant(tool_calls=[{"id": "c1", "function": {"name": "t", "arguments": arguments}}])]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": [], "name": "ann"}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\n\nb"},
        ),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        (assistant(reasoning="r"), assistant(reasoning_content="r")),
        (assistant(reasoning_content="r", reasoning="x"), assistant(reasoning_content="r")),
        (assistant(reasoning_content=None, reasoning=None, tool_calls=None), assistant()),
        (assistant(tool_calls=[], refusal=None, annotations=[]), assistant()),
        (assistant(content="beg", prefix=True), assistant(content="beg", wo_eos=True)),
        (assistant(prefix=False), assistant()),
        (
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
        ),
        ({"role": "tool", "content": None, "tool_call_id": None}, {"role": "tool", "content": ""}),
    ],
)
def test_a_message_becomes_what_the_encoder_takes(message: dict[str, Any], expected: dict[str, Any]) -> None:
    given = copy.deepcopy(message)
    assert normalize([message], expects_reply=False) == [expected]
    assert message == given


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, "{}"),
        ("", "{}"),
        (" \n", "{}"),
        ("null", "{}"),
        ({}, "{}"),
        ({"a": 1, "é": [None]}, '{"a": 1, "é": [null]}'),
        ('{"a":  1.50}', '{"a":  1.50}'),
        ("[1, 2]", '{"arguments": [1, 2]}'),
        ("7", '{"arguments": 7}'),
        ([1, 2], '{"arguments": [1, 2]}'),
        (False, '{"arguments": false}'),
        ("city=Paris", "city=Paris"),
    ],
)
def test_arguments_become_the_text_of_an_object(arguments: object, expected: str) -> None:
    messages = normalize(calling(arguments), expects_reply=False)
    assert messages[1]["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "t", "arguments": expected},
    }
    render(messages, revision="v0731", thinking=True)


def test_arguments_as_text_and_as_an_object_encode_alike() -> None:
    arguments = {"path": "notes.md", "lines": [1, 20], "flags": {"raw": True}}
    for form in (arguments, json.dumps(arguments), json.dumps(arguments, separators=(",", ":"))):
        function = {"name": "open_file", "arguments": form}
        call = {"type": "function", "function": function}
        messages = normalize([USER, assistant(tool_calls=[call]), {"role": "tool", "content": "x"}])
        assert (
            f'<{DSML}invoke name="open_file">\n'
            f'<{DSML}parameter name="path" string="true">notes.md</{DSML}parameter>\n'
            f'<{DSML}parameter name="lines" string="false">[1, 20]</{DSML}parameter>\n'
            f'<{DSML}parameter name="flags" string="false">{{"raw": true}}</{DSML}parameter>\n'
            f"</{DSML}invoke>\n"
        ) in render_text(messages, revision="v0731", thinking=False)


def test_arguments_that_are_no_json_become_one_raw_parameter() -> None:
    text = render_text(normalize(calling("city=Paris"), expects_reply=False), revision="v0731", thinking=False)
    assert f'<{DSML}parameter name="arguments" string="true">city=Paris</{DSML}parameter>' in text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_and_format_join_the_leading_system_message(role: str) -> None:
    schema = {"type": "json_object"}
    messages = normalize([{"role": role, "content": "s"}, USER], tools=[TOOL], response_format=schema)
    assert messages == [{"role": "system", "content": "s", "tools": [TOOL], "response_format": schema}, USER]


def test_tools_bring_an_empty_system_message_along() -> None:
    assert normalize([USER], tools=[TOOL]) == [{"role": "system", "content": "", "tools": [TOOL]}, USER]


@pytest.mark.parametrize(("tools", "response_format"), [(None, None), ([], None), (None, {"type": "text"})])
def test_nothing_asked_for_adds_nothing(tools: list[Any] | None, response_format: dict[str, Any] | None) -> None:
    assert normalize([USER], tools=tools, response_format=response_format) == [USER]


TEXT_PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("q", "must be an object, not str"),
        ({}, "role is None"),
        ({"role": "function", "content": "x"}, "'function'; it must be one of system"),
        ({"role": ["user"], "content": "x"}, "role is"),
        ({"role": "latest_reminder", "content": "x"}, "latest_reminder"),
        ({"role": "system", "content": "x"}, "must be the first"),
        ({"role": "developer", "content": "x"}, "a developer message must be the first"),
        ({"role": "user", "content": 3}, "content must be text or a list of parts, not int"),
        ({"role": "user", "content": {"type": "text"}}, "not dict"),
        ({"role": "user", "content": ["a"]}, "part 0 must be an object with a 'type'"),
        ({"role": "user", "content": [TEXT_PART, {"type": "image_url"}]}, "part 1 is of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "part 0 must have a 'text', not null"),
        ({"role": "user", "content": "a\ud800"}, "half a surrogate pair at character 1"),
        (assistant(reasoning_content=3), "reasoning_content must be text, not int"),
        (assistant(reasoning=[]), "reasoning must be text, not list"),
        (assistant(tool_calls={}), "tool_calls must be a list, not dict"),
        (assistant(tool_calls=["t"]), "tool call 0 must be an object with a 'function'"),
        (assistant(tool_calls=[{"function": {"name": 3}}]), "tool call 0: the name must be text, not int"),
        (assistant(tool_calls=[{"id": 3, "function": {"name": "t"}}]), "id must be text, not int"),
        (assistant(tool_calls=[{"type": "custom", "function": {"name": "t"}}]), "type 'custom'"),
        (assistant(tool_calls=[{"function": {"name": "t", "arguments": {1, 2}}}]), "cannot be written as JSON"),
        (assistant(tool_calls=[{"function": {"name": "t", "arguments": {"a": {1}}}}]), "cannot be written as JSON"),
        (assistant(tool_calls=[{"function": {"name": "t", "arguments": "[" * 200_000}}]), "nested too deeply"),
        (assistant(prefix="yes"), "prefix must be true or false, not str"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id must be text, not int"),
    ],
)
def test_m46_what_is_not_understood_is_refused_with_its_index(message: object, names: str) -> None:
    with pytest.raises(EncodingError, match=f"^message 1: .*{names}") as caught:
        normalize([USER, message])  # type: ignore[list-item]
    assert caught.value.index == 1


def test_a_string_is_one_user_message() -> None:
    assert normalize("q", tools=[TOOL]) == [{"role": "system", "content": "", "tools": [TOOL]}, USER]


def test_an_empty_string_is_an_empty_prompt() -> None:
    with pytest.raises(PromptEmpty):
        normalize("")


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([{"role": "system", "content": "s"}], "message 0: .*add a user message"),
        ([USER, assistant(content="a")], "message 1: .*finished reply"),
        ([USER, assistant(content="a", prefix=False)], "message 1: .*finished reply"),
    ],
)
def test_a_conversation_that_leaves_nothing_to_write_is_refused(messages: list[Any], names: str) -> None:
    with pytest.raises(EncodingError, match=names):
        normalize(messages)
    normalize(messages, expects_reply=False)


@pytest.mark.parametrize("last", [USER, {"role": "tool", "content": "5"}])
def test_m45_what_expects_a_reply_ends_in_the_assistants_header(last: dict[str, Any]) -> None:
    messages = normalize([{"role": "developer", "content": "s"}, *calling({}), last])
    assert render_text(messages, revision="v0731", thinking=True).endswith(f"{ASSISTANT}{THINK_OPEN}")
    assert render_text(messages, revision="v0731", thinking=False).endswith(f"{ASSISTANT}{THINK_CLOSE}")


def test_only_the_last_message_can_be_continued() -> None:
    with pytest.raises(EncodingError, match=r"^message 0: only the last"):
        normalize([assistant(prefix=True), USER])


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": b"q"}, "messages must be text or a list, not bytes"),
        ({"messages": None}, "messages must be text or a list, not null"),
        ({"messages": USER}, "messages must be text or a list, not dict"),
        ({"tools": TOOL}, "tools must be a list, not dict"),
        ({"tools": [TOOL, "t"]}, "tool 1 must be an object with a 'function', not str"),
        ({"tools": [{"function": {}}]}, "tool 0 must have a 'name', not null"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tool 0 is of type 'web_search'"),
        ({"response_format": "json"}, "response_format must be an object, not str"),
        ({"response_format": {"type": "xml"}}, "response_format is of type 'xml'"),
    ],
)
def test_a_request_of_a_wrong_shape_is_refused_by_name(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(EncodingError, match=names):
        normalize(**{"messages": [USER], **arguments})


@pytest.mark.parametrize(
    ("effort", "preview", "v0731"),
    [
        ("minimal", None, "low"),
        ("low", None, "low"),
        ("medium", None, "high"),
        ("high", "high", "high"),
        ("xhigh", "max", "high"),
        ("max", "max", "max"),
        ("ultra", "max", "max"),
        (None, None, None),
    ],
)
def test_an_effort_becomes_the_checkpoints_level(effort: str | None, preview: str | None, v0731: str | None) -> None:
    by_revision: list[tuple[Revision, str | None]] = [("preview", preview), ("v0731", v0731)]
    for revision, level in by_revision:
        mode = reasoning(effort, revision=revision)
        assert mode == Reasoning(thinking=True, effort=level)
        render([USER], revision=revision, thinking=mode.thinking, effort=mode.effort)


CHAT = Reasoning(thinking=False, effort=None)


def test_thinking_is_on_unless_switched_off() -> None:
    assert reasoning(None, revision="v0731", thinking=False) == CHAT
    assert reasoning("max", revision="v0731", thinking=False) == CHAT
    assert reasoning("none", revision="v0731") == CHAT
    assert reasoning("none", revision="v0731", thinking=True) == CHAT
    assert reasoning(None, revision="v0731", default="none") == CHAT
    assert reasoning(None, revision="v0731", default="high") == Reasoning(thinking=True, effort="high")
    assert reasoning("low", revision="v0731", default="high") == Reasoning(thinking=True, effort="low")


@pytest.mark.parametrize("effort", ["hard", "", 3, ["low"]])
def test_m69_an_unknown_effort_is_refused_even_in_chat_mode(effort: Any) -> None:
    with pytest.raises(EncodingError, match="one of none, minimal, low, medium, high"):
        reasoning(effort, revision="v0731", thinking=False)


keys = ["role", "content", "type", "text", "id", "function", "name", "arguments", "tool_calls", "reasoning", "prefix"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "{}", "[1]", "\ud800", '"\\ud800"', ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner, max_size=4),
    max_leaves=8,
)
# drawn to pass often: most messages have a known role and text
messages_like = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "user"]), "content": st.text() | json_values},
        optional={"reasoning": json_values, "tool_calls": json_values, "prefix": json_values},
    )
    | json_values,
    max_size=4,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(messages_like | json_values, st.none() | json_values, st.none() | json_values, st.booleans())
def test_whatever_looks_like_a_request_is_encoded_or_refused_by_name(
    messages: Any, tools: Any, response_format: Any, expects_reply: bool
) -> None:
    try:
        normalized = normalize(messages, tools=tools, response_format=response_format, expects_reply=expects_reply)
    except (EncodingError, PromptEmpty):
        return
    # what the policy lets through, the encoder takes
    render(normalized, revision="v0731", thinking=True)
