"""Where every microsecond of a forward goes: its kernels by what launched them, on each GPU, and what lies between.

A kernel's own time is from its begin to its end. Kernels that are launched dependently begin while the one ahead still
runs, so their own times add up to more than the step. The time behind the end of all kernels ahead is a kernel's share
of the step: those shares and the time in which nothing ran add up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dsv4nb.bench import gpu, kernels
from dsv4nb.bench.asked import Asked, Ran
from dsv4nb.bench.kernels import Span
from dsv4nb.bench.launches import KERNELS, OTHERS, Call, calls, timed
from dsv4nb.bench.rig import EAGER_CYCLES, Rig, launching, positions, rig
from dsv4nb.bench.spread import Times

PROFILED = 5  # forwards
SAMPLES = 24  # forwards without the profiler, on either clock
WARM = 3  # compiles, captures, replays
SHOWN, NAME = 48, 46

BY_PROFILER = "the profiler, over replays of the graphs"
BY_EVENTS = (
    "events between operations that are launched one by one: the profiler saw no kernel. It needs CUPTI, which this"
    " machine does not permit or does not have. No two operations overlap so, and the sum is more than a replay takes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kernel in one use.

    Attributes:
        name: the kernel, or the operation where operations were timed.
        use: what it is launched for, where an operation has several uses.
        calls: of one forward.
        own_us: from begin to end, all calls together.
        us: behind the end of all kernels ahead.
        nbytes: that these calls must read; None of those that read what the kernel ahead has just written.
        copy_share: `nbytes` in `us`, of the copy rate of the same run.
    """

    name: str
    use: str
    calls: float
    own_us: float
    us: float
    nbytes: int | None
    copy_share: float | None

    def __str__(self) -> str:
        read = f"{'':>9}" if self.nbytes is None else f"{self.nbytes / 1e6:9.2f}"
        share = f"{'':>7}" if self.copy_share is None else f"{self.copy_share:7.1%}"
        name = f"{self.name}: {self.use}" if self.use else self.name
        return f"{name[:NAME]:<{NAME}}{self.calls:7.1f}{self.own_us:9.1f}{self.us:9.1f}{read}{share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All of one forward on one GPU.

    Attributes:
        lines: the longest first.
        idle_us: in which no kernel ran.
        step_us: from the first kernel's begin to the last one's end: all `us` of the lines and `idle_us`.
        gpu_ms: the same forward without a profiler, on the clock of the first GPU; None without one.
        wall_ms: from the call to the tokens on the host.
    """

    context: int
    width: int
    device: str
    lines: tuple[Line, ...]
    idle_us: float
    step_us: float
    gpu_ms: Times | None
    wall_ms: Times

    @property
    def own_us(self) -> float:
        """All kernels' own times."""
        return sum(line.own_us for line in self.lines)

    @property
    def overlap_us(self) -> float:
        """By which they are more than the time in which a kernel ran."""
        return self.own_us - sum(line.us for line in self.lines)

    def _shown(self) -> tuple[Line, ...]:
        shown, rest = self.lines[:SHOWN], self.lines[SHOWN:]
        if not rest:
            return shown
        calls, own, us = (sum(values) for values in zip(*((x.calls, x.own_us, x.us) for x in rest), strict=True))
        read = sum(line.nbytes or 0 for line in rest) or None
        return (*shown, _line(f"{len(rest)} others", "", calls, own, us, read, None))

    def __str__(self) -> str:
        head = f"{self.device}, {self.width} row{'s' * (self.width > 1)} at {self.context}"
        count = sum(line.calls for line in self.lines)
        read = sum(line.nbytes or 0 for line in self.lines)
        own = "-" if self.gpu_ms is None else f"{1e3 * self.gpu_ms.median:.1f}"
        blank = " " * 7
        return "\n".join(
            [
                f"{head:<{NAME}}{'calls':>7}{'own us':>9}{'us':>9}{'MB':>9}{'copy':>7}",
                *map(str, self._shown()),
                f"{'all kernels':<{NAME}}{count:7.1f}{self.own_us:9.1f}{self.own_us - self.overlap_us:9.1f}"
                f"{read / 1e6:9.2f}",
                f"{'of their own times, overlap':<{NAME}}{blank}{self.overlap_us:9.1f}",
                f"{'nothing ran':<{NAME}}{blank}{'':9}{self.idle_us:9.1f}",
                f"{'step':<{NAME}}{blank}{'':9}{self.step_us:9.1f}",
                f"the same forward, nobody looking on: {own} us on the GPU's clock,"
                f" {1e3 * self.wall_ms.median:.1f} us from the call to the tokens",
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        way: how kernels were told apart.
        steps: by context, width and GPU.
    """

    ran: Ran
    way: str
    steps: tuple[Step, ...]
    clocks: tuple[gpu.Clocks, ...]

    def __str__(self) -> str:
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows()]
        lines += [f"{'clocks':<12}{one}" for one in self.clocks] or [f"{'clocks':<12}unknown"]
        return "\n".join([*lines, f"{'by':<12}{self.way}", *(f"\n{step}" for step in self.steps)])


def step_kernels(asked: Asked) -> Report:
    """Measure every width at every context.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig`.
    """
    with rig(asked, counts=False) as made:
        arms = [(context, width) for context in asked.contexts for width in asked.widths]
        noted: dict[tuple[int, int], tuple[Call, ...]] = {}
        by_events: dict[tuple[int, int], tuple[float, ...]] = {}
        clocks = {arm: _clocks(made, *arm) for arm in arms}
        seen = {arm: kernels.spans(made.devices, partial(made.forward, *arm), PROFILED) for arm in arms}
        is_seen = all(spans for runs in seen.values() for run in runs for spans in run)
        with launching(made) as other:
            for arm in arms:
                forward = partial(other.forward, *arm)
                forward()  # compiles, and tries the joins of a pair
                noted[arm] = calls(forward)
                if not is_seen and made.devices[0].type == "cuda":
                    with other.engine._running():
                        by_events[arm] = timed(made.devices, forward, 2 * EAGER_CYCLES)
        steps = []
        for arm in arms:
            for number, device in enumerate(made.devices):
                index = device.index or 0
                own = [call for call in noted[arm] if call.device == index]
                if arm in by_events:
                    lines, idle = operations(noted[arm], by_events[arm], index, made.facts.copy_tb_s), 0.0
                else:
                    lines, idle = summed([run[number] for run in seen[arm]], own, made.facts.copy_tb_s)
                steps.append(_step(made, arm, number, lines, idle, clocks[arm]))
        way = BY_EVENTS if by_events else BY_PROFILER
        return Report(ran=made.facts, way=way, steps=tuple(steps), clocks=gpu.clocks(made.devices, made.work))


def _step(
    made: Rig,
    arm: tuple[int, int],
    number: int,
    lines: tuple[Line, ...],
    idle_us: float,
    clocks: tuple[Times | None, Times],
) -> Step:
    return Step(
        context=arm[0],
        width=arm[1],
        device=made.facts.devices[number],
        lines=lines,
        idle_us=idle_us,
        step_us=sum(line.us for line in lines) + idle_us,
        gpu_ms=clocks[0],
        wall_ms=clocks[1],
    )


def _clocks(made: Rig, context: int, width: int) -> tuple[Times | None, Times]:
    """Time forwards at positions behind the context, as they are, on the GPU's clock and the host's."""
    places = positions(context, width)[:SAMPLES]
    for _ in range(WARM):
        made.forward(context, width)
    own = [taken for pos in places if (taken := made.device_ms(pos, width)) is not None]
    return Times.of(own) if own else None, Times.of([made.wall_ms(pos, width) for pos in places])


def summed(
    forwards: Sequence[Iterable[Span]], noted: Sequence[Call], copy_tb_s: float | None
) -> tuple[tuple[Line, ...], float]:
    """Add up the kernels of some forwards by name and use: lines of one forward, and the time in which nothing ran.

    Args:
        forwards: of one GPU, one at least; (name, begin, end) in us.
        noted: the operations of one such forward, in the order in which they were launched.
    """
    n = len(forwards)
    sums: dict[tuple[str, str], list[float]] = {}
    idle = 0.0
    for spans in forwards:
        ordered = sorted(spans, key=lambda span: (span[1], span[2]))
        reached = ordered[0][1]
        for (name, begin, end), use in zip(ordered, uses([span[0] for span in ordered], noted), strict=True):
            idle += max(begin - reached, 0.0)
            line = sums.setdefault((name, use), [0.0, 0.0, 0.0])
            line[0] += 1
            line[1] += end - begin
            line[2] += max(end - max(begin, reached), 0.0)
            reached = max(reached, end)
    lines = [
        _line(name, use, many / n, own / n, us / n, _nbytes(name, use, noted), copy_tb_s)
        for (name, use), (many, own, us) in sums.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.us)), idle / n


def uses(names: Sequence[str], noted: Sequence[Call]) -> list[str]:
    """Say of kernels in their order what each is launched for: "" where nothing tells.

    An operation launches as many of a kernel each time; where the numbers do not go into each other, nobody knows.
    """
    counts: Mapping[str, int] = {name: names.count(name) for name in set(names) if name in KERNELS}
    of = {name: [call.use for call in noted if call.operation == KERNELS[name]] for name in counts}
    reached = dict.fromkeys(counts, 0)
    found = []
    for name in names:
        each, rest = divmod(counts.get(name, 0), len(of.get(name, ())) or 1)
        if not of.get(name) or rest:
            found.append("")
            continue
        found.append(of[name][reached[name] // each])
        reached[name] += 1
    return found


def _nbytes(name: str, use: str, noted: Sequence[Call]) -> int | None:
    """Add up what calls of a kernel in a use must read; None where that is not defined."""
    if name not in KERNELS or name in OTHERS:
        return None
    reads = [call.nbytes for call in noted if call.operation == KERNELS[name] and call.use == use]
    known = [nbytes for nbytes in reads if nbytes is not None]
    return sum(known) if known else None


def operations(noted: Sequence[Call], taken: Sequence[float], index: int, copy_tb_s: float | None) -> tuple[Line, ...]:
    """Add up what operations of one GPU took by name and use."""
    sums: dict[tuple[str, str], list[float]] = {}
    for call, us in zip(noted, taken, strict=True):
        if call.device == index:
            line = sums.setdefault((call.operation, call.use), [0.0, 0.0, 0.0])
            line[0] += 1
            line[1] += us
            line[2] += call.nbytes or 0
    lines = [
        _line(name, use, many, us, us, int(read) or None, copy_tb_s) for (name, use), (many, us, read) in sums.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.us))


def _line(
    name: str, use: str, calls: float, own_us: float, us: float, nbytes: int | None, copy_tb_s: float | None
) -> Line:
    share = None if nbytes is None or copy_tb_s is None or us <= 0 else nbytes / us / 1e6 / copy_tb_s
    return Line(name=name, use=use, calls=calls, own_us=own_us, us=us, nbytes=nbytes, copy_share=share)
