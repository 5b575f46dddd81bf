"""What a chat remembers of a turn that has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsv4nb.events import Event, Failed, Generation, PromptUsage, Round, Rounds, Token, ToolCall, ToolResult
from dsv4nb.session.request import Options
from dsv4nb.session.result import joined
from dsv4nb.session.thoughts import Apart
from dsv4nb.session.tree import Turn


def turn_of(text: str, options: Options, outcome: Generation | Failed, events: Sequence[Event]) -> Turn:
    """Return the turn that `events` were said in.

    Args:
        text: what was asked, with these options.
    """
    events = tuple(map(Apart(), events))
    rounds, marks = _rounds(events)
    turn = Turn(
        user=text,
        rounds=rounds,
        marks=marks,
        options=options,
        reasoning=joined(events, "reasoning"),
        text=joined(events, "content"),
        tool=joined(events, "tool"),
        n_reasoning=sum(isinstance(event, Token) and event.channel == "reasoning" for event in events),
        calls=tuple(event for event in events if isinstance(event, ToolCall)),
        results=tuple(event for event in events if isinstance(event, ToolResult)),
    )
    if isinstance(outcome, Failed):
        return replace(turn, error=outcome.message)
    runs = tuple(run.done for run in outcome.steps or (outcome,))
    return replace(
        turn,
        stop_reason=outcome.stop_reason,
        n_tokens=sum(run.n_tokens for run in runs),
        n_cached=runs[0].n_cached,
        seconds=sum(run.elapsed_s for run in runs),
        runs=runs,
        ids=outcome.ids,
        n_given=next((event.n_given for event in reversed(events) if isinstance(event, PromptUsage)), 0),
        logprobs=outcome.logprobs,
    )


def _rounds(events: Sequence[Event]) -> tuple[Rounds, tuple[tuple[int, int], ...]]:
    """Return the rounds of a turn, and the characters of reasoning and content before each."""
    rounds: list[Round] = []
    marks: list[tuple[int, int]] = []
    reasoning = content = n_given = 0
    before: tuple[int, int] | None = None  # where the round that goes on began
    for event in events:
        if isinstance(event, Token):
            reasoning += len(event.text) * (event.channel == "reasoning")
            content += len(event.text) * (event.channel == "content")
            if before is None and event.id is not None:
                if n_given == 0:
                    before = reasoning, content  # what was given and a run's first token come before its first round
                n_given -= 1
        elif isinstance(event, Round):
            rounds.append(event)
            marks.append(before or (reasoning, content))
            before = reasoning, content
        elif isinstance(event, PromptUsage):
            before, n_given = None, event.n_given
    return Rounds(rounds), tuple(marks)
