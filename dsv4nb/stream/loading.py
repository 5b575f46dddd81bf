"""A load while it goes on: written by the thread that loads, read and cancelled by any other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dsv4nb.errors import LoadCancelled
from dsv4nb.weights.progress import LoadStep

LoadState = Literal["loading", "cancelling", "loaded", "cancelled", "failed"]

SAMPLE_S = 0.25  # between two readings that the rate is of
WINDOW_S = 10.0  # that the rate looks back on: shards differ, and a cache of the disk ends

PHASES = {
    "headers": "reading headers",
    "weights": "reading weights",
    "engine": "making the engine ready",
    "warming": "warming up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How a load stands at one moment.

    Attributes:
        rate: bytes a second of late, None while that is not known.
        eta_s: what is left at that rate, None while that is not known.
        error: why it failed, or how it was cancelled.
    """

    name: str
    state: LoadState
    step: LoadStep
    elapsed_s: float
    rate: float | None
    eta_s: float | None
    error: str


class Loading:
    """One load of a model.

    Args:
        name: of the model, for people.
        path: where it is read from.
        listen: called after each step, on the thread that loads.

    Attributes:
        info: facts of the model once it is loaded; shows as rows.
    """

    def __init__(
        self,
        name: str,
        path: str,
        listen: Callable[[Loading], None] = lambda loading: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.path = name, path
        self.info: Any = None
        self.step = LoadStep(phase="headers")
        self._listen, self._clock = listen, clock
        self._state: LoadState = "loading"
        self._error = ""
        self._cancelled = threading.Event()
        self._started = self._now = clock()
        self._ended: float | None = None
        self._readings: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    # for the thread that loads

    def tell(self, step: LoadStep) -> None:
        """Note where the load stands.

        Raises:
            LoadCancelled: somebody asked for that.
        """
        self.step = step
        now = self._clock()
        if step.phase == "weights" and (not self._readings or now - self._readings[-1][0] >= SAMPLE_S):
            with self._lock:
                self._readings.append((now, step.done_bytes))
                while now - self._readings[0][0] > WINDOW_S:
                    self._readings.popleft()
        self._listen(self)
        if self._cancelled.is_set():
            raise LoadCancelled(self.name, step.done_bytes, step.total_bytes)

    def finish(self, info: Any) -> None:
        """Note that the model is loaded."""
        self.info = info
        self._end("loaded")

    def fail(self, error: BaseException) -> None:
        """Note that it will not be loaded."""
        if isinstance(error, LoadCancelled):
            self._end("cancelled", str(error))
        elif isinstance(error, KeyboardInterrupt):
            self._end("cancelled", str(LoadCancelled(self.name, self.step.done_bytes, self.step.total_bytes)))
        else:
            self._end("failed", f"{type(error).__name__}: {error}")

    def _end(self, state: LoadState, error: str = "") -> None:
        self._ended = self._clock()
        self._error = error
        self._state = state
        self._listen(self)

    # for everybody else

    @property
    def is_over(self) -> bool:
        """Whether the model is loaded, or will not be."""
        return self._ended is not None

    def cancel(self) -> None:
        """Stop the load at the next tensor. Idempotent; changes nothing once it is over."""
        self._cancelled.set()

    def figures(self) -> Figures:
        """Return how it stands."""
        now = self._clock() if self._ended is None else self._ended
        state: LoadState = "cancelling" if self._state == "loading" and self._cancelled.is_set() else self._state
        rate = self._rate()
        left = self.step.total_bytes - self.step.done_bytes
        is_reading = state == "loading" and self.step.phase == "weights"
        return Figures(
            name=self.name,
            state=state,
            step=self.step,
            elapsed_s=now - self._started,
            rate=rate,
            eta_s=left / rate if rate and is_reading else None,
            error=self._error,
        )

    def _rate(self) -> float | None:
        with self._lock:
            if len(self._readings) < 2:
                return None
            (first, before), (last, done) = self._readings[0], self._readings[-1]
        return (done - before) / (last - first) if done > before else None
