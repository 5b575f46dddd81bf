"""Marks of one request: what happened when, never what happened to another."""

from __future__ import annotations

import time

from dsv4nb.events import Timings
from dsv4nb.session.request import Request

QUEUED, STARTED, PREFILLED, FIRST_TOKEN, ENDED = "queued", "started", "prefilled", "first_token", "ended"


class Marks:
    """A handful of readings of the clock per request, none per token.

    Labels, in order: called, tokenize_start, tokenize_end, queued, started, prefilled, first_token, ended; what did
    not happen is missing.
    """

    def __init__(self, request: Request) -> None:
        self._at = dict(request.marks)
        self.mark(QUEUED)

    def mark(self, label: str) -> None:
        """Note that `label` happens now; the first time counts."""
        self._at.setdefault(label, time.monotonic())

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
            marks=tuple((label, when - called) for label, when in at.items()),
        )

    def _between(self, first: str, last: str) -> float | None:
        if first not in self._at or last not in self._at:
            return None
        return self._at[last] - self._at[first]
