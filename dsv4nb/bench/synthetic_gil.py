"""Decode on random weights while a cell computes in pure Python: what of its speed a GPU's engine keeps.

A thread runs forwards one after the other and lets the GPU choose behind their rows, each time what is run next, as the
serving thread does; the main thread computes meanwhile, or waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4nb.bench.asked import Asked, Ran
from dsv4nb.bench.gil import INTERVALS_S, LIMIT_S, Samples, medians, spin, spin_alone, switching_every, table
from dsv4nb.bench.rig import Rig, rig
from dsv4nb.config import SamplerConfig
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.session.switching import brisk_switching

SAMPLED = SamplerConfig(temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Forwards per second; of one row, tokens per second.

    Attributes:
        arms: as of `gil.Report`, by rows of a forward.
    """

    ran: Ran
    context: int
    runs: int
    forwards: int
    arms: Mapping[str, Mapping[str, tuple[float, float, float]]]

    def __str__(self) -> str:
        head = f"forwards/s at {self.context}, medians of {self.runs} runs of {self.forwards}, arms in turn"
        return "\n".join([*(f"{label:<12}{text}" for label, text in self.ran.rows()), "", head, *table(self.arms)])


def synthetic_gil(asked: Asked, *, new: int, runs: int) -> Report:
    """Measure every width at the first context, the arms in turn.

    Args:
        new: forwards of a run.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig`.
    """
    alone = spin_alone()
    samples: Samples = {}
    with rig(asked, rows=new + MAX_ROWS, counts=False) as made:
        for width in asked.widths:
            rate(made, width, min(new, 8))  # compiles, captures, replays
        for _ in range(runs):
            for width in asked.widths:
                for interval in INTERVALS_S:
                    with switching_every(interval):
                        idle, _ = rate(made, width, new)
                        busy, cell = rate(made, width, new, busy=True)
                    name = f"{width} row{'s' * (width > 1)} a forward"
                    samples.setdefault((name, interval), []).append((idle, busy, cell / alone))
        return Report(ran=made.facts, context=asked.contexts[0], runs=runs, forwards=new, arms=medians(samples))


def rate(made: Rig, width: int, new: int, *, busy: bool = False) -> tuple[float, float]:
    """Return forwards per second, and rounds per second of a cell that computes meanwhile.

    A run that takes longer than `LIMIT_S` is stopped: what it did by then is measured.
    """
    worker = _Worker(made, width, new)
    worker.start()
    cell = spin(worker.is_alive) if busy else 0.0
    worker.join()
    if worker.error is not None:
        raise worker.error
    return worker.done / worker.seconds, cell


class _Worker(threading.Thread):
    """Runs forwards, and keeps one row of each.

    Attributes:
        done, seconds: forwards, and what they took.
        error: that ended it, None where there was none.
    """

    def __init__(self, made: Rig, width: int, new: int) -> None:
        super().__init__(daemon=True)
        self._made, self._new = made, new
        self._tokens: Sequence[int] = made.tokens(made.asked.contexts[0], width)
        self.done, self.seconds = 0, 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        made = self._made
        made.stand(made.asked.contexts[0])
        began = time.perf_counter()
        try:
            with brisk_switching():
                while self.done < self._new and self.seconds < LIMIT_S:
                    self._tokens = made.engine.draw_rows(made.state, self._tokens, SAMPLED).ids or self._tokens
                    made.engine.commit(made.state, 1)
                    self.done += 1
                    self.seconds = time.perf_counter() - began
        except BaseException as error:
            self.error = error
