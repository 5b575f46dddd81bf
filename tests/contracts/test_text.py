"""One reply has one text: through every door, on every route, and however its ids come in rounds."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.events import Event, PromptUsage, Reasoning, Token, TokenSnapshot, ToolCall
from dsv4nb.model import Model
from dsv4nb.session.emission import Emission
from dsv4nb.session.result import joined
from dsv4nb.testing.fake_engine import FakeTokenizer
from dsv4nb.testing.fake_model import fake_model

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = f'<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="true">x</{DSML}parameter>\n</{DSML}invoke>'
CHANNELS = ("content", "reasoning", "tool", "hidden")
STOPS = ("END", "x\n", "😀", " b c", "a")

TOKENS = FakeTokenizer()


def fragments() -> list[list[list[int]]]:
    """What replies are put together from, by kind: words, characters in pieces, control tokens, blocks of calls."""
    words = [[token] for token in TOKENS.encode_plain("a b c EN D END x The and \n \n\n </ <")]
    pieces = [[token] for text in ("END", "😀", "ไ", "’", "｜", "\n") for token in TOKENS.encode_bytes(text)]
    whole = [TOKENS.encode_bytes(text) for text in ("END", "x\n", "😀", "👩‍👩‍👧", "ไทย", f"<{DSML}tool", THINK_CLOSE)]
    controls = [[TOKENS.id_of(text)] for text in (THINK_CLOSE, THINK_OPEN, DSML, EOS)]
    blocks = [f"\n\n{CALLS_OPEN}\n{CALL}\n{CALLS_CLOSE}", f"\n\n{CALLS_OPEN}\n{CALL}", f"{CALLS_OPEN}\n{CALL}\n{CALL}"]
    return [words, words, words, whole, whole, pieces, controls, [TOKENS.encode_trusted(block) for block in blocks]]


@st.composite
def scripts(draw: st.DrawFn) -> list[int]:
    """The ids of a reply."""
    parts = st.sampled_from(fragments()).flatmap(st.sampled_from)
    return [token for part in draw(st.lists(parts, min_size=1, max_size=14)) for token in part]


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """The options of a request."""
    return {
        "seed": 5,
        "temperature": draw(st.sampled_from([0, 1.0])),  # both plain routes
        "thinking": draw(st.booleans()),
        "tools": [TOOL] if draw(st.booleans()) else None,
        "stop": draw(st.lists(st.sampled_from(STOPS), max_size=3)),
        "max_new": draw(st.integers(1, 40) | st.just(400)),
    }


def said(events: Sequence[Event]) -> list[Event]:
    """Return the events that tell text."""
    return [event for event in events if isinstance(event, Token | Reasoning | ToolCall)]


def in_rounds(model: Model, script: Sequence[int], options: dict[str, Any], cuts: random.Random) -> list[Event]:
    """Return what the same ids say when they come in rounds of 1 to 6."""
    events: list[Event] = []
    emission = Emission(model.prepare("hi", **options), TOKENS, events.append)
    rest = [*script, TOKENS.eos_id]
    while rest and emission.stop_reason is None:
        n = cuts.randint(1, 6)
        emission.accept(rest[:n])
        rest = rest[n:]
    emission.finish()
    return said(events)


async def awaited(model: Model, options: dict[str, Any]) -> list[Event]:
    return [event async for event in model.astream("hi", **options)]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts(), options=asked(), cuts=st.randoms(use_true_random=False))
def test_m54_m61_m67_every_door_tells_the_same_text(
    script: list[int], options: dict[str, Any], cuts: random.Random
) -> None:
    with fake_model([script], tokenizer=TOKENS) as model:
        result = model.generate("hi", **options)
        events = list(model.stream("hi", **options))
        heard: list[Token] = []
        in_step = model.generate("hi", on_token=heard.append, **options)
        told = said(events)
        assert said(asyncio.run(awaited(model, options))) == told
        assert [event for event in told if isinstance(event, Token)] == heard
        assert in_rounds(model, script, options, cuts) == told

    texts = {channel: joined(events, channel) for channel in CHANNELS}  # type: ignore[arg-type]
    assert (texts["content"], texts["reasoning"]) == (result.text, result.reasoning)
    assert "".join(token.text for token in heard) == result.raw_text
    for other in (in_step, result):
        assert (other.raw_text, other.ids, other.stop_reason) == (result.raw_text, result.ids, result.stop_reason)

    # and it is the text of the ids, up to a stop string
    assert tuple(token.id for token in heard if token.id is not None) == result.ids == tuple(script[: len(result.ids)])
    whole = TOKENS.decode(result.ids)
    if result.raw_text != whole:
        assert result.stop_reason == "stop" and whole.startswith(result.raw_text) and options["stop"]
    runs = itertools.groupby((token for token in heard if token.text), lambda token: token.channel)
    shown = ["".join(token.text for token in run) for channel, run in runs if channel == "content"]
    assert not any(stop in text for stop in options["stop"] for text in shown)
    assert len(result.ids) <= options["max_new"]
    assert events[-2] == TokenSnapshot(ids=result.ids) and isinstance(events[0], PromptUsage)


@pytest.fixture
def steps() -> list[str]:
    """What happened, in order."""
    return []


@pytest.fixture
def model(steps: list[str]) -> Iterator[Model]:
    with fake_model("a b c d e", on_step=lambda step, _: steps.append(step)) as made:
        yield made


def test_a01_a_callback_goes_in_step_with_the_engine(model: Model, steps: list[str]) -> None:
    model.generate("hi", on_token=lambda token: steps.append(token.text))
    rounds = [part for text in ("a", " b", " c", " d", " e") for part in (text, "forward_rows")]
    assert steps == ["prefill", "chunk", *rounds]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a01_false_at_a_token_is_the_last_token(model: Model, steps: list[str], n: int) -> None:
    heard: list[Token] = []

    def on_token(token: Token) -> bool:
        heard.append(token)
        return len(heard) < n

    result = model.generate("hi", on_token=on_token)
    assert (len(result.ids), len(heard), result.stop_reason) == (n, n, "cancelled")
    assert result.text == " ".join("abcde"[:n])
    assert steps.count("forward_rows") == n - 1
