"""The serving thread of one engine: order, cancellation, containment."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from dsv4nb.engine.protocol import Engine
from dsv4nb.engine.speculate import Speculator
from dsv4nb.errors import Dsv4Error, EngineDead, EngineError, ModelClosed, Overloaded, RequestError
from dsv4nb.events import Timings
from dsv4nb.session.journal import Journal
from dsv4nb.session.log import OnEnd
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.request import ChatTokens, Request
from dsv4nb.session.run import Place, run
from dsv4nb.session.switching import brisk_switching
from dsv4nb.session.waiting import Past, Tally, Waiting

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

JOIN_S = 2.0
KEPT_PAST = 50  # requests that have ended and are still told of


class Server:
    """Runs requests one at a time in the order they came; it alone touches the engine.

    Args:
        name: of the model; the thread is called `dsv4nb-serve-<name>`.
    """

    def __init__(self, engine: Engine, tokens: ChatTokens, name: str, prefixes: Prefixes | None = None) -> None:
        self._engine, self._tokens, self._name = engine, tokens, name
        self.prefixes = prefixes or Prefixes()
        self.speculator = Speculator(engine)
        self._queue: queue.SimpleQueue[Journal | Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[Journal, Tally] = {}  # queued or running, in order
        self._past: deque[Past] = deque(maxlen=KEPT_PAST)
        self._submitted = 0
        self._on_change: tuple[Callable[[], None], ...] = ()
        self._dead: EngineDead | None = None
        self.timings: Timings | None = None  # of the last run that ended well
        self._lock = threading.RLock()  # a forgotten handle may be closed wherever garbage is collected
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name=f"dsv4nb-serve-{name}", daemon=True)
        self.prefixes.serve(lambda job: self.do(lambda engine, prefixes: job(engine)))
        self._thread.start()

    def submit(self, request: Request, on_end: OnEnd | None = None, **options: Any) -> Journal:
        """Put a request at the end of the queue.

        Args:
            on_end, options: see `Journal`.

        Raises:
            ModelClosed: after `close`.
            EngineDead: the device was lost in an earlier run.
        """
        journal = Journal(request, on_end, **options)
        with self._lock:
            self._require_alive()
            self._submitted += 1
            self._open[journal] = Tally(self._submitted, journal)
            self._queue.put(journal)
        self._changed()
        return journal

    def do(self, job: Callable[[Engine, Prefixes], Result]) -> Result:
        """Run `job` on the serving thread, behind what is in the queue, and wait for its result.

        Raises:
            ModelClosed, EngineDead: as `submit`.
            BaseException: what the job raised.
        """
        if threading.current_thread() is self._thread:  # a listener asks; waiting for itself would take for ever
            return job(self._engine, self.prefixes)
        work: Future[Result] = Future()
        with self._lock:
            self._require_alive()
            self._queue.put(lambda: _carry_out(work, lambda: job(self._engine, self.prefixes)))
        return work.result()

    def _require_alive(self) -> None:
        if self._is_closed:
            raise ModelClosed(self._name)
        if self._dead is not None:
            raise EngineDead(str(self._dead))

    def queue(self, most: int | None = None) -> list[Waiting]:
        """Return the requests that have not ended, in the order in which they run; the first `most` of them."""
        with self._lock:
            tallies = [tally for journal, tally in self._open.items() if not journal.is_finished]
        return [tally.waiting() for tally in tallies[:most]]

    def queue_length(self) -> int:
        """Return how many requests have not ended."""
        return len(self._unfinished())

    def past(self) -> list[Past]:
        """Return the last requests that have ended, the latest first."""
        with self._lock:
            # one that was cancelled in the queue is there until its turn
            tallies = [tally for journal, tally in self._open.items() if journal.is_finished]
            told = list(self._past)
        return sorted([*told, *(tally.past() for tally in tallies)], key=lambda past: past.id, reverse=True)

    def cancel(self, number: int) -> None:
        """Cancel the request with this id; one that is queued never starts.

        Raises:
            RequestError: none with this id is queued or running.
        """
        with self._lock:
            found = [journal for journal, tally in self._open.items() if tally.number == number]
        if not found or found[0].is_finished:
            raise RequestError(
                f"request {number} is not in the queue; it has ended, or there never was one", param="id"
            )
        found[0].cancel()

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after a request came or ended, on the thread where it did; it must not block.

        Returns:
            A function that ends this.
        """
        with self._lock:
            self._on_change = (*self._on_change, callback)

        def remove() -> None:
            with self._lock:
                self._on_change = tuple(other for other in self._on_change if other is not callback)

        return remove

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()

    def place(self, journal: Journal) -> int | None:
        """Return how many requests run before `journal`: 0 for the one that runs or is next, None once it has ended."""
        unfinished = self._unfinished()
        return unfinished.index(journal) if journal in unfinished else None

    def _unfinished(self) -> list[Journal]:
        with self._lock:
            return [journal for journal in self._open if not journal.is_finished]

    def close(self) -> None:
        """Cancel what is queued and running, end the thread and free the engine; idempotent.

        Returns after `JOIN_S` at the latest; a forward that takes longer is left to the thread, which then frees
        the engine itself.
        """
        with self._lock:
            self._is_closed = True
            ending = list(self._open)
        try:
            for journal in ending:
                journal.cancel()
        finally:
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)
        with contextlib.suppress(Exception):  # of a screen that shows the queue
            self._changed()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, Journal):
                self._serve_one(work)
            else:
                work()
            del work  # an idle thread keeps no prompt and no reply
        with contextlib.suppress(Exception):
            self.prefixes.forget()
        self._engine.close()

    def _serve_one(self, journal: Journal) -> None:
        if self._is_closed:
            journal.cancel()
        if journal.start():
            self._attempt(journal)
        with self._lock:
            self._past.append(self._open.pop(journal).past())
        with contextlib.suppress(Exception):  # of a screen that shows the queue
            self._changed()

    def _attempt(self, journal: Journal) -> None:
        """The one broad handler: whatever goes wrong becomes the last event of its own run."""
        place = Place()
        try:
            if self._dead is not None:
                raise EngineDead(str(self._dead))
            with _tapped(self._engine, journal), brisk_switching():
                self.timings = run(self._engine, self._tokens, journal, place, self.prefixes, self.speculator)
        except BaseException as error:
            logger.debug("a run failed kind=%s", type(error).__name__, exc_info=error)
            _forget_frames(error)
            typed = _typed(error, place)
            if isinstance(typed, EngineDead):
                self._dead = typed
            with contextlib.suppress(BaseException):  # of whoever listens for the end
                journal.fail(typed)


