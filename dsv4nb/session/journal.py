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

State = Literal["queued", "running", "done", "cancelled", "failed"]

OnEnd = Callable[[Generation | Failed, Sequence[Event]], None]


class Journal:
    """The events of one request, from the queue to its end.

    Args:
        on_end: called once with the outcome and all events, on the thread that ends the run, before anybody sees
            that it ended.
    """

    def __init__(self, request: Request, on_end: OnEnd | None = None) -> None:
        self.request = request
        self.submitted_at = time.monotonic()
        self.error: Dsv4Error | None = None
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

    def cancel(self) -> None:
        """Ask the run to stop; one that is still queued ends at once. Idempotent."""
        self._cancelled.set()
        if self._claim(only_queued=True):
            self._end(*self._nothing_done())

    # for the serving thread

    def start(self) -> bool:
        """Leave the queue; False when the run was cancelled there."""
        with self._changed:
            if self._is_claimed:
                return False
            self._state = "running"
            self._changed.notify_all()
            return True

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
                self._on_end(final if isinstance(final, Failed) else generation_of(self.request, events), events)
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
        done = Done(
            stop_reason="cancelled",
            n_tokens=0,
            n_prompt=len(self.request.prompt),
            n_cached=0,
            queue_s=time.monotonic() - self.submitted_at,
            elapsed_s=self.request.prepare_s,
            config=self.request.config,
        )
        return TokenSnapshot(ids=()), done
