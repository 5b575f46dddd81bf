"""A call of a tool as a value that a person can read."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsv4nb.events import ToolCall, ToolResult

CardState = Literal["waiting", "running", "answered", "not_run", "failed", "unanswered"]

_LINE = 60  # characters of arguments that stay on one line, and of a result that its fold shows
_LONG = 12  # lines of arguments, from which on they are folded
_STATUS = {
    "waiting": "waits for your approval",
    "running": "running…",
    "answered": "answered",
    "unanswered": "no result",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A call and what it came to.

    Attributes:
        id: of the call.
        arguments: JSON, as it was run or else as the model wrote it.
        state: waiting: for a person to approve it; running: it has no result yet; unanswered: nor will it get one in
            this turn; not_run: it was declined, or the turn was stopped.
        reason: why it failed or was not run, "" otherwise.
        result: what the model reads.
    """

    name: str
    id: str = ""
    arguments: str
    state: CardState
    reason: str = ""
    result: str = ""

    @property
    def pretty(self) -> str:
        """The arguments for reading, "" when there are none."""
        try:
            value = json.loads(self.arguments.strip() or "{}")
            line = json.dumps(value, ensure_ascii=False)
            line.encode()  # an escaped half of a surrogate pair stays escaped
            if value == {}:
                return ""
            return line if len(line) <= _LINE else json.dumps(value, ensure_ascii=False, indent=2)
        except (ValueError, RecursionError):
            return self.arguments

    @property
    def is_long(self) -> bool:
        """Whether the arguments are better folded."""
        text = self.pretty
        return text.count("\n") >= _LONG or len(text) > _LONG * _LINE

    @property
    def status(self) -> str:
        """The state in words."""
        if self.state in ("failed", "not_run"):
            return f"{'failed' if self.state == 'failed' else 'not run'}: {self.reason}"
        return _STATUS[self.state]

    @property
    def preview(self) -> str:
        """The beginning of the result, on one line."""
        line = " ".join(self.result[: 4 * _LINE].split())
        return line if len(line) <= _LINE and len(self.result) <= 4 * _LINE else f"{line[: _LINE - 1]}…"

    def jsonable(self) -> dict[str, Any]:
        """Return what a page shows."""
        return {
            "id": self.id,
            "name": self.name,
            "arguments": self.pretty,
            "is_long": self.is_long,
            "state": self.state,
            "status": self.status,
            "result": self.result,
            "preview": self.preview,
        }

    def __str__(self) -> str:
        return f"[Call] {self.name}({self.arguments}){f' → {self.result}' if self.result else ''}"


def card_of(call: ToolCall, result: ToolResult | None, *, is_over: bool, waits: bool = False) -> Card:
    """Return a call with its result, if there is one.

    Args:
        is_over: whether its turn has ended.
        waits: whether it waits for a person.
    """
    if result is None:
        state: CardState = "unanswered" if is_over else "waiting" if waits else "running"
        return Card(id=call.id, name=call.name, arguments=call.arguments, state=state)
    return Card(
        id=call.id,
        name=call.name,
        arguments=result.arguments or call.arguments,
        state=_state(result),
        reason=result.error,
        result=result.content,
    )


def cards_of(
    calls: Sequence[ToolCall], results: Sequence[ToolResult], *, is_over: bool, waiting: Collection[str] = ()
) -> tuple[Card, ...]:
    """Return a card per call, in their order.

    Args:
        waiting: ids of those that wait for a person.
    """
    answers = {result.id: result for result in results}
    return tuple(card_of(call, answers.get(call.id), is_over=is_over, waits=call.id in waiting) for call in calls)


def _state(result: ToolResult) -> CardState:
    if not result.error:
        return "answered"
    return "failed" if result.arguments else "not_run"  # the arguments are those that it was run with
