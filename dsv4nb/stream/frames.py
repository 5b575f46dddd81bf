"""What a run said, in pieces that a page can take: at most thirty a second, whatever the number of screens.

One pump thread serves a kernel. It polls the tickets it watches, hands what is new to their sinks, and runs
the short jobs that comm handlers leave to it. Everything a screen is told therefore comes from one thread, in order.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from dsv4nb.events import Channel, Done, Event, Failed, StopReason, Token, ToolCall, ToolResult
from dsv4nb.session.thoughts import Apart

logger = logging.getLogger(__name__)

FRAMES_PER_S = 30  # 60 gained nothing a reader sees; one message a token was lost from about 900 a second on

LETTERS: dict[Channel, str] = {"content": "c", "reasoning": "r", "tool": "t", "hidden": "h"}


class Pollable(Protocol):
    """The part of a ticket that a watcher needs."""

    @property
    def state(self) -> str: ...

    def poll(self, start: int) -> tuple[Sequence[Event], bool]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Tokens of one run that arrived since the frame before.

    Attributes:
        start: index in the run of the first token, so that a repeated or lost frame is noticed.
        tokens: (channel, text) each.
    """

    run: int
    start: int
    tokens: tuple[tuple[Channel, str], ...]

    def message(self) -> dict[str, Any]:
        """Return what travels; a channel is its letter, which keeps a four-character token under twenty bytes."""
        return {
            "kind": "frame",
            "run": self.run,
            "start": self.start,
            "tokens": [[LETTERS[channel], text] for channel, text in self.tokens],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The run waits or works."""

    run: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A call is complete, or has its result.

    Attributes:
        index: which call of the run it is.
        result: None when it has none yet.
    """

    run: int
    index: int
    call: ToolCall
    result: ToolResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over; its last news.

    Attributes:
        stop_reason: None when it failed.
        error: why it failed, "" otherwise.
    """

    run: int
    stop_reason: StopReason | None
    n_tokens: int
    seconds: float
    error: str


News = Frame | Status | Called | Ended


class Watch:
    """Reads one ticket from where it stopped reading.

    The tokens handed out do not depend on when it is asked: joined, the frames are the run, with a blank
    line between the thoughts of two runs.
    """

    def __init__(self, run: int, ticket: Pollable, sink: Callable[[News], None]) -> None:
        self.run = run
        self.ticket = ticket
        self.sink = sink
        self._seen = 0
        self._start = 0
        self._state = ""
        self._last: Event | None = None
        self._calls: list[ToolCall] = []
        self._apart = Apart()
        self.over = False

    def has_read_all(self) -> bool:
        """Whether there is nothing that `news` would return."""
        events, finished = self.ticket.poll(self._seen)
        return self.over or not (events or finished or self.ticket.state != self._state)

    def news(self) -> list[News]:
        """Return what is new, in order; after an `Ended` there is nothing more."""
        if self.over:
            return []
        events, self.over = self.ticket.poll(self._seen)
        self._seen += len(events)
        self._last = events[-1] if events else self._last
        told: list[News] = []
        state = self.ticket.state
        if state != self._state and state in ("queued", "running"):
            self._state = state
            told.append(Status(run=self.run, state=state))
        tokens = tuple((event.channel, event.text) for event in map(self._apart, events) if isinstance(event, Token))
        if tokens:
            told.append(Frame(run=self.run, start=self._start, tokens=tokens))
            self._start += len(tokens)
        told.extend(self._called(events))
        if self.over:
            told.append(_ended(self.run, self._last, self._start))
        return told

    def _called(self, events: Sequence[Event]) -> Iterator[Called]:
        for event in events:
            if isinstance(event, ToolCall):
                self._calls.append(event)
                yield Called(run=self.run, index=len(self._calls) - 1, call=event, result=None)
            elif isinstance(event, ToolResult):
                found = [i for i, call in enumerate(self._calls) if call.id == event.id]
                for i in found[-1:]:
                    yield Called(run=self.run, index=i, call=self._calls[i], result=event)


def _ended(run: int, last: Event | None, n_tokens: int) -> Ended:
    match last:
        case Done() as done:
            return Ended(
                run=run, stop_reason=done.stop_reason, n_tokens=done.n_tokens, seconds=done.elapsed_s, error=""
            )
        case Failed() as failed:
            return Ended(run=run, stop_reason=None, n_tokens=n_tokens, seconds=0.0, error=failed.message)
        case _:
            return Ended(run=run, stop_reason="cancelled", n_tokens=n_tokens, seconds=0.0, error="")


class Pump:
    """Delivers news to sinks and runs jobs, one thread for all.

    Frames of all watches together stay below `rate`; a watch that has something goes to the end of the row.
    A sink or job that raises is logged and, if it was a sink, watched no longer.
    """

    def __init__(self, rate: float = FRAMES_PER_S) -> None:
        self._period = 1 / rate
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watches: deque[Watch] = deque()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, watch: Watch) -> None:
        """Deliver the news of `watch` until its run ends."""
        self.call(lambda: self._watches.append(watch))

    def call(self, job: Callable[[], None]) -> None:
        """Run a short job on the pump's thread, after the ones before it; return at once."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="dsv4nb-pump", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def drain(self, timeout: float = 5.0) -> bool:
        """Wait until the jobs left so far are done; False when that took too long."""
        done = threading.Event()
        self.call(done.set)
        return done.wait(timeout)

    def _serve(self) -> None:
        due = time.monotonic()
        while True:
            wait = max(0.0, due - time.monotonic()) if self._watches else None
            try:
                job = self._jobs.get(timeout=wait)
            except queue.Empty:
                due = time.monotonic() + self._period
                self._tick()
            else:
                self._attempt(job)

    def _tick(self) -> None:
        """Serve the first watch in the row that has something to say."""
        for _ in range(len(self._watches)):
            watch = self._watches.popleft()
            told: list[News] = []
            if self._attempt(partial(_deliver, watch, told)) and not watch.over:
                self._watches.append(watch)
            if told:
                return

    def _attempt(self, job: Callable[[], None]) -> bool:
        """The one broad handler: a screen that went away must not stop the others."""
        try:
            job()
        except Exception:
            logger.exception("a job of the pump failed")
            return False
        return True


def _deliver(watch: Watch, told: list[News]) -> None:
    told.extend(watch.news())
    for item in told:
        watch.sink(item)


@cache
def shared_pump() -> Pump:
    """Return the kernel's pump."""
    return Pump()
