"""Calls of functions that wait for a person."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.events import ToolCall

POLL_S = 0.05  # a stop is seen between two waits

Answer = bool | Mapping[str, Any]


class Desk:
    """Where calls lie until somebody decides: from any thread, while the turn's own thread waits.

    Args:
        changed: called after each change, on the thread that made it; it must not block.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._news = threading.Condition()
        self._waiting: dict[str, ToolCall] = {}
        self._answers: dict[str, Answer] = {}

    @property
    def waiting(self) -> list[ToolCall]:
        """The calls that nobody has decided about, in their order."""
        with self._news:
            return list(self._waiting.values())

    def lay(self, calls: Sequence[ToolCall]) -> None:
        """Ask about these calls."""
        with self._news:
            self._waiting.update({call.id: call for call in calls})
        self._changed()

    def decide(self, call: str | None, answer: Answer) -> None:
        """Say what becomes of a call.

        Args:
            call: its id, the first one that waits when None.
            answer: True runs it, False declines it, a mapping runs it with these arguments instead.

        Raises:
            RequestError: that call does not wait.
        """
        with self._news:
            key = next(iter(self._waiting), None) if call is None else call
            if key not in self._waiting:
                waiting = ", ".join(self._waiting) or "none"
                asked = "no call waits" if call is None else f"call {call!r} does not wait"
                raise RequestError(f"{asked} for an answer; waiting: {waiting}", param="call")
            assert key is not None
            del self._waiting[key]
            self._answers[key] = answer
            self._news.notify_all()
        self._changed()

    def answer(self, call: ToolCall, is_stopped: Callable[[], bool]) -> Answer | None:
        """Wait until somebody has decided about a call; None when the turn was stopped before."""
        with self._news:
            while call.id not in self._answers:
                if is_stopped():
                    return None
                self._news.wait(POLL_S)
            return self._answers.pop(call.id)

    def clear(self) -> None:
        """Ask no more: the turn goes on, or has ended."""
        with self._news:
            had = bool(self._waiting)
            self._waiting.clear()
            self._answers.clear()
        if had:
            self._changed()
