"""Decode speed while a cell computes in pure Python, and what the thread switch interval does about it.

Two engines: the model's own, which takes the interpreter hundreds of times per token on a CPU, and a step that waits
for a device, as a captured graph does: one wait of 4 ms per token. `synthetic_gil` measures a GPU's on random weights.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dsv4nb.model import Model, load
from dsv4nb.session import switching
from dsv4nb.testing.fake_model import fake_model

STEP_S = 0.004
LIMIT_S = 5.0
INTERVALS_S = (5e-3, 5e-4, 1e-4)  # the first is Python's own

# (engine, interval in seconds) -> of each run what `Report.arms` has the median of
Samples = dict[tuple[str, float], list[tuple[float, float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tokens per second.

    Attributes:
        arms: (engine, switch interval in ms) -> tokens/s with an idle kernel, tokens/s beside a busy cell, and the
            speed of that cell in shares of what it has alone.
    """

    runs: int
    new_tokens: int
    arms: Mapping[str, Mapping[str, tuple[float, float, float]]]

    def __str__(self) -> str:
        head = f"tok/s, medians of {self.runs} runs of {self.new_tokens} tokens, arms in turn"
        return "\n".join([head, *table(self.arms)])


def table(arms: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> list[str]:
    """Return the lines of arms, with their heading."""
    wide = max(24, *(len(engine) + 2 for engine in arms))
    lines = [f"{'engine':<{wide}}{'interval':>10}{'idle':>8}{'busy':>8}{'kept':>7}{'cell':>7}"]
    for engine, intervals in arms.items():
        for interval, (idle, busy, cell) in intervals.items():
            lines.append(f"{engine:<{wide}}{interval:>10}{idle:8.1f}{busy:8.1f}{busy / idle:7.0%}{cell:7.0%}")
    return lines


def gil(path: str | None, *, new: int, runs: int, devices: str | None = None, placement: str | None = None) -> Report:
    """Measure every arm `runs` times, one after the other.

    Args:
        path: of the model; None measures the step that waits alone.
        devices, placement: of the model, as `dsv4nb.load` takes them.

    Raises:
        RequestError: there are no such devices.
    """
    alone = spin_alone()
    samples: Samples = {}
    with ExitStack() as stack:
        waiting = stack.enter_context(fake_model("word " * (new + 8), delay_s=STEP_S))
        engines = {f"one wait of {STEP_S * 1e3:.0f} ms": waiting}
        if path is not None:
            model = stack.enter_context(load(path, devices=devices, placement=placement))
            engines[f"{model.name} on {model.info.device}"] = model
        for engine in engines.values():
            _rate(engine, new)
        for _ in range(runs):
            for name, engine in engines.items():
                for interval in INTERVALS_S:
                    with switching_every(interval):
                        idle, _ = _rate(engine, new)
                        busy, cell = _rate(engine, new, busy=True)
                    samples.setdefault((name, interval), []).append((idle, busy, cell / alone))
    return Report(runs=runs, new_tokens=new, arms=medians(samples))


def medians(samples: Samples) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Return the arms of a report."""
    arms: dict[str, dict[str, tuple[float, float, float]]] = {}
    for (name, interval), measured in samples.items():
        idle, busy, cell = (statistics.median(values) for values in zip(*measured, strict=True))
        arms.setdefault(name, {})[f"{interval * 1e3:g} ms"] = (idle, busy, cell)
    return arms


def _rate(model: Model, new: int, *, busy: bool = False) -> tuple[float, float]:
    """Return tokens per second after the first one, and rounds per second of a cell that computes meanwhile.

    A run that takes longer than `LIMIT_S` is stopped: what it said by then is measured.
    """
    ticket = model.submit("Count from 1 to 100.", temperature=0, max_new=new)
    end = time.perf_counter() + LIMIT_S
    cell = spin(lambda: ticket.state in ("queued", "running") and time.perf_counter() < end) if busy else 0.0
    if busy:
        ticket.cancel()  # changes nothing once the run has ended
    done = ticket.result().done
    return max(0, done.n_tokens - 1) / (done.timings.decode_s or LIMIT_S), cell


def spin_alone() -> float:
    """Return rounds per second of a cell that has the interpreter to itself."""
    end = time.perf_counter() + 0.5
    return spin(lambda: time.perf_counter() < end)


def spin(goes_on: Callable[[], bool]) -> float:
    """Compute in pure Python; return rounds per second."""
    started, rounds = time.perf_counter(), 0
    while goes_on():
        sum(i * i for i in range(200))
        rounds += 1
    return rounds / (time.perf_counter() - started)


@contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Let requests run with this switch interval."""
    before, ours = sys.getswitchinterval(), switching.INTERVAL_S
    switching.INTERVAL_S = seconds
    try:
        yield
    finally:
        switching.INTERVAL_S = ours
        sys.setswitchinterval(before)
