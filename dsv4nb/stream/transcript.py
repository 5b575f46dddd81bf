"""A conversation as a value that a person can read: as text, and as HTML that needs neither kernel nor JavaScript."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Protocol

from dsv4nb.events import Channel, Event, StopReason, Token

_FENCE = re.compile(r"^ {0,3}```", re.MULTILINE)

_NOTE = "opacity:.7;font-size:90%"
_BUBBLE = "white-space:pre-wrap;margin:.6em 0;padding:.4em .8em;border-left:3px solid #8888"
_WRAP = "white-space:pre-wrap;margin:.4em 0"


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
    def stop_reason(self) -> StopReason | None: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_reasoning(self) -> int | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One question and what came back.

    Attributes:
        tool: the tool calls as the model wrote them.
        stop_reason: None while it runs or when it failed.
        n_reasoning: tokens of the reasoning, None when nobody counted.
        seconds: 0 while it runs.
        error: why it failed, "" otherwise.
    """

    user: str
    reasoning: str = ""
    text: str = ""
    tool: str = ""
    stop_reason: StopReason | None = None
    n_tokens: int = 0
    n_reasoning: int | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def thought(self) -> str:
        """The line above the folded reasoning."""
        if self.n_reasoning is None:
            return "Thoughts"
        return f"Thought for {self.n_reasoning} token{'s' * (self.n_reasoning != 1)}"

    @property
    def mark(self) -> str:
        """How it ended, in words, "" when there is nothing to say."""
        if self.error:
            return f"Failed: {self.error}"
        return {"cancelled": "Stopped", "length": "Reached the token limit"}.get(self.stop_reason or "", "")

    @property
    def pace(self) -> str:
        """Tokens and speed, "" while nothing is known."""
        if not self.n_tokens:
            return ""
        counted = f"{self.n_tokens} token{'s' * (self.n_tokens != 1)}"
        return f"{counted} · {self.n_tokens / self.seconds:.1f} tok/s" if self.seconds > 0 else counted


def entry_of(turn: TurnLike) -> Entry:
    """Return a remembered turn as an entry."""
    return Entry(
        user=turn.user,
        reasoning=turn.reasoning,
        text=turn.text,
        tool=turn.tool,
        stop_reason=turn.stop_reason,
        n_tokens=turn.n_tokens,
        n_reasoning=turn.n_reasoning,
        seconds=turn.seconds,
        error=str(turn.error or ""),
    )


def entry_from_events(user: str, events: Iterable[Event]) -> Entry:
    """Return the entry that `events` have built so far; how the run ended is the caller's to add."""
    parts: dict[Channel, list[str]] = {"content": [], "reasoning": [], "tool": [], "hidden": []}
    for event in events:
        if isinstance(event, Token):
            parts[event.channel].append(event.text)
    return Entry(
        user=user,
        reasoning="".join(parts["reasoning"]),
        text="".join(parts["content"]),
        tool="".join(parts["tool"]),
        n_tokens=sum(map(len, parts.values())),
        n_reasoning=len(parts["reasoning"]),
    )


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
        return [asdict(turn) for turn in self.turns]

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
        if self.prompts:
            yield f"You: {turn.user}"
        if turn.reasoning:
            yield f"[{turn.thought}]\n" + "\n".join(f"  {line}" for line in turn.reasoning.splitlines())
        answer = close_fence(turn.text)
        if answer or self.prompts:
            yield f"Model: {answer}" if self.prompts else answer
        if turn.tool:
            yield turn.tool.strip("\n")
        if turn.mark:
            yield f"[{turn.mark}]"

    def _repr_html_(self) -> str:
        body = "".join(part for turn in self.turns for part in self._html(turn))
        if not self.turns and self.prompts:
            body = f'<p style="{_NOTE}">No messages.</p>'
        title = f"<p><strong>{escape(self.title)}</strong></p>" if self.title else ""
        return f'<div class="dsv4-transcript">{title}{body}</div>'

    def _html(self, turn: Entry) -> Iterable[str]:
        if self.prompts:
            yield f'<div style="{_BUBBLE}"><strong>You</strong><br>{escape(turn.user)}</div>'
        if turn.reasoning:
            yield (
                f'<details style="margin:.4em 0"><summary style="{_NOTE}">{escape(turn.thought)}</summary>'
                f'<div style="{_WRAP};opacity:.8">{escape(turn.reasoning)}</div></details>'
            )
        for is_code, text in split_fences(turn.text):
            if is_code:
                yield f'<pre style="padding:.6em;overflow:auto"><code>{escape(text)}</code></pre>'
            elif text.strip():
                yield f'<div style="{_WRAP}">{escape(text)}</div>'
        if turn.tool:
            yield f'<pre style="padding:.6em;white-space:pre-wrap"><code>{escape(turn.tool.strip())}</code></pre>'
        if turn.mark:
            yield f'<div style="margin:.4em 0"><em>{escape(turn.mark)}</em></div>'
        if turn.pace:
            yield f'<div style="{_NOTE}">{escape(turn.pace)}</div>'


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
