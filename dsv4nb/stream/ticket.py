"""A submitted request as people hold it: events, result, cancel, state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from dsv4nb.errors import Dsv4Error
from dsv4nb.events import Event, Generation
from dsv4nb.session.log import State
from dsv4nb.session.result import joined
from dsv4nb.stream.iterate import aevents

POLL_S = 0.1  # an interrupt is seen between two waits


class Source(Protocol):
    """What a ticket shows: the journal of one run, or of a turn of several."""

    error: Dsv4Error | None
    state: State

    def poll(self, start: int) -> tuple[list[Event], bool]: ...
    def wait(self, start: int | None, timeout: float) -> bool: ...
    def taken(self, n: int) -> None: ...
    def drive(self) -> None: ...
    def cancel(self) -> None: ...
    def watch(self, callback: Callable[[], None]) -> Callable[[], None]: ...
    def generation(self) -> Generation: ...


class Ticket:
    """One request that was put in the queue.

    Args:
        owner: kept alive as long as the ticket is.
        place: tells how many requests run before it.
    """

    def __init__(self, source: Source, owner: object = None, place: Callable[[], int | None] = lambda: None) -> None:
        self._source, self._owner, self._place = source, owner, place

    @property
    def place(self) -> int | None:
        """How many requests run before this one: 0 when it runs or is next, None once it has ended."""
        return self._place()

    @property
    def state(self) -> State:
        """queued, running, done, cancelled or failed."""
        return self._source.state

    @property
    def text(self) -> str:
        """The content so far."""
        return joined(self._source.poll(0)[0], "content")

    def poll(self, start: int) -> tuple[list[Event], bool]:
        """Return the events from index `start` on, without waiting, and whether the run has ended."""
        return self._source.poll(start)

    def events(self) -> Iterator[Event]:
        """Yield every event from the first on, waiting for those to come; any number of readers may.

        An interrupt while waiting cancels the run and is raised.
        """
        seen = 0
        try:
            while True:
                events, is_finished = self._source.poll(seen)
                yield from events
                seen += len(events)
                if is_finished:
                    return
                if not events:
                    self._source.wait(seen, POLL_S)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when that took longer than `timeout` seconds. Does not cancel."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if self._source.wait(None, max(0.0, left)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end and return the result.

        An interrupt cancels the run, waits until it has ended, and is raised.

        Raises:
            TimeoutError: it is not finished after `timeout` seconds; it runs on.
            Dsv4Error: the run failed.
        """
        try:
            self._source.drive()
            is_finished = self.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            self.wait()
            raise
        if not is_finished:
            raise TimeoutError(f"the run is still {self.state} after {timeout} s; it goes on, cancel() stops it")
        if self._source.error is not None:
            raise self._source.error
        return self._source.generation()

    async def aresult(self) -> Generation:
        """Await the result; cancelling the await cancels the run.

        Raises:
            Dsv4Error: the run failed.
        """
        async for _ in aevents(self):
            pass
        return self.result()

    def taken(self, n: int) -> None:
        """Let a run that goes in step go on: its first `n` events were dealt with."""
        self._source.taken(n)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each event, on the thread that wrote it; it must not block.

        Returns:
            A function that ends this.
        """
        return self._source.watch(callback)

    def cancel(self) -> None:
        """Stop the run before its next forward; one that is queued never starts. Idempotent."""
        self._source.cancel()

    def __repr__(self) -> str:
        return f"<Ticket {self.state}, {len(self._source.poll(0)[0])} events>"
