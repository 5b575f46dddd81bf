"""Looks inside the model for a cache panel: what a token read, and which experts; one look after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.errors import RequestError
from dsv4nb.session.inspection import ABSENT, Inspection
from dsv4nb.widgets.cache_facts import Model, Strip

WHOLE = 4096  # tokens that are looked at in one go, so that every further question about them is answered at once


class Errands:
    """Runs jobs that may wait for the engine, in order, on a thread of its own that lives as long as there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_open = 0

    def run(self, job: Callable[[], None]) -> None:
        """Put a job at the end; it raises nothing."""
        with self._lock:
            self._n_open += 1
            self._jobs.put(job)
            if self._n_open == 1:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._n_open -= 1
                if not self._n_open:
                    return


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Numbers for a page: facts as JSON, arrays as little-endian buffers in their order."""

    facts: dict[str, Any]
    buffers: tuple[npt.NDArray[Any], ...]


class Inside:
    """Inspections of one strip at a time, kept until another is asked for; on one thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._key = ""
        self._whole: Inspection | None = None
        self._is_too_large = False
        self._routing: Inspection | None = None

    def reads(self, strip: Strip, token: int, layer: int) -> Answer:
        """Return what a token read in a layer.

        Raises:
            Dsv4Error: the token or the layer is not there, or the model is closed.
        """
        self._turn_to(strip)
        seen = self._seen(strip, token)
        reads, told = seen.reads(token, layer), seen.attention[layer]
        row = int(np.searchsorted(seen.tokens, reads.token))
        rows = reads.of("row")
        far = told.entries[row] != ABSENT
        scores = told.scores[row][far] if told.scores is not None else np.empty(0)
        facts = {
            "kind": told.kind,
            "ratio": told.ratio,
            "reach": 2 * told.ratio if told.scores is not None else told.ratio,
            "first": rows[0].number,
            "rows": len(rows),
            "entries": int(far.sum()),
            "sink": float(told.sink[row].mean()),
            "visible": (reads.token + 1) // told.ratio if told.ratio else 0,
        }
        window = told.window[row].mean(0)[-len(rows) :]
        mass = told.mass[row].mean(0)[far]
        return Answer(
            facts=facts,
            buffers=(
                _buffer(window, np.float32),
                _buffer(told.entries[row][far], np.int32),
                _buffer(mass, np.float32),
                _buffer(scores, np.float32),
            ),
        )

    def experts(self, strip: Strip, first: int, last: int) -> Answer:
        """Return how many of the tokens first … last - 1 visited each expert of each layer.

        Raises:
            Dsv4Error: as `reads`.
        """
        self._turn_to(strip)
        n = len(strip.ids)
        if not 0 <= first < last <= n:
            raise RequestError(f"tokens {first} to {last - 1} are not among 0 to {n - 1}", param="first")
        if self._routing is None:
            self._routing = self._model.inspect(strip.ids, attention=False, logits=False)
        routing = self._routing.routing
        counts = routing.counts(range(first, last))
        facts = {"layers": len(routing.layers), "experts": routing.n_experts, "tokens": last - first}
        return Answer(facts=facts, buffers=(_buffer(counts, np.int32),))

    def _turn_to(self, strip: Strip) -> None:
        if strip.key != self._key:
            self._key, self._whole, self._routing, self._is_too_large = strip.key, None, None, False

    def _seen(self, strip: Strip, token: int) -> Inspection:
        if self._whole is None and not self._is_too_large and len(strip.ids) <= WHOLE:
            try:
                self._whole = self._routing = self._model.inspect(strip.ids, logits=False)
            except RequestError as error:
                if error.param != "tokens":
                    raise
                self._is_too_large = True
        if self._whole is not None:
            return self._whole
        alone: Inspection = self._model.inspect(strip.ids, tokens=[token], logits=False)
        return alone


def _buffer(values: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values, np.dtype(dtype).newbyteorder("<"))
