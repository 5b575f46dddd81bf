"""A submitted request's life: queued, running, and over in one of three ways."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from dsv4nb.errors import Dsv4Error
from dsv4nb.events import Done, Event, Failed, Generation, TokenSnapshot
from dsv4nb.session.request import Request

logger = logging.getLogger(__name__)

State = Literal["queued", "running", "done", "cancelled", "failed"]

Outcome = Generation | Dsv4Error
OnEnd = Callable[[Outcome, Sequence[Event]], None]


class Job:
    """One request and what has come of it; written by the serving thread, read by anybody.

    Args:
        on_end: called with the outcome and the events just before anybody can see the end; on the serving thread, or
            on that of `cancel` when the request had not started.
    """

    def __init__(self, request: Request, on_end: OnEnd | None = None) -> None:
        self.request = request
        self._on_end = on_end
        self._submitted = time.perf_counter()
        self._queue_s = 0.0
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._state: State = "queued"
        self._is_ending = False
        self._cancelled = threading.Event()
        self._outcome: Outcome | None = None
        self._listeners: list[Callable[[], None]] = []

    # anybody

    @property
    def state(self) -> State:
        """Where it stands; "cancelled" only once it is over."""
        return self._state

    @property
    def outcome(self) -> Outcome | None:
        """What came of it, None until it is over."""
        return self._outcome

    @property
    def queue_s(self) -> float:
        """How long it waited."""
        return self._queue_s

    def is_cancelled(self) -> bool:
        """Whether somebody wants it to end."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask it to end; one that has not started ends at once. Returns at once."""
        self._cancelled.set()
        with self._changed:
            is_mine = self._state == "queued" and not self._is_ending
            self._is_ending = self._is_ending or is_mine
        if is_mine:
            self._queue_s = time.perf_counter() - self._submitted
            self._end_unstarted()

    def poll(self, start: int) -> tuple[list[Event], bool]:
        """Return the events from number `start` on, and whether there will be no more."""
        with self._changed:
            return self._events[start:], self._outcome is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when it did not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._outcome is not None, timeout)

    def wait_beyond(self, n_events: int, timeout: float) -> None:
        """Wait until there are more than `n_events` events or none will come."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > n_events or self._outcome is not None, timeout)

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at every event, on the serving thread; return what ends that. It must only set a flag."""
        with self._changed:
            self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    # the serving thread

    def start(self) -> bool:
        """Leave the queue; False when it was cancelled there."""
        with self._changed:
            if self._is_ending:
                return False
            self._state = "running"
            self._queue_s = time.perf_counter() - self._submitted
            return True

    def tell(self, event: Event) -> None:
        """Add an event."""
        with self._changed:
            self._events.append(event)
            self._notify()

    def succeed(self, generation: Generation) -> None:
        """End with a result."""
        state: State = "cancelled" if generation.stop_reason == "cancelled" else "done"
        self._end(generation, generation.done, state)

    def fail(self, error: Dsv4Error) -> None:
        """End with an error."""
        failed = Failed(code=error.code, message=str(error), param=error.param, retryable=error.retryable)
        self._end(error, failed, "failed")

    def _end_unstarted(self) -> None:
        request = self.request
        done = Done(
            stop_reason="cancelled",
            n_tokens=0,
            n_prompt=len(request.prompt),
            n_cached=0,
            queue_s=self._queue_s,
            elapsed_s=request.composed_s,
            config=request.sampler,
        )
        self.tell(TokenSnapshot(ids=()))
        self.succeed(
            Generation(text="", reasoning="", raw_text="", ids=(), all_ids=request.prompt, done=done)
        )

    def _end(self, outcome: Outcome, last: Done | Failed, state: State) -> None:
        if self._on_end is not None:
            try:
                self._on_end(outcome, tuple(self._events))
            except Exception:
                logger.exception("what listens to the end of a request failed")
        with self._changed:
            self._events.append(last)
            self._state = state
            self._outcome = outcome
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for callback in tuple(self._listeners):
            callback()
