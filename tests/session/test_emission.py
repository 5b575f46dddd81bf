from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.events import Event, Reasoning, Token, ToolCall
from dsv4nb.session.emission import Emission
from dsv4nb.session.request import Request
from dsv4nb.testing.fake_engine import FakeTokenizer

EOS = 1
BLOCK = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


class Run:
    """Emits a reply and keeps what was said."""

    def __init__(self, tokens: FakeTokenizer, *, cuts: random.Random | None = None, **options: Any) -> None:
        values: dict[str, Any] = {
            "prompt": (0,),
            "max_new": 10_000,
            "config": SamplerConfig(),
            "is_thinking": False,
            "has_tools": False,
            "stops": (),
            "eos": frozenset({EOS}),
        }
        self.events: list[Event] = []
        self._cuts = cuts
        self.emission = Emission(Request(**values | options), tokens, self.events.append)

    def say(self, ids: Sequence[int]) -> Run:
        rest = list(ids)
        while rest:
            n = self._cuts.randint(1, 6) if self._cuts else 1
            self.emission.accept(rest[:n])
            rest = rest[n:]
        self.emission.finish()
        return self

    def text(self, *channels: str) -> str:
        tokens = [event for event in self.events if isinstance(event, Token)]
        return "".join(token.text for token in tokens if not channels or token.channel in channels)

    @property
    def carried(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token) and event.id is not None]


@pytest.fixture
def tokens() -> FakeTokenizer:
    return FakeTokenizer()


def test_m53_an_end_id_is_neither_emitted_nor_counted(tokens: FakeTokenizer) -> None:
    run = Run(tokens).say([300, EOS, 301])
    assert run.emission.stop_reason == "stop"
    assert run.emission.ids == [300] == run.carried


@pytest.mark.parametrize("slot", range(6))
def test_m59_what_stands_behind_an_end_in_a_round_is_discarded(tokens: FakeTokenizer, slot: int) -> None:
    ids = tokens.encode_plain("a b c d e f")
    round_ = [*ids[:slot], EOS, *ids[slot:]]
    run = Run(tokens)
    run.emission.accept(round_)
    run.emission.finish()
    assert run.emission.ids == ids[:slot]
    assert run.text() == tokens.decode(ids[:slot])
    assert run.emission.stop_reason == "stop"


def test_m60_the_budget_ends_with_its_last_token(tokens: FakeTokenizer) -> None:
    run = Run(tokens, max_new=3).say(tokens.encode_plain("a b c d e"))
    assert run.text() == "a b c" and run.emission.stop_reason == "length"


def test_m55_characters_are_never_cut(tokens: FakeTokenizer) -> None:
    text = "a😀b ｜DSML｜ ไทย 👩‍👩‍👧’"
    run = Run(tokens).say(tokens.encode_bytes(text))
    assert run.text() == text
    assert "\ufffd" not in run.text()
    assert len(run.carried) == len(text.encode())


def test_a_character_that_is_never_finished_is_shown_as_such(tokens: FakeTokenizer) -> None:
    assert Run(tokens).say(tokens.encode_bytes("a😀")[:-1]).text() == "a\ufffd"


def test_m68_channels_and_the_reasoning_event(tokens: FakeTokenizer) -> None:
    run = Run(tokens, is_thinking=True).say(tokens.encode_trusted("I think.</think>Yes."))
    assert run.text("reasoning") == "I think."
    assert run.text("content") == "Yes."
    assert run.text() == "I think.</think>Yes."
    at = next(i for i, event in enumerate(run.events) if isinstance(event, Reasoning))
    assert run.events[at] == Reasoning(text="I think.")
    assert all(event.channel == "reasoning" for event in run.events[:at] if isinstance(event, Token))
    assert not any(event.channel == "reasoning" for event in run.events[at + 1 :] if isinstance(event, Token))
    assert sum(isinstance(event, Reasoning) for event in run.events) == 1


def test_reasoning_that_is_cut_off_is_not_complete(tokens: FakeTokenizer) -> None:
    run = Run(tokens, is_thinking=True, max_new=2).say(tokens.encode_trusted("I think."))
    assert run.text("reasoning") == "I think."
    assert not any(isinstance(event, Reasoning) for event in run.events)


