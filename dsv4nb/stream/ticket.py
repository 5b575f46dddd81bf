"""A submitted request as people hold it: events, result, cancel, state."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dsv4nb.events import Event, Generation
from dsv4nb.session.journal import Journal, State
from dsv4nb.session.result import generation_of, joined
from dsv4nb.stream.iterate import aevents

POLL_S = 0.1  # an interrupt is seen between two waits


class Ticket:
    """One request that was put in the queue.

    Args:
        owner: kept alive as long as the ticket is.
    """

    def __init__(self, journal: Journal, owner: object = None) -> None:
        self._journal = journal
        self._owner = owner

    @property
    def state(self) -> State:
        """queued, running, done, cancelled or failed."""
        return self._journal.state

    @property
    def text(self) -> str:
        """The content so far."""
        return joined(self._journal.poll(0)[0], "content")

    def poll(self, start: int) -> tuple[list[Event], bool]:
        """Return the events from index `start` on, without waiting, and whether the run has ended."""
        return self._journal.poll(start)

    def events(self) -> Iterator[Event]:
        """Yield every event from the first on, waiting for those to come; any number of readers may.

        An interrupt while waiting cancels the run and is raised.
        """
        seen = 0
        try:
            while True:
                events, is_finished = self._journal.poll(seen)
                yield from events
                seen += len(events)
                if is_finished:
                    return
                if not events:
                    self._journal.wait(seen, POLL_S)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when that took longer than `timeout` seconds. Does not cancel."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if self._journal.wait(None, max(0.0, left)):
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
            is_finished = self.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            self.wait()
            raise
        if not is_finished:
            raise TimeoutError(f"the run is still {self.state} after {timeout} s; it goes on, cancel() stops it")
        if self._journal.error is not None:
            raise self._journal.error
        return generation_of(self._journal.request, self._journal.poll(0)[0])

    async def aresult(self) -> Generation:
        """Await the result; cancelling the await cancels the run.

        Raises:
            Dsv4Error: the run failed.
        """
        async for _ in aevents(self):
            pass
        return self.result()

    def cancel(self) -> None:
        """Stop the run before its next forward; one that is queued never starts. Idempotent."""
        self._journal.cancel()

    def __repr__(self) -> str:
        return f"<Ticket {self.state}, {len(self._journal.poll(0)[0])} events>"
