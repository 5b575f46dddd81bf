"""Which kernel a forward spends its time in: a table whose lines add up to the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[str, float, float]  # name, begin, end

BETWEEN = "between kernels"
SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kernel.

    Attributes:
        calls, us: of one forward; time that two kernels overlap counts for the one that began first.
    """

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All of one forward, under the profiler.

    Attributes:
        lines: the longest first, and what lies between kernels; their times add up to `step_us`.
        step_us: from the first kernel's begin to the last one's end.
    """

    context: int
    width: int
    lines: tuple[Line, ...]
    step_us: float

    def __str__(self) -> str:
        head = f"kernels of a forward of {self.width} at {self.context}, profiled"
        shown, rest = self.lines[:SHOWN], self.lines[SHOWN:]
        if rest:
            calls, us = sum(line.calls for line in rest), sum(line.us for line in rest)
            shown = (*shown, Line(name=f"{len(rest)} others", calls=calls, us=us))
        rows = (f"{line.name[:52]:<52}{line.calls:8.1f}{line.us:10.1f}{line.us / self.step_us:7.1%}" for line in shown)
        whole = f"{'step':<52}{'':8}{self.step_us:10.1f}{1:7.1%}"
        return "\n".join([head, f"{'':<52}{'calls':>8}{'us':>10}{'share':>7}", *rows, whole])


def profiled(device: torch.device, call: Callable[[], object], *, context: int, width: int, runs: int) -> Table | None:
    """Profile `runs` forwards, each by itself; None when the profiler sees nothing.

    Without a GPU the lines are torch's operations.

    Args:
        call: one forward, already warm, which waits for its end.
    """
    seen = [found for (found,) in spans([device], call, runs)]
    return table(seen, context=context, width=width) if all(seen) else None


def spans(devices: Sequence[torch.device], call: Callable[[], object], runs: int) -> list[list[list[Span]]]:
    """Return what each of `runs` calls ran on each device, all clocks in microseconds of one origin."""
    is_cuda = devices[0].type == "cuda"
    wanted = "CUDA" if is_cuda else "CPU"
    found = []
    if is_cuda:
        with profile(
            activities=[ProfilerActivity.CUDA]
        ):  # its first start on a GPU takes long, and forwards are joined
            for device in devices:
                torch.zeros(1, device=device)
                torch.cuda.synchronize(device)
    for _ in range(runs):
        # without the CPU's side on a GPU: it would slow the launches
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
            call()
        events = [event for event in seen.events() if event.device_type.name == wanted]
        found.append(
            [
                [
                    (event.name, event.time_range.start, event.time_range.end)
                    for event in events
                    if (event.device_index == device.index if is_cuda else event.cpu_parent is None)
                ]
                for device in devices
            ]
        )
    return found


def table(forwards: Sequence[Iterable[Span]], *, context: int, width: int) -> Table:
    """Add up (name, begin, end) in microseconds of one forward each; every moment counts once.

    Args:
        forwards: one at least, none of them empty.
    """
    calls: dict[str, int] = {}
    us: dict[str, float] = {BETWEEN: 0.0}
    step = 0.0
    for spans in forwards:
        ordered = sorted(spans, key=lambda span: (span[1], span[2]))
        reached = ordered[0][1]
        step -= reached
        for name, begin, end in ordered:
            us[BETWEEN] += max(begin - reached, 0.0)
            us[name] = us.get(name, 0.0) + max(end - max(begin, reached), 0.0)
            calls[name] = calls.get(name, 0) + 1
            reached = max(reached, end)
        step += reached
    n = len(forwards)
    lines = [Line(name=name, calls=calls.get(name, 0) / n, us=taken / n) for name, taken in us.items()]
    lines.sort(key=lambda line: -line.us)
    return Table(context=context, width=width, lines=tuple(lines), step_us=step / n)
