"""One request, from the queue to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv4nb.errors import Dsv4Error
from dsv4nb.events import Done, Event, Failed, Generation, Reasoning, TokenSnapshot
from dsv4nb.session.live import Ledger
from dsv4nb.session.log import Log, OnEnd
from dsv4nb.session.request import Request
from dsv4nb.session.result import generation_of
from dsv4nb.session.timings import THOUGHT, Marks

if TYPE_CHECKING:
    from dsv4nb.engine.taps import Taps  # brings torch


class Journal(Log):
    """The events of one request, and what its readers and the serving thread tell each other.

    Args:
        on_end: called once with the outcome and all events, on the thread that ends the run, before anybody sees
            that it ended.
        in_step: whether the run waits after each round until a reader has `taken` its events.
        may_reuse: whether the run may go on from earlier ones, and later ones from it.
        ledger: of the chat that it belongs to.
        keep_at: lengths of beginnings of the prompt that later runs are going to share.
        taps: who watches its forwards, or changes what is in them.

    Attributes:
        marks: of this request.
        problems: where the reply departs from the format; complete when the run has ended.
        error: why it failed.
    """

    def __init__(
        self,
        request: Request,
        on_end: OnEnd | None = None,
        *,
        in_step: bool = False,
        may_reuse: bool = False,
        ledger: Ledger | None = None,
        keep_at: Sequence[int] = (),
        taps: Taps | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.may_reuse, self.ledger, self.keep_at, self.taps = may_reuse, ledger, keep_at, taps
        self.marks = Marks(request)
        self.submitted_at = self.started_at = time.monotonic()
        self.problems: tuple[str, ...] = ()
        self.error: Dsv4Error | None = None
        self._in_step, self._n_taken = in_step, 0
        self._on_end = on_end
        self._is_claimed = False  # somebody ends it
        self._cancelled = threading.Event()

    # for readers

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._cancelled.is_set()

    def taken(self, n: int) -> None:
        """Let a run that goes in step go on: the first `n` events were dealt with."""
        with self.changed:
            self._n_taken = max(self._n_taken, n)
            self.changed.notify_all()

    def drive(self) -> None:
        """The serving thread drives a run."""

    def cancel(self) -> None:
        """Ask the run to stop; one that is still queued ends at once. Idempotent."""
        with self.changed:
            self._cancelled.set()
            self.changed.notify_all()
        if self._claim(only_queued=True):
            self._end(*self._nothing_done())

    def generation(self, events: Sequence[Event] | None = None) -> Generation:
        """Return the result of a run that ended well, from all its events."""
        return generation_of(self.request, self.events if events is None else events, self.problems)

    # for the serving thread

    def start(self) -> bool:
        """Leave the queue; False when the run was cancelled there."""
        with self.changed:
            if self._is_claimed:
                return False
            self.started_at = time.monotonic()
            self.write((), "running")
            return True

    def settle(self) -> None:
        """Wait for the reader of a run that goes in step, or until it is cancelled."""
        if self._in_step:
            with self.changed:
                self.changed.wait_for(lambda: self._n_taken >= len(self.events) or self.is_cancelled)

    def append(self, event: Event) -> None:
        """Tell readers an event that is not the last."""
        if isinstance(event, Reasoning):
            self.marks.mark(THOUGHT)
        self.write((event,))

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
        with self.changed:
            if self._is_claimed or (only_queued and self.state != "queued"):
                return False
            self._is_claimed = True
            return True

    def _end(self, *last: Event) -> None:
        on_end, self._on_end = self._on_end, None  # a chat would otherwise hold a ticket that holds the chat
        final = last[-1]
        events = (*self.events, *last)
        self.end(last, lambda: final if isinstance(final, Failed) else self.generation(events), on_end)

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
