"""A conversation as a value that a person can read: as text, and as HTML that needs neither kernel nor JavaScript."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, Protocol

from dsv4nb.events import Channel, Done, Event, Failed, PromptUsage, Round, StopReason, Token, ToolCall, ToolResult
from dsv4nb.rounds import Rounds
from dsv4nb.session.thoughts import Apart
from dsv4nb.stream.calls import Card, cards_of
from dsv4nb.stream.facts import RunFacts, run_facts

_FENCE = re.compile(r"^ {0,3}```", re.MULTILINE)

_NOTE = "opacity:.7;font-size:90%"
_BUBBLE = "white-space:pre-wrap;margin:.6em 0;padding:.4em .8em;border-left:3px solid #8888"
_WRAP = "white-space:pre-wrap;margin:.4em 0"
_CARD = "margin:.6em 0;padding:.4em .8em;border:1px solid #8888;border-radius:6px"
_CODE = "padding:.4em;margin:.2em 0;white-space:pre-wrap"

# the footer has them; a page knows what runs, and asks for the times of a turn when a reader wants them
_UNTOLD = ("speculated", "note", "is_running", "runs")
INCOMPLETE = "An incomplete tool call"


class TurnLike(Protocol):
    """What a chat remembers of a turn."""

    @property
    def user(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def tool(self) -> str: ...
    @property
    def calls(self) -> tuple[ToolCall, ...]: ...
    @property
    def results(self) -> tuple[ToolResult, ...]: ...
    @property
    def stop_reason(self) -> StopReason | None: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_reasoning(self) -> int | None: ...
    @property
    def reasoning_s(self) -> float | None: ...
    @property
    def n_cached(self) -> int: ...
    @property
    def rounds(self) -> Rounds: ...
    @property
    def runs(self) -> tuple[Done, ...]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One question and what came back.

    Attributes:
        is_calling: whether the model began to write a call, and none is complete.
        stop_reason: None while it runs or when it failed.
        n_reasoning: tokens of the reasoning, None when nobody counted.
        reasoning_s: from the first token to the end of the reasoning, None while it runs or when nobody measured.
        n_cached: prompt tokens that were not computed again.
        seconds: 0 while it runs.
        speculated: how, in words; "" when no round was played.
        note: why it was not speculated, or no longer; "" when there is nothing to say.
        runs: what each of its runs cost; () while it runs or when it failed.
        is_running: whether it was not over when this was written down.
        error: why it failed, "" otherwise.
    """

    user: str
    reasoning: str = ""
    text: str = ""
    cards: tuple[Card, ...] = ()
    is_calling: bool = False
    stop_reason: StopReason | None = None
    n_tokens: int = 0
    n_reasoning: int | None = None
    reasoning_s: float | None = None
    n_cached: int = 0
    seconds: float = 0.0
    speculated: str = ""
    note: str = ""
    runs: tuple[RunFacts, ...] = ()
    is_running: bool = False
    error: str = ""

    @property
    def thought(self) -> str:
        """The line above the folded reasoning."""
        if self.n_reasoning is None:
            return "Thoughts"
        thought = f"Thought for {self.n_reasoning} token{'s' * (self.n_reasoning != 1)}"
        return f"{thought}, {self.reasoning_s:.1f} s" if (self.reasoning_s or 0) >= 0.05 else thought

    @property
    def mark(self) -> str:
        """How it ended, in words, "" when there is nothing to say."""
        if self.error:
            return f"Failed: {self.error}"
        if self.is_running:
            return "Not finished when this was saved"
        return {"cancelled": "Stopped", "length": "Reached the token limit"}.get(self.stop_reason or "", "")

    @property
    def pace(self) -> str:
        """Tokens, speed, how it was speculated and chosen, the first token; "" while nothing is known."""
        if not self.n_tokens:
            return ""
        told = [f"{self.n_tokens} token{'s' * (self.n_tokens != 1)}"]
        told += [f"{self.n_cached} cached"] if self.n_cached else []
        told += [f"{self.n_tokens / self.seconds:.1f} tok/s"] if self.seconds > 0 else []
        told += [", then ".join(filter(None, (self.speculated, self.note)))]
        told += [self.runs[-1].choice, self.runs[0].first_token] if self.runs else []
        return " · ".join(filter(None, told))

    def jsonable(self) -> dict[str, Any]:
        """Return what a page shows, as a plain dict; `footer` is the pace in words."""
        told = {name: value for name, value in asdict(replace(self, cards=(), runs=())).items() if name not in _UNTOLD}
        cards = [card.jsonable() for card in self.cards]
        return told | {"cards": cards, "is_timed": self.runs != (), "footer": self.pace}


