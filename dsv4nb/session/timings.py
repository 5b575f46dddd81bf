"""Marks of one request: what happened when, never what happened to another."""

from __future__ import annotations

import time

from dsv4nb.events import Timings
from dsv4nb.session.request import Request

QUEUED, STARTED, PREFILLED, FIRST_TOKEN, ENDED = "queued", "started", "prefilled", "first_token", "ended"
THOUGHT = "thought"


class Marks:
    """A handful of readings of the clock per request, none per token.

    Labels, in order: called, tokenize_start, tokenize_end, queued, started, prefilled, first_token, thought, ended;
    what did not happen is missing.
    """

    def __init__(self, request: Request) -> None:
        self._at = dict(request.marks)
        self._is_thinking = request.is_thinking
        self.mark(QUEUED)

    def mark(self, label: str) -> None:
        """Note that `label` happens now; the first time counts."""
        self._at.setdefault(label, time.monotonic())

    def since(self, label: str, now: float) -> float | None:
        """Return the seconds from `label` to a reading of the monotonic clock; None when it did not happen."""
        at = self._at.get(label)
        return None if at is None else now - at

    def timings(self) -> Timings:
        """Return what is known so far."""
        at = self._at
        called = next(iter(at.values()))
        started = at.get(STARTED, time.monotonic())
        return Timings(
            queue_s=started - at[QUEUED],
            prepare_s=at[QUEUED] - called,
            prefill_s=self._between(STARTED, PREFILLED),
            first_token_s=self._between(next(iter(at)), FIRST_TOKEN),
            decode_s=self._between(FIRST_TOKEN, ENDED),
            reasoning_s=self._reasoning_s(),
            marks=tuple((label, when - called) for label, when in at.items()),
        )

    def _reasoning_s(self) -> float | None:
        if not self._is_thinking:
            return None
        thought = self._between(FIRST_TOKEN, THOUGHT if THOUGHT in self._at else ENDED)
        return None if thought is None else max(0.0, thought)  # a round can hold the first token and the end of it

    def _between(self, first: str, last: str) -> float | None:
        if first not in self._at or last not in self._at:
            return None
        return self._at[last] - self._at[first]