def _tapped(engine: Engine, journal: Journal) -> AbstractContextManager[None]:
    """Let a run's taps see its forwards."""
    if journal.taps is None:
        return contextlib.nullcontext()
    from dsv4nb.engine.taps import tapped  # brings torch

    return tapped(engine, journal.taps)


def _carry_out(work: Future[Result], job: Callable[[], Result]) -> None:
    try:
        work.set_result(job())
    except BaseException as error:
        work.set_exception(error)


_OUT_OF_MEMORY = ("out of memory", "cannot allocate memory")
# after these, every further call on the device fails or, worse, does not
_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable",
    "device is lost",
)


def _forget_frames(error: BaseException) -> None:
    """Let go of what the frames of an error and of those behind it hold: the state, which may be gigabytes."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def _typed(error: BaseException, place: Place) -> Dsv4Error:
    """Return the error as one of ours; what it says may be anything."""
    if isinstance(error, Dsv4Error):
        return error
    try:
        said = str(error)
    except BaseException:
        said = "it cannot be printed"
    what = f"{type(error).__name__}{': ' * bool(said)}{said}"
    typed: EngineError
    if isinstance(error, MemoryError) or any(text in said.lower() for text in _OUT_OF_MEMORY):
        typed = Overloaded(
            f"memory ran out: {what} ({place}). What the request held is free again; ask for less, or try again."
        )
    elif "CUDA" in said and any(text in said for text in _LOST):
        typed = EngineDead(f"the device was lost: {what} ({place}). Restart the kernel and load the model again.")
    else:
        typed = EngineError(f"generation panicked: {what} ({place})")
    typed.__cause__ = error
    return typed
