"""What a run has said so far: written by one thread, read by any number of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from dsv4nb.errors import Dsv4Error
from dsv4nb.events import Done, Event, Failed, Generation, TokenSnapshot
from dsv4nb.session.request import Request
from dsv4nb.session.result import generation_of
from dsv4nb.session.timings import Marks

State = Literal["queued", "running", "done", "cancelled", "failed"]

OnEnd = Callable[[Generation | Failed, Sequence[Event]], None]


class Journal:
    """The events of one request, from the queue to its end.

    Args:
        on_end: called once with the outcome and all events, on the thread that ends the run, before anybody sees
            that it ended.
        in_step: whether the run waits after each round until a reader has `taken` its events.

    Attributes:
        marks: of this request.
        problems: where the reply departs from the format; complete when the run has ended.
        error: why it failed.
    """

    def __init__(self, request: Request, on_end: OnEnd | None = None, *, in_step: bool = False) -> None:
        self.request = request
        self.marks = Marks(request)
        self.submitted_at = self.started_at = time.monotonic()
        self.problems: tuple[str, ...] = ()
        self.error: Dsv4Error | None = None
        self._in_step, self._n_taken = in_step, 0
        self._on_end = on_end
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._state: State = "queued"
        self._is_claimed = False  # somebody ends it
        self._cancelled = threading.Event()

    # for readers

    @property
    def state(self) -> State:
        """queued, running, done, cancelled or failed."""
        return self._state

    @property
    def is_finished(self) -> bool:
        """Whether the last event was written."""
        return self._state not in ("queued", "running")

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._cancelled.is_set()

    def poll(self, start: int) -> tuple[list[Event], bool]:
        """Return the events from index `start` on, without waiting, and whether these were the last."""
        with self._changed:
            return self._events[start:], self.is_finished

    def wait(self, start: int | None, timeout: float) -> bool:
        """Wait until there are more than `start` events or the run has ended; None waits for the end."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.is_finished or (start is not None and len(self._events) > start), timeout
            )

    def taken(self, n: int) -> None:
        """Let a run that goes in step go on: the first `n` events were dealt with."""
        with self._changed:
            self._n_taken = max(self._n_taken, n)
            self._changed.notify_all()

    def drive(self) -> None:
        """The serving thread drives a run."""

    def cancel(self) -> None:
        """Ask the run to stop; one that is still queued ends at once. Idempotent."""
        with self._changed:
            self._cancelled.set()
            self._changed.notify_all()
        if self._claim(only_queued=True):
            self._end(*self._nothing_done())

    def generation(self, events: Sequence[Event] | None = None) -> Generation:
        """Return the result of a run that ended well, from all its events."""
        return generation_of(self.request, self._events if events is None else events, self.problems)

    # for the serving thread

    def start(self) -> bool:
        """Leave the queue; False when the run was cancelled there."""
        with self._changed:
            if self._is_claimed:
                return False
            self._state = "running"
            self.started_at = time.monotonic()
            self._changed.notify_all()
            return True

    def settle(self) -> None:
        """Wait for the reader of a run that goes in step, or until it is cancelled."""
        if self._in_step:
            with self._changed:
                self._changed.wait_for(lambda: self._n_taken >= len(self._events) or self.is_cancelled)

    def append(self, event: Event) -> None:
        """Tell readers an event that is not the last."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def finish(self, snapshot: TokenSnapshot, done: Done) -> None:
        """End the run with its last two events."""
        if self._claim():
            self._end(snapshot, done)

    def fail(self, error: Dsv4Error) -> None:
        """End the run with an error."""
        if self._claim():
            self.error = error
            self._end(Failed(code=error.code, message=str(error), param=error.param, retryable=error.retryable))

    def _claim(self, *, only_queued: bool = False) -> bool:
        with self._changed:
            if self._is_claimed or (only_queued and self._state != "queued"):
                return False
            self._is_claimed = True
            return True

    def _end(self, *last: Event) -> None:
        final = last[-1]
        try:
            if self._on_end is not None:
                events = (*self._events, *last)
                self._on_end(final if isinstance(final, Failed) else self.generation(events), events)
        finally:
            self._on_end = None  # a chat would otherwise hold a ticket that holds the chat
            with self._changed:
                self._events += last
                if isinstance(final, Done):
                    self._state = "cancelled" if final.stop_reason == "cancelled" else "done"
                else:
                    self._state = "failed"
                self._changed.notify_all()

    def _nothing_done(self) -> tuple[TokenSnapshot, Done]:
        timings = self.marks.timings()
        done = Done(
            stop_reason="cancelled",
            n_tokens=0,
            n_prompt=len(self.request.prompt),
            n_cached=0,
            queue_s=timings.queue_s,
            elapsed_s=timings.prepare_s,
            config=self.request.config,
            route=self.request.route,
            timings=timings,
        )
        return TokenSnapshot(ids=()), done