def entry_of(turn: TurnLike) -> Entry:
    """Return a remembered turn as an entry."""
    return Entry(
        user=turn.user,
        reasoning=turn.reasoning,
        text=turn.text,
        cards=cards_of(turn.calls, turn.results, is_over=True),
        is_calling=turn.tool != "" and not turn.calls,
        stop_reason=turn.stop_reason,
        n_tokens=turn.n_tokens,
        n_reasoning=turn.n_reasoning,
        reasoning_s=turn.reasoning_s,
        n_cached=turn.n_cached,
        seconds=turn.seconds,
        speculated=_speculated(turn.rounds),
        note=turn.runs[-1].spec_note if turn.runs else "",
        runs=tuple(map(run_facts, turn.runs)),
        error=str(turn.error or ""),
    )


def entry_from_events(user: str, events: Sequence[Event], waiting: Collection[str] = ()) -> Entry:
    """Return the entry that `events` have built so far; a run that is over is `ended_entry`'s.

    Args:
        waiting: ids of the calls that wait for a person.
    """
    parts: dict[Channel, list[str]] = {"content": [], "reasoning": [], "tool": [], "hidden": []}
    for event in map(Apart(), events):
        if isinstance(event, Token):
            parts[event.channel].append(event.text)
    calls = [event for event in events if isinstance(event, ToolCall)]
    results = [event for event in events if isinstance(event, ToolResult)]
    return Entry(
        user=user,
        reasoning="".join(parts["reasoning"]),
        text="".join(parts["content"]),
        cards=cards_of(calls, results, is_over=False, waiting=waiting),
        is_calling=any(parts["tool"]) and not calls,
        n_tokens=sum(map(len, parts.values())),
        n_reasoning=len(parts["reasoning"]),
    )


def ended_entry(user: str, events: Sequence[Event]) -> Entry:
    """Return the entry of a run that is over; one that did not say how it ended was stopped."""
    calls = [event for event in events if isinstance(event, ToolCall)]
    results = [event for event in events if isinstance(event, ToolResult)]
    entry = replace(
        entry_from_events(user, events),
        cards=cards_of(calls, results, is_over=True),
        n_cached=next((event.n_cached for event in events if isinstance(event, PromptUsage)), 0),
        speculated=_speculated(Rounds(event for event in events if isinstance(event, Round))),
    )
    match events[-1] if events else None:
        case Done() as done:
            return replace(
                entry,
                stop_reason=done.stop_reason,
                n_tokens=done.n_tokens,
                reasoning_s=done.timings.reasoning_s,
                seconds=done.elapsed_s,
                note=done.spec_note,
                runs=(run_facts(done),),
            )
        case Failed() as failed:
            return replace(entry, error=failed.message)
        case _:
            return replace(entry, stop_reason="cancelled")


