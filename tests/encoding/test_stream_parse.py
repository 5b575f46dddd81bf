"""Channels of generated text, whatever the cuts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.calls import CallArgs, CallEnd, CallEvent, CallStart
from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.detokenize import Detokenizer
from dsv4nb.encoding.parse import ToolCall, parse_strict
from dsv4nb.encoding.stream_parse import Channel, Piece, Splitter
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
        # a reply thinks once
        (
            f"a{THINK_CLOSE}\n{THINK_OPEN}b",
            True,
            True,
            [("reasoning", "a"), ("hidden", THINK_CLOSE), ("content", f"\n{THINK_OPEN}b")],
        ),
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
CALL = ToolCall("run_cell", '{"code": "!ls data/ 2>&1 | grep \\"<b>\\" > out.txt", "timeout_s": 20}')
REDIRECTION_SPLIT: Pieces = [
    ("reasoning", "Need the listing."),
    ("hidden", THINK_CLOSE),
    ("content", "I will list the folder."),
    ("hidden", "\n\n"),
    ("tool", REDIRECTION),
    ("hidden", EOS),
]


def test_shell_redirections_break_no_tag() -> None:
    for deltas in every_cut(WITH_REDIRECTION):
        assert split(deltas, thinking=True) == (REDIRECTION_SPLIT, True)
        assert result(deltas, thinking=True, tools_enabled=True)[1:] == (
            ((CALL.name, CALL.arguments_json),),
            [],
            "eos",
        )
    assert parse_strict(f"\n\n{REDIRECTION}{EOS}", thinking=False).tool_calls == (CALL,)


@pytest.mark.parametrize("per_round", range(1, 7))
def test_rounds_of_several_tokens_split_alike(tokenizer: ChatTokenizer, per_round: int) -> None:
    ids = tokenizer.encode_trusted(WITH_REDIRECTION)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.feed(ids[i : i + per_round]) for i in range(0, len(ids), per_round)]
    assert split(deltas, thinking=True) == (REDIRECTION_SPLIT, True)
    assert result(deltas, thinking=True, tools_enabled=True)[1] == ((CALL.name, CALL.arguments_json),)


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


def every_cut(text: str) -> Iterator[list[str]]:
    """Yield the text whole, in pieces of 1, 2, 3 and 7 characters and in any two."""
    for width in (max(len(text), 1), 1, 2, 3, 7):
        yield [text[i : i + width] for i in range(0, len(text), width)]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


Result = tuple[Pieces, tuple[tuple[str, str], ...], list[str], str | None]


def result(deltas: Iterable[str], **options: bool) -> Result:
    """Return channels, calls, anomalies and ending."""
    splitter = Splitter(**options)
    pieces = [piece for delta in deltas for piece in splitter.feed(delta)] + splitter.flush()
    calls = tuple((call.name, call.arguments_json) for call in splitter.calls)
    return joined(pieces), calls, sorted(splitter.anomalies), splitter.ending


def cuts(text: str, rng: random.Random) -> list[str]:
    edges = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 30))))
    return [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]


def test_m68_replies_parse_as_the_serving_parser_does_whatever_the_cuts(parse_vector: dict[str, Any]) -> None:
    text, tolerant = parse_vector["text"], parse_vector["tolerant"]
    options = {"thinking": parse_vector["thinking_mode"] == "thinking", "tools_enabled": parse_vector["tools_enabled"]}
    whole = result([text], **options)
    assert "".join(piece for _, piece in whole[0]) == text
    assert (of(whole[0], "reasoning"), of(whole[0], "content")) == (tolerant["reasoning"], tolerant["content"])
    assert whole[1] == tuple((call["name"], call["arguments"]) for call in tolerant["tool_calls"])
    assert whole[2:] == (tolerant["anomalies"], tolerant["ended"])
    for deltas in every_cut(text):
        assert result(deltas, **options) == whole, deltas
    rng = random.Random(parse_vector["id"])
    for deltas in [cuts(text, rng) for _ in range(50)]:
        assert result(deltas, **options) == whole, deltas


def test_m55_nothing_is_shown_before_it_is_certain_nor_long_after(stream_vector: dict[str, Any]) -> None:
    splitter = Splitter(
        thinking=stream_vector["thinking_mode"] == "thinking", tools_enabled=stream_vector["tools_enabled"]
    )
    final = stream_vector["final"]
    shown: Pieces = []
    for token, piece, reasoning_chars, content_chars, finished in stream_vector["steps"]:
        shown += splitter.feed(piece)
        reasoning, content = of(shown, "reasoning"), of(shown, "content")
        assert (len(reasoning), len(content)) == (reasoning_chars, content_chars), token
        assert final["reasoning"].startswith(reasoning) and final["content"].startswith(content), token
        assert len(splitter.calls) == finished, token
    shown += splitter.flush()
    assert of(shown, "reasoning") == final["reasoning"]
    assert of(shown, "content") == final["content"]
    calls = [{"name": call.name, "arguments": call.arguments_json} for call in splitter.calls]
    assert (calls, sorted(splitter.anomalies), splitter.ending) == (
        final["tool_calls"],
        final["anomalies"],
        final["ended"],
    )


def test_events_stand_in_order_behind_the_text_they_rest_on() -> None:
    splitter = Splitter(thinking=True, tools_enabled=True)
    events = splitter.feed_events(WITH_REDIRECTION)
    assert splitter.flush_events() == []
    assert "".join(event.text for event in events if isinstance(event, Piece)) == WITH_REDIRECTION
    read = 0  # characters in front of the event
    behind = []
    for event in events:
        if isinstance(event, Piece):
            read += len(event.text)
        else:
            behind.append((type(event), WITH_REDIRECTION[:read][-8:]))
    assert behind == [
        (CallStart, 'n_cell">'),
        (CallArgs, '="true">'),
        (CallArgs, " out.txt"),
        (CallArgs, "rameter>"),
        (CallArgs, "rameter>"),
        (CallArgs, "｜invoke>"),
        (CallEnd, "｜invoke>"),
    ]


def fragments_of(events: Iterable[Piece | CallEvent]) -> list[str]:
    return [event.fragment for event in events if isinstance(event, CallArgs)]


def test_fragments_join_to_the_arguments_whatever_the_cuts() -> None:
    for deltas in every_cut(WITH_REDIRECTION):
        splitter = Splitter(thinking=True, tools_enabled=True)
        events = [event for delta in deltas for event in splitter.feed_events(delta)] + splitter.flush_events()
        ends = [event for event in events if isinstance(event, CallEnd)]
        assert ends == [CallEnd(index=0, name="run_cell", arguments_json=CALL.arguments_json)]
        assert "".join(fragments_of(events)) == CALL.arguments_json
        # no fragment shows a piece of the closer that 2>&1 and <b> may be taken for
        assert not any(DSML in fragment or "</" in fragment for fragment in fragments_of(events))


def test_a_string_value_streams_as_it_comes() -> None:
    splitter = Splitter(thinking=False, tools_enabled=True)
    splitter.feed(f'{CALLS_OPEN}\n<{DSML}invoke name="f">\n<{DSML}parameter name="code" string="true">')
    assert fragments_of(splitter.feed_events('a "b"\n')) == ['a \\"b\\"\\n']
    assert fragments_of(splitter.feed_events("2</")) == ["2"]
    assert fragments_of(splitter.feed_events(f"{DSML}para")) == []
    assert fragments_of(splitter.feed_events("graph")) == [f"</{DSML}paragraph"]


@pytest.mark.parametrize("cut_off", ["", "<", f"</{DSML}invo", "x"])
def test_an_end_token_that_comes_as_an_id_ends_the_text_as_its_text_would(cut_off: str) -> None:
    for text in ("r", f"r{THINK_CLOSE}c", f"\n\n{CALLS_OPEN}\n", BLOCK, BLOCK[: BLOCK.index(f"</{DSML}invoke")]):
        fed, told = (Splitter(thinking=True, tools_enabled=True) for _ in range(2))
        pieces = joined([*told.feed(text + cut_off), *told.flush(eos=True)])
        assert "".join(piece for _, piece in pieces) == text + cut_off
        assert [*pieces, ("hidden", EOS)] == list(separate(joined([*fed.feed(text + cut_off + EOS), *fed.flush()])))
        assert (told.calls, told.anomalies, told.ending) == (fed.calls, fed.anomalies, "eos")


def separate(pieces: Pieces) -> Iterator[tuple[Channel, str]]:
    """Let the end token stand alone."""
    for channel, text in pieces:
        if text.removesuffix(EOS):
            yield channel, text.removesuffix(EOS)
        if text.endswith(EOS):
            yield channel, EOS


INVOCATION = f'<{DSML}invoke name="f">\n'
STRING = f'<{DSML}parameter name="a" string="true">'
LONG = {
    "content": ("", "a <b> \n\n"),
    "newlines": ("", "\n"),
    "opener": (CALLS_OPEN, "\n"),
    "header": (f"{CALLS_OPEN}<{DSML}invoke", ' name="x">'),
    "blank header": (f"{CALLS_OPEN}<{DSML}invoke", "\n"),
    "between tags": (CALLS_OPEN + INVOCATION, "junk < "),
    "value": (CALLS_OPEN + INVOCATION + STRING, "if a < b: 2>&1\n"),
    "number": (CALLS_OPEN + INVOCATION + STRING.replace("true", "false"), "[1, 2], "),
    "parameter header": (f"{CALLS_OPEN}{INVOCATION}<{DSML}parameter ", 'name="x" '),
    "no flag": (f'{CALLS_OPEN}{INVOCATION}<{DSML}parameter name="x">', ' string="tru" '),
    "json": (f"{CALLS_OPEN}{INVOCATION}{{", '"a": 1, '),
    "parameters": (CALLS_OPEN + INVOCATION, f"{STRING}v</{DSML}parameter>\n"),
    "after": (BLOCK, "more < "),
}


@pytest.mark.parametrize(("start", "unit"), LONG.values(), ids=LONG)
def test_work_per_character_does_not_grow_with_the_reply(start: str, unit: str) -> None:
    def seconds(n_chars: int) -> float:
        splitter = Splitter(thinking=False, tools_enabled=True)
        splitter.feed(start)
        text = (unit * n_chars)[:n_chars]
        begin = time.process_time()
        for character in text:
            splitter.feed_events(character)
        splitter.flush_events()
        return time.process_time() - begin

    # eight times the text; a second look at all that came before makes it 40 and more
    assert seconds(100_000) < 20 * min(seconds(12_500) for _ in range(3))


@pytest.mark.parametrize("kind", sorted(LONG.keys() - {"opener"}))
def test_little_is_held_but_blanks_behind_an_opener(kind: str) -> None:
    start, unit = LONG[kind]
    splitter = Splitter(thinking=False, tools_enabled=True)
    fed, shown = len(start), sum(len(text) for _, text in splitter.feed(start))
    for character in unit * 20:
        shown += sum(len(text) for _, text in splitter.feed(character))
        fed += 1
        assert fed - shown < 25


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
    whole = result([text], **options)
    assert "".join(piece for _, piece in whole[0]) == text
    assert result(text, **options) == whole
    assert result(cuts(text, rng), **options) == whole
    if not tools:
        assert not of(whole[0], "tool") and not whole[1]
