"""Channels of generated text, whatever the cuts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.detokenize import Detokenizer
from dsv4nb.encoding.parse import ToolCall, parse_strict
from dsv4nb.encoding.stream_parse import Channel, Splitter
from dsv4nb.encoding.tokens import ChatTokenizer

Pieces = list[tuple[Channel, str]]

BLOCK = (
    f'{CALLS_OPEN}\n<{DSML}invoke name="open_file">\n'
    f'<{DSML}parameter name="path" string="true">notes.md</{DSML}parameter>\n'
    f"</{DSML}invoke>\n{CALLS_CLOSE}"
)


def joined(pieces: Iterable[tuple[Channel, str]]) -> Pieces:
    """Join neighbours of one channel."""
    out: Pieces = []
    for channel, text in pieces:
        if out and out[-1][0] == channel:
            text = out.pop()[1] + text
        out.append((channel, text))
    return out


def split(deltas: Iterable[str], *, thinking: bool, tools_enabled: bool = True) -> tuple[Pieces, bool]:
    splitter = Splitter(thinking=thinking, tools_enabled=tools_enabled)
    pieces = [piece for delta in deltas for piece in splitter.feed(delta)]
    pieces += splitter.flush()
    assert all(text for _, text in pieces)
    return joined(pieces), splitter.block_closed


def of(pieces: Pieces, channel: Channel) -> str:
    return "".join(text for c, text in pieces if c == channel)


@pytest.mark.parametrize(
    ("text", "thinking", "tools", "expected"),
    [
        ("Hi.", False, True, [("content", "Hi.")]),
        (
            f"r{THINK_CLOSE}c{EOS}",
            True,
            True,
            [("reasoning", "r"), ("hidden", THINK_CLOSE), ("content", "c"), ("hidden", EOS)],
        ),
        (f"r{EOS}", True, True, [("reasoning", "r"), ("hidden", EOS)]),
        (f"{THINK_OPEN}r", True, False, [("hidden", THINK_OPEN), ("reasoning", "r")]),
        # C-03 a: a block ends the reasoning
        (
            f"I should read it first.\n\n{BLOCK}{EOS}",
            True,
            True,
            [("reasoning", "I should read it first."), ("hidden", "\n\n"), ("tool", BLOCK), ("hidden", EOS)],
        ),
        # C-03 b: a tag that does not go on as a block is text, and `</think>` comes first
        (
            f"The tag <{DSML} is internal.{THINK_CLOSE}Done.{EOS}",
            True,
            True,
            [
                ("reasoning", f"The tag <{DSML} is internal."),
                ("hidden", THINK_CLOSE),
                ("content", "Done."),
                ("hidden", EOS),
            ],
        ),
        (BLOCK, True, True, [("tool", BLOCK)]),
        (f"a{BLOCK}", True, True, [("reasoning", f"a{BLOCK}")]),
        (f"a\n{BLOCK}", True, True, [("reasoning", "a"), ("hidden", "\n"), ("tool", BLOCK)]),
        (f"a{BLOCK}", False, True, [("content", "a"), ("tool", BLOCK)]),
        (f"a\n\n\n{BLOCK}\n", False, True, [("content", "a\n"), ("hidden", "\n\n"), ("tool", BLOCK), ("hidden", "\n")]),
        (f"{BLOCK}\nmore{EOS}", False, True, [("tool", BLOCK), ("hidden", f"\nmore{EOS}")]),
        (f"a\n\n{BLOCK}", False, False, [("content", f"a\n\n{BLOCK}")]),
        (f"a\n\n{CALLS_OPEN}\nb", False, True, [("content", f"a\n\n{CALLS_OPEN}\nb")]),
        (f"{CALLS_OPEN}\n{BLOCK}", False, True, [("content", CALLS_OPEN), ("hidden", "\n"), ("tool", BLOCK)]),
        (f"a\n\n{CALLS_OPEN}\n", False, True, [("content", f"a\n\n{CALLS_OPEN}\n")]),
        ("a\n\n", False, True, [("content", "a\n\n")]),
        (f"a\n\n{EOS}", False, True, [("content", "a\n\n"), ("hidden", EOS)]),
        ("a</thin", True, True, [("reasoning", "a</thin")]),
        (f"a{THINK_OPEN}b", False, True, [("content", f"a{THINK_OPEN}b")]),
    ],
)
def test_every_cut_gives_the_same_channels(text: str, thinking: bool, tools: bool, expected: Pieces) -> None:
    for at in range(len(text) + 1):
        pieces, closed = split([text[:at], text[at:]], thinking=thinking, tools_enabled=tools)
        assert pieces == expected, at
        assert closed == any(channel == "tool" for channel, _ in expected)
    assert split(text, thinking=thinking, tools_enabled=tools)[0] == expected


REDIRECTION = (
    f'{CALLS_OPEN}\n<{DSML}invoke name="run_cell">\n'
    f'<{DSML}parameter name="code" string="true">!ls data/ 2>&1 | grep "<b>" > out.txt</{DSML}parameter>\n'
    f'<{DSML}parameter name="timeout_s" string="false">20</{DSML}parameter>\n'
    f"</{DSML}invoke>\n{CALLS_CLOSE}"
)
WITH_REDIRECTION = f"Need the listing.{THINK_CLOSE}I will list the folder.\n\n{REDIRECTION}{EOS}"
REDIRECTION_SPLIT: Pieces = [
    ("reasoning", "Need the listing."),
    ("hidden", THINK_CLOSE),
    ("content", "I will list the folder."),
    ("hidden", "\n\n"),
    ("tool", REDIRECTION),
    ("hidden", EOS),
]


def test_shell_redirections_break_no_tag() -> None:
    text = WITH_REDIRECTION
    for width in (1, 2, 3, 7, len(text)):
        deltas = [text[i : i + width] for i in range(0, len(text), width)]
        assert split(deltas, thinking=True) == (REDIRECTION_SPLIT, True)
    for at in range(1, len(text)):
        assert split([text[:at], text[at:]], thinking=True) == (REDIRECTION_SPLIT, True)
    call = ToolCall("run_cell", '{"code": "!ls data/ 2>&1 | grep \\"<b>\\" > out.txt", "timeout_s": 20}')
    assert parse_strict(f"\n\n{REDIRECTION}{EOS}", thinking=False).tool_calls == (call,)


@pytest.mark.parametrize("per_round", range(1, 7))
def test_rounds_of_several_tokens_split_alike(tokenizer: ChatTokenizer, per_round: int) -> None:
    ids = tokenizer.encode_trusted(WITH_REDIRECTION)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.feed(ids[i : i + per_round]) for i in range(0, len(ids), per_round)]
    assert split(deltas, thinking=True) == (REDIRECTION_SPLIT, True)


def test_a_closer_within_a_value_closes_nothing() -> None:
    quoting = BLOCK.replace("notes.md", f"a {CALLS_CLOSE} b")
    splitter = Splitter(thinking=False, tools_enabled=True)
    closed_after = [i for i, c in enumerate(quoting) if (splitter.feed(c), splitter.block_closed)[1]]
    assert closed_after == [len(quoting) - 1]


def test_a_closer_without_a_block_closes_nothing() -> None:
    for thinking in (True, False):
        assert not split([f"say {CALLS_CLOSE} aloud"], thinking=thinking)[1]


def test_newlines_are_held_until_the_next_text() -> None:
    splitter = Splitter(thinking=False, tools_enabled=True)
    assert splitter.feed("a.\n\n\n") == [("content", "a.\n")]
    assert splitter.feed("b") == [("content", "\n\nb")]


def test_nothing_is_held_that_cannot_become_a_marker() -> None:
    splitter = Splitter(thinking=True)
    assert splitter.feed("a < b\n\n") == [("reasoning", "a < b\n\n")]


def cuts(text: str, rng: random.Random) -> list[str]:
    edges = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 30))))
    return [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]


def test_reasoning_and_content_are_those_of_the_serving_parser(parse_vector: dict[str, Any]) -> None:
    text, tolerant = parse_vector["text"], parse_vector["tolerant"]
    options = {"thinking": parse_vector["thinking_mode"] == "thinking", "tools_enabled": parse_vector["tools_enabled"]}
    whole = split([text], **options)
    assert "".join(piece for _, piece in whole[0]) == text
    assert of(whole[0], "reasoning") == tolerant["reasoning"]
    assert of(whole[0], "content") == tolerant["content"]
    rng = random.Random(parse_vector["id"])
    for width in range(1, 9):
        assert split([text[i : i + width] for i in range(0, len(text), width)], **options) == whole
    for _ in range(50):
        assert split(cuts(text, rng), **options) == whole


def test_nothing_is_shown_before_it_is_certain(stream_vector: dict[str, Any]) -> None:
    splitter = Splitter(
        thinking=stream_vector["thinking_mode"] == "thinking", tools_enabled=stream_vector["tools_enabled"]
    )
    final = stream_vector["final"]
    shown: Pieces = []
    for token, piece, reasoning_chars, content_chars, _ in stream_vector["steps"]:
        shown += splitter.feed(piece)
        reasoning, content = of(shown, "reasoning"), of(shown, "content")
        assert len(reasoning) <= reasoning_chars and len(content) <= content_chars, token
        assert final["reasoning"].startswith(reasoning) and final["content"].startswith(content), token
    shown += splitter.flush()
    assert of(shown, "reasoning") == final["reasoning"]
    assert of(shown, "content") == final["content"]


markers = [THINK_OPEN, THINK_CLOSE, EOS, CALLS_OPEN, CALLS_CLOSE, f"<{DSML}toolcalls>", f'<{DSML}invoke name="x">']
markers += [f"</{DSML}invoke>", f'<{DSML}parameter name="y" string="true">', f"</{DSML}parameter>"]
# whole markers, their halves, and the newlines and blanks that decide about them
fragments = [*markers, *(m[:5] for m in markers), *(m[5:] for m in markers), "\n", "\n\n", " ", "<", "a"]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(fragments), max_size=14).map("".join),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_random_text_survives_random_cuts(text: str, thinking: bool, tools: bool, rng: random.Random) -> None:
    options = {"thinking": thinking, "tools_enabled": tools}
    whole = split([text], **options)
    assert "".join(piece for _, piece in whole[0]) == text
    assert split(text, **options) == whole
    assert split(cuts(text, rng), **options) == whole
    if not tools:
        assert not of(whole[0], "tool")