def test_m57_a_closed_block_of_calls_ends_the_reply(tokens: FakeTokenizer) -> None:
    run = Run(tokens, has_tools=True).say([*tokens.encode_trusted(f"Let me see.\n\n{BLOCK}"), 300, 301])
    assert run.emission.stop_reason == "tool_calls"
    assert run.text("tool") == BLOCK and run.text("content") == "Let me see."
    assert run.text().endswith("</｜DSML｜tool_calls>")


def test_without_tools_a_block_is_text(tokens: FakeTokenizer) -> None:
    run = Run(tokens).say([*tokens.encode_trusted(BLOCK), EOS])
    assert run.text("content") == BLOCK and run.emission.stop_reason == "stop"


class TestStops:
    @pytest.mark.parametrize(
        ("text", "stops", "shown", "reason"),
        [
            ("The END of it", ["END"], "The ", "stop"),
            ("The ENjoy", ["END"], "The ENjoy", "length"),
            ("xabcd", ["ab", "abc"], "x", "stop"),
            ("The EN", ["END"], "The EN", "length"),
        ],
    )
    def test_m57_a_stop_is_found_across_tokens(
        self, tokens: FakeTokenizer, text: str, stops: list[str], shown: str, reason: str
    ) -> None:
        ids = tokens.encode_bytes(text)
        run = Run(tokens, stops=tuple(stops), max_new=len(ids)).say(ids)
        assert run.text() == shown and run.emission.stop_reason == reason

    def test_stops_do_not_apply_to_reasoning_and_calls(self, tokens: FakeTokenizer) -> None:
        text = f"END</think>a\n\n{BLOCK.replace('f', 'END')}"
        run = Run(tokens, is_thinking=True, has_tools=True, stops=("END",)).say(tokens.encode_trusted(text))
        assert run.text("reasoning") == "END"
        assert run.emission.stop_reason == "tool_calls"

    def test_what_was_held_comes_before_what_follows(self, tokens: FakeTokenizer) -> None:
        run = Run(tokens, stops=("ENDLESS",)).say(tokens.encode_trusted("The END</think> yes"))
        assert run.text() == "The END</think> yes"

    def test_text_that_the_end_releases_can_complete_a_stop(self, tokens: FakeTokenizer) -> None:
        run = Run(tokens, has_tools=True, stops=("a\n",)).say([*tokens.encode_bytes("a\n"), EOS])
        assert run.text() == "" and run.emission.stop_reason == "stop"


def test_m61_the_events_do_not_depend_on_the_rounds(tokens: FakeTokenizer) -> None:
    random_ = random.Random(7)
    alphabet = [*tokens.encode_plain("EN D </ x"), *range(3, 7), *tokens.encode_bytes("😀<\n")]
    for _ in range(200):
        ids = random_.choices(alphabet, k=random_.randint(1, 30))
        options: dict[str, Any] = {
            "is_thinking": random_.random() < 0.5,
            "has_tools": random_.random() < 0.5,
            "stops": ("END", "x\n"),
            "max_new": random_.randint(1, 30),
        }
        one, many = Run(tokens, **options).say(ids), Run(tokens, cuts=random_, **options).say(ids)
        assert one.events == many.events
        assert one.carried == one.emission.ids == list(ids[: len(one.emission.ids)])
        if one.emission.stop_reason != "stop":
            assert one.text() == tokens.decode(one.emission.ids)


def test_the_models_own_end_completes_a_call_and_a_stop_id_of_the_caller_cuts_it_off(tokens: FakeTokenizer) -> None:
    unfinished = BLOCK[: BLOCK.index("</｜DSML｜invoke>")]
    ids = tokens.encode_trusted(unfinished)
    ended = Run(tokens, has_tools=True).say([*ids, EOS])
    assert [event.name for event in ended.events if isinstance(event, ToolCall)] == ["f"]
    assert ended.emission.stop_reason == "tool_calls"
    assert "missing_invoke_close" in ended.emission.problems
    cut = Run(tokens, has_tools=True, eos=frozenset({EOS, 300})).say([*ids, 300])
    assert not any(isinstance(event, ToolCall) for event in cut.events)
    assert cut.emission.stop_reason == "stop" and "dropped_call" in cut.emission.problems
