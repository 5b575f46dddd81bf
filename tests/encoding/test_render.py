"""Prompts against the official encoder's, text and ids."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.constants import BOS, DSML, EFFORT_ABSOLUTE, EFFORT_BEYOND, EOS, Revision
from dsv4nb.encoding.render import render, render_text
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import EncodingError

REVISIONS: tuple[Revision, ...] = get_args(Revision)
OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "encoding" / "official"
OFFICIAL_SHA256 = {
    "test_output_1.txt": "9b366d9d2eac842a6e890594aac0b58648e5623717202b33497afadf03e26540",
    "test_output_2.txt": "ca66b01a1ac3a204bb032c928fb607d4877171e998a50f7f89f39fa821b75665",
    "test_output_3.txt": "b3b1cd8748b7b90d3c6be6da3f786f12e4d70be073bd445ea162dfad4dc01a64",
    "test_output_4.txt": "60e1643840ba9e4aeede450feb7b0498fa66ee24e4a939d48855ce04ec6fc375",
}

# the text of their messages spells added tokens, which only the official string turns into control ids
SPELL_CONTROL = {"e41", "e51", "e80"}


def options(vector: dict[str, Any], revision: Revision) -> dict[str, Any]:
    given = vector["options"]
    # e75 asks for the mode "auto"; a bool cannot, so there is nothing to refuse
    assert given["thinking_mode"] in ("chat", "thinking")
    return {
        "revision": revision,
        "thinking": given["thinking_mode"] == "thinking",
        "effort": given["reasoning_effort"],
        "drop_thinking": given["drop_thinking"],
        "add_bos": given["add_default_bos_token"],
        "context": vector["context"],
    }


@pytest.mark.parametrize("revision", REVISIONS)
def test_prompts_equal_the_official_encoders(
    encode_vector: dict[str, Any], revision: Revision, tokenizer: ChatTokenizer
) -> None:
    if encode_vector["id"] == "e75":
        assert "error" in encode_vector["expected"]["both"]
        assert encode_vector["options"]["thinking_mode"] == "auto"
        return
    expected = encode_vector["expected"]
    expected = expected.get("both") or expected[revision]
    arguments = options(encode_vector, revision)
    if "error" in expected:
        with pytest.raises(EncodingError):
            render(encode_vector["messages"], **arguments)
        return
    segments = render(encode_vector["messages"], **arguments)
    text = "".join(segment.text for segment in segments)
    assert text == expected["prompt"]
    assert tokenizer.encode_segments(segments, trust_text=True) == expected["ids"]
    assert tokenizer.encode_trusted(text) == expected["ids"]
    safe = tokenizer.encode_segments(segments)
    assert (safe == expected["ids"]) == (encode_vector["id"] not in SPELL_CONTROL)
    assert tokenizer.decode(safe) == text


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_official_pairs_match_byte_for_byte(number: int, revision: Revision) -> None:
    if not OFFICIAL.is_dir():
        pytest.skip("the vectors that ship with the checkpoint are not beside this checkout")
    raw = json.loads((OFFICIAL / f"test_input_{number}.json").read_text(encoding="utf-8"))
    messages = raw if isinstance(raw, list) else raw["messages"]
    if isinstance(raw, dict):
        messages[0]["tools"] = raw["tools"]
    expected = (OFFICIAL / f"test_output_{number}.txt").read_bytes()
    assert hashlib.sha256(expected).hexdigest() == OFFICIAL_SHA256[f"test_output_{number}.txt"]
    assert render_text(messages, revision=revision, thinking=number != 4).encode() == expected


def shared(left: list[int], right: list[int]) -> int:
    """Count leading ids both have."""
    unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))


def test_turn_pairs_share_the_prefix_the_cache_counts_on(
    prefix_vector: dict[str, Any], tokenizer: ChatTokenizer
) -> None:
    def prompt(turn: dict[str, Any], *more: dict[str, Any]) -> str:
        thinking = turn["thinking_mode"] == "thinking"
        effort = turn["reasoning_effort"]
        return render_text([*turn["messages"], *more], revision="v0731", thinking=thinking, effort=effort)

    turn, reply = prefix_vector["turn_1"], prefix_vector["reply"]
    first = tokenizer.encode_trusted(prompt(turn))
    second = tokenizer.encode_trusted(prompt(prefix_vector["turn_2"]))
    assert len(first) == prefix_vector["prompt_1_tokens"]
    assert len(second) == prefix_vector["prompt_2_tokens"]
    assert shared(first, second) == prefix_vector["common_with_prompt_1"]
    if reply is None:
        return
    text = prompt(turn, reply)
    if prefix_vector["id"] == "x17":  # the model wrote the call without the blank line
        text = text.replace(f'name="ping">\n\n</{DSML}invoke>', f'name="ping">\n</{DSML}invoke>')
    live = tokenizer.encode_trusted(text)
    assert len(live) == len(first) + prefix_vector["generated_tokens"]
    assert shared(live, second) == prefix_vector["common_with_prompt_1_plus_generated"]


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "reasoning_content": "add", "content": "5"},
    {"role": "user", "content": "double it"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOL = [{**CONVERSATION[0], "tools": [TOOL]}, *CONVERSATION[1:]]


def test_old_reasoning_is_dropped_without_tools() -> None:
    assert render_text(CONVERSATION, revision="v0731", thinking=True) == (
        f"{BOS}Be brief.<｜User｜>2+3?<｜Assistant｜></think>5{EOS}<｜User｜>double it<｜Assistant｜><think>"
    )


def test_all_reasoning_is_kept_with_tools() -> None:
    text = render_text(WITH_TOOL, revision="v0731", thinking=True)
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n")
    assert text.endswith(
        f"<｜User｜>2+3?<｜Assistant｜><think>add</think>5{EOS}<｜User｜>double it<｜Assistant｜><think>"
    )


@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
def test_effort_changes_nothing_in_chat_mode(effort: str | None) -> None:
    text = render_text(CONVERSATION, revision="v0731", thinking=False, effort=effort)
    assert text.startswith(f"{BOS}Be brief.")
    assert text.endswith("<｜User｜>double it<｜Assistant｜></think>")


@pytest.mark.parametrize(
    ("revision", "effort", "prefix"),
    [
        ("v0731", None, ""),
        ("v0731", "low", ""),
        ("v0731", "high", EFFORT_ABSOLUTE),
        ("v0731", "max", EFFORT_BEYOND),
        ("preview", None, ""),
        ("preview", "high", ""),
        ("preview", "max", EFFORT_ABSOLUTE),
    ],
)
def test_m69_effort_writes_its_text_after_bos(revision: Revision, effort: str | None, prefix: str) -> None:
    text = render_text(CONVERSATION, revision=revision, thinking=True, effort=effort)
    assert text.startswith(f"{BOS}{prefix}Be brief.")


def test_an_unknown_effort_names_the_known_ones() -> None:
    with pytest.raises(EncodingError, match=r"'medium'.*low, high, max"):
        render(CONVERSATION, revision="v0731", thinking=True, effort="medium")


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "user", "content": 3}], 2),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": [3]}], 1),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "poet", "content": "c"}], 2),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "tool", "content": "b"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "t", "arguments": "[1]"}}]},
            ],
            2,
        ),
        ([{"role": "user", "content": "a"}, "b"], 1),
        ([{"content": "a"}], 0),
        ([{"role": ["user"]}], 0),
        ([{"role": "user", "content": "a", "task": {}}], 0),
        ([{"role": "assistant", "tool_calls": 5}], 0),
        ([{"role": "system", "tools": 5}], 0),
        ([{"role": "system", "tools": [5]}], 0),
        ([{"role": "system", "response_format": {"a": {1, 2}}}], 0),
    ],
)
def test_an_error_names_the_message_as_the_caller_counts(messages: list[Any], index: int) -> None:
    with pytest.raises(EncodingError, match=f"^message {index}: ") as caught:
        render(messages, revision="v0731", thinking=True)
    assert caught.value.index == index


def test_deeply_nested_arguments_are_refused() -> None:
    call = {"function": {"name": "t", "arguments": '{"a":' + "[" * 200_000}}
    with pytest.raises(EncodingError, match="nested too deeply"):
        render([{"role": "assistant", "tool_calls": [call]}], revision="v0731", thinking=False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "{}", "[1]", "text", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "id", "function", "name", "arguments"]), inner, max_size=4)
    ),
    max_leaves=8,
)
# drawn to be nearly right: known keys, mostly known roles, anything as a value
messages_like = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "latest_reminder"])
            | json_values
        },
        optional={
            key: json_values
            for key in ("content", "reasoning_content", "tool_calls", "tool_call_id", "tools", "task", "wo_eos")
        },
    )
    | json_values,
    max_size=5,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(messages_like, st.booleans())
def test_whatever_looks_like_a_conversation_renders_or_is_refused_by_name(messages: list[Any], thinking: bool) -> None:
    with contextlib.suppress(EncodingError):
        render(messages, revision="v0731", thinking=thinking)


def test_rendering_and_encoding_a_conversation_is_quick(tokenizer: ChatTokenizer) -> None:
    turns = [
        {"role": role, "content": f"Turn {n}: the quick brown fox jumps over the lazy dog, twice on Sundays."}
        for n in range(16)
        for role in ("user", "assistant")
    ][:-1]

    def encode() -> int:
        return len(tokenizer.encode_segments(render(turns, revision="v0731", thinking=True)))

    assert 600 <= encode() <= 800
    walls = []
    for _ in range(5):  # the machine may be busy; one quiet run is enough
        start = time.perf_counter()
        encode()
        walls.append(time.perf_counter() - start)
    assert min(walls) < 0.020
