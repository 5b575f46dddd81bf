from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dsv4nb.errors import DrafterFault
from dsv4nb.events import Event, Token, ToolCall, ToolResult
from dsv4nb.magics.cell import TerminalScreen, follow
from dsv4nb.stream.transcript import Entry
from dsv4nb.testing.fake_model import fake_model


class Recorder:
    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.entries: list[Entry] = []

    def show(self, events: Sequence[Event]) -> None:
        self.lengths.append(len(events))

    def finish(self, entry: Entry) -> None:
        self.entries.append(entry)


def test_a_reply_is_shown_while_it_grows_and_whole_at_the_end(make_ticket: Any) -> None:
    screen = Recorder()
    words = [("content", f"{i} ") for i in range(20)]
    result, is_interrupted = follow(make_ticket(words, 0.02), screen)
    assert not is_interrupted and result.text == "".join(word for _, word in words)
    assert len(set(screen.lengths)) > 3 and screen.lengths == sorted(screen.lengths)
    (entry,) = screen.entries
    assert (entry.text, entry.n_tokens, entry.stop_reason) == (result.text, 20, "stop")


def footer(model: Any, **options: Any) -> str:
    """What the footer says of speculation, "" when nothing."""
    screen = Recorder()
    follow(model.submit("hi", seed=0, **options), screen)
    told = screen.entries[0].pace.split(" · ")
    return " ".join(part for part in told if "speculated" in part or "plain" in part)


def test_the_footer_tells_of_speculation_and_only_then() -> None:
    ids = [300, 301, 302, 303, 304, 305, 306, 307]

    def drafts(said: tuple[int, ...]) -> list[int]:
        at = ids.index(said[-1]) + 1
        return [*ids[at : at + 2], 5][:3]  # two right ones, one wrong

    with fake_model([ids], drafts=drafts) as model:
        assert footer(model, max_new=7) == "speculated, τ 3.00"
        assert footer(model, max_new=7, temperature=1.0, spec_mode="rejection") == "speculated by rejection, τ 3.00"
        assert footer(model, max_new=7, spec=False) == ""
        assert footer(model, max_new=7, spec_depth=1) == "speculated"  # no draft was verified
    with fake_model([ids]) as model:
        assert footer(model, max_new=7) == ""


def test_the_footer_says_when_a_drafter_was_given_up() -> None:
    def drafts(said: tuple[int, ...]) -> list[int]:
        if len(said) > 8:
            raise DrafterFault("its numbers broke")
        return []

    with fake_model("one two three four five six seven eight nine", drafts=drafts) as model:
        assert footer(model) == "speculated, then plain: its numbers broke"
        assert footer(model) == "plain: its numbers broke"


def test_a_terminal_tells_calls_without_their_markup(capsys: pytest.CaptureFixture[str]) -> None:
    screen = TerminalScreen(is_live=True)
    events = [
        Token(id=1, text="I look.", channel="content"),
        Token(id=2, text="<markup>", channel="tool"),
        ToolCall(id="call_0", name="f", arguments='{"a": 1}'),
        ToolResult(id="call_0", name="f", content="21", arguments='{"a": 1}'),
        Token(id=3, text="It is 21.", channel="content"),
    ]
    screen.show(events[:3])
    screen.show(events)
    screen.finish(Entry(user="", text="It is 21."))
    assert capsys.readouterr().out == 'I look.\n\n[Call] f({"a": 1})\n\n[Result] f → 21\n\nIt is 21.\n'


def test_a_failed_reply_shows_what_there_was_and_why(make_ticket: Any) -> None:
    screen = Recorder()
    follow(make_ticket([("content", "half ")], 0.0, error="out of memory"), screen)
    assert (screen.entries[0].text, screen.entries[0].error) == ("half ", "out of memory")
