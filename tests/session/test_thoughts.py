"""What a turn with calls thought, run by run: the same while it runs, as it is remembered, and as it is read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.events import Event, PromptUsage, Token
from dsv4nb.session.thoughts import Apart
from dsv4nb.stream.frames import Frame, Watch
from dsv4nb.stream.transcript import entry_from_events

MakeModel = Callable[..., Any]

CALL = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def look() -> str:
    """Look outside."""
    return "rain"


@pytest.mark.parametrize(
    ("thoughts", "whole"),
    [
        (("I must look.", "It rains."), "I must look.\n\nIt rains."),
        (("One.", "Two.", "Three."), "One.\n\nTwo.\n\nThree."),
        (("I must look.", ""), "I must look."),
        (("", "It rains."), "It rains."),
        (("One.", "", "Three."), "One.\n\nThree."),
    ],
)
def test_thoughts_of_runs_are_paragraphs(make_model: MakeModel, thoughts: tuple[str, ...], whole: str) -> None:
    *calling, last = thoughts
    model = make_model([*(f"{thought}</think>{CALL}" for thought in calling), f"{last}</think>Take a coat."])
    chat = model.chat(thinking=True, tools=[look])
    ticket = chat.submit("Coat?")
    reply = ticket.result()
    (turn,) = chat.turns
    assert turn.reasoning == whole and turn.text.strip() == "Take a coat." and len(turn.runs) == len(thoughts)
    assert entry_from_events("Coat?", ticket.poll(0)[0]).reasoning == whole
    frames = [news for news in Watch(1, ticket, print).news() if isinstance(news, Frame)]
    assert "".join(text for frame in frames for channel, text in frame.tokens if channel == "reasoning") == whole
    (read_back,) = model.chat(messages=chat.messages).turns
    assert read_back.reasoning == whole
    shown = "\n".join(f"  {line}" if line else "  " for line in whole.splitlines())
    assert f"[Thoughts]\n{shown}\n" in repr(chat)
    # the history and the result of each run hold what that run thought, nothing else
    assert [m.get("reasoning_content", "") for m in chat.messages if m["role"] == "assistant"] == list(thoughts)
    assert [step.reasoning for step in reply.steps] == list(thoughts)


def test_the_gap_stands_before_the_first_text_of_another_run() -> None:
    def said(*texts: str) -> list[Event]:
        return [PromptUsage(n_prompt=1, n_cached=0), *(Token(id=1, text=text, channel="reasoning") for text in texts)]

    events = [*said("", "a", "b"), Token(id=2, text="c", channel="content"), *said("", "d", "e")]
    told = [event for event in map(Apart(), events) if isinstance(event, Token)]
    assert [token.text for token in told] == ["", "a", "b", "c", "", "\n\nd", "e"]