def _speculated(rounds: Rounds) -> str:
    """How the rounds of a reply were played, "" for none."""
    if not rounds:
        return ""
    length = rounds.totals.mean_acceptance_length
    how = "speculated by rejection" if rounds[0].mode == "rejection" else "speculated"
    return how if length is None else f"{how}, τ {length:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A whole conversation.

    Attributes:
        prompts: whether the questions are shown; a cell that holds the question leaves them out.
    """

    turns: tuple[Entry, ...] = ()
    title: str = ""
    prompts: bool = True

    def jsonable(self) -> list[dict[str, Any]]:
        """Return the turns as plain dicts."""
        return [turn.jsonable() for turn in self.turns]

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def __str__(self) -> str:
        blocks = [self.title] if self.title else []
        for turn in self.turns:
            blocks.extend(self._lines(turn))
        if not self.turns:
            blocks.append("(no messages)" if self.prompts else "")
        return "\n\n".join(blocks)

    def _lines(self, turn: Entry) -> Iterable[str]:
        if self.prompts and turn.user:  # a turn that only answers calls has no text of its own
            yield f"You: {turn.user}"
        if turn.reasoning:
            yield f"[{turn.thought}]\n" + "\n".join(f"  {line}" for line in turn.reasoning.splitlines())
        for card in turn.cards:
            yield str(card)
        if turn.is_calling:
            yield f"[{INCOMPLETE}]"
        answer = close_fence(turn.text)
        if answer or (self.prompts and not (turn.cards or turn.is_calling)):
            yield f"Model: {answer}" if self.prompts else answer
        if turn.mark:
            yield f"[{turn.mark}]"

    def _repr_html_(self) -> str:
        body = "".join(part for turn in self.turns for part in self._html(turn))
        if not self.turns and self.prompts:
            body = f'<p style="{_NOTE}">No messages.</p>'
        title = f"<p><strong>{escape(self.title)}</strong></p>" if self.title else ""
        return f'<div class="dsv4-transcript">{title}{body}</div>'

    def _html(self, turn: Entry) -> Iterable[str]:
        if self.prompts and turn.user:
            yield f'<div style="{_BUBBLE}"><strong>You</strong><br>{escape(turn.user)}</div>'
        if turn.reasoning:
            yield (
                f'<details style="margin:.4em 0"><summary style="{_NOTE}">{escape(turn.thought)}</summary>'
                f'<div style="{_WRAP};opacity:.8">{escape(turn.reasoning)}</div></details>'
            )
        for card in turn.cards:
            yield _card_html(card)
        if turn.is_calling:
            yield f'<div style="{_NOTE}">{INCOMPLETE}</div>'
        for is_code, text in split_fences(turn.text):
            if is_code:
                yield f'<pre style="padding:.6em;overflow:auto"><code>{escape(text)}</code></pre>'
            elif text.strip():
                yield f'<div style="{_WRAP}">{escape(text)}</div>'
        if turn.mark:
            yield f'<div style="margin:.4em 0"><em>{escape(turn.mark)}</em></div>'
        if turn.pace:
            yield f'<div style="{_NOTE}">{escape(turn.pace)}</div>'


def _card_html(card: Card) -> str:
    html = f"<div><strong>{escape(card.name)}</strong> · {escape(card.status)}</div>"
    if card.pretty:
        html += _fold("Arguments", card.pretty, is_open=not card.is_long)
    if card.result:
        html += _fold(f"Result · {card.preview}", card.result, is_open=False)
    return f'<div style="{_CARD}">{html}</div>'


def _fold(summary: str, text: str, *, is_open: bool) -> str:
    return (
        f'<details{" open" * is_open}><summary style="{_NOTE}">{escape(summary)}</summary>'
        f'<pre style="{_CODE}"><code>{escape(text)}</code></pre></details>'
    )


def close_fence(text: str) -> str:
    """Return `text` with an unfinished ``` block closed, for display."""
    if len(_FENCE.findall(text)) % 2 == 0:
        return text
    return text + ("```" if text.endswith("\n") else "\n```")


def split_fences(text: str) -> Sequence[tuple[bool, str]]:
    """Return `text` as (is code, text) parts; the fences themselves and their language are left out."""
    parts: list[tuple[bool, str]] = []
    lines: list[str] = []
    is_code = False
    for line in text.split("\n"):
        if _FENCE.match(line):
            parts.append((is_code, "\n".join(lines)))
            lines, is_code = [], not is_code
        else:
            lines.append(line)
    parts.append((is_code, "\n".join(lines)))
    return [part for part in parts if part[0] or part[1]]
