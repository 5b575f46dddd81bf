"""Time the launches of every arm against the copy rate of the same GPU in the same run.

A bench module is named after its operation and has one function, `arms(device) -> list[Arm]`. An arm's weights rotate
over far more than the L2, its launches are captured in one CUDA graph, and its time is the median of the replays.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import torch
from torch import Tensor

Launch = Callable[[int], object]
Key = TypeVar("Key", bound=tuple[object, ...])

ROTATED_BYTES = 1 << 29  # nine times the L2 of an H200
GRAPH_BYTES = 1 << 30  # a graph reads at least this much: its own start is lost in 0.25 ms
LAUNCHES_MAX = 1024  # or, of operations that read little, holds so many launches
REPLAYS = 7
ROUNDS = 3  # every arm is timed this often, in alternating order; the median of all replays counts
COPY_BYTES = 1 << 31
COMPILERS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run one operation on one shape.

    Attributes:
        op: the operation, as its module is called.
        shape: what distinguishes the problem but for the rows, such as "16384x1024".
        rows: T, the rows of the step.
        name: the kernel's variant or the peer, such as "2 warps, 128 registers, dependent".
        bytes_read: weights and scales that one launch reads.
        make: given a number of copies of the weights, allocates everything and returns `launch`; `launch(i)` runs the
            operation once on copy i % copies, on the current stream, and allocates nothing.
        compile: fills Triton's disk cache; runs in another process, so it must pickle (a `functools.partial` of a
            module's function does).
        check: runs the arm once on fresh inputs and raises AssertionError if the result is wrong.
        is_product: this is what the operation's launcher does for the shape.
        is_peer: somebody else's kernel.
        copies: how many copies rotate; as many as `bytes_read` asks for when None. Few where an operation reads what
            the one before it has just written.
        is_pair: it runs on GPUs 0 and 1 at a time; `launch(i)` does the part of the current device.
        flop: of an operation that is bound by arithmetic, what one launch computes; the table then has TFLOP/s, and
            shares of the dense bfloat16 rate.
    """

    op: str
    shape: str
    rows: int
    name: str
    bytes_read: int
    make: Callable[[int], Launch]
    compile: Callable[[], object] | None = None
    check: Callable[[], None] | None = None
    is_product: bool = False
    is_peer: bool = False
    copies: int | None = None
    is_pair: bool = False
    flop: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What was measured of one arm.

    Attributes:
        us: one launch, microseconds; None when there is no valid time.
        copy_tb_s: the copy rate of this run, bytes read plus bytes written, 1e12 per second.
        note: why there is no time.
        dense_tflops: the dense bfloat16 rate of this run, if an arm is measured by it.
    """

    arm: Arm
    us: float | None
    copy_tb_s: float
    note: str = ""
    dense_tflops: float | None = None

    @property
    def tb_s(self) -> float | None:
        """Weight and scale bytes per second, 1e12."""
        return None if self.us is None else self.arm.bytes_read / self.us / 1e6

    @property
    def tflops(self) -> float | None:
        """1e12 operations per second, of an arm that is measured by them."""
        return None if self.us is None or self.arm.flop is None else self.arm.flop / self.us / 1e6

    @property
    def share(self) -> float | None:
        """`tflops` as a fraction of the dense rate, or else `tb_s` as one of the copy rate."""
        if self.tflops is not None and self.dense_tflops is not None:
            return self.tflops / self.dense_tflops
        return None if self.tb_s is None else self.tb_s / self.copy_tb_s


@functools.cache
def random_words(device: torch.device, words: int, mask: int = -1) -> Tensor:
    """Return [words] int32 of random bits and'ed with `mask`, the same tensor for the same arguments: do not write."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.empty(words, dtype=torch.int64, device=device).random_(generator=generator).to(torch.int32)
    return drawn.bitwise_and_(mask)


def copies(bytes_read: int) -> int:
    """Return how many copies of an operand rotate, so that none is in the L2 when its turn comes."""
    return max(1, math.ceil(ROTATED_BYTES / bytes_read))


def precompile(arms: Iterable[Arm]) -> None:
    """Compile the arms' kernels side by side; what fails here fails again, by name, when the arm is timed."""
    jobs = [arm.compile for arm in arms if arm.compile is not None]
    workers = min(COMPILERS, os.cpu_count() or 1, len(jobs))
    if workers < 2:
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.exception()


def copy_rate(device: torch.device) -> float:
    """Return the device-to-device copy rate, bytes read plus bytes written, in TB/s: the better of two ways.

    A copy in a graph may be done by the copy engines, which are slower than the multiprocessors.
    """
    source = random_words(device, COPY_BYTES // 4)
    target = torch.empty_like(source)
    rates = []
    for copy in (lambda _: target.copy_(source), lambda _: torch.bitwise_xor(source, 1, out=target)):
        graphs = _capture(copy, 1)
        _replay_us(graphs)
        rates.append(2 * COPY_BYTES / statistics.median(_replay_us(graphs) for _ in range(15)) / 1e6)
    return max(rates)


def dense_rate(device: torch.device) -> float:
    """Return the rate of a large bfloat16 product of random numbers, TFLOP/s: the better of two sizes."""
    rates = []
    for size in (8192, 4096):
        left = torch.randn(size, size, device=device).bfloat16()
        right = torch.randn(size, size, device=device).bfloat16()
        out = torch.empty_like(left)
        graphs = _capture(lambda _: torch.mm(left, right, out=out), 8192 // size * 4)  # noqa: B023 - captured at once
        _replay_us(graphs)
        us = statistics.median(_replay_us(graphs) for _ in range(9)) / (8192 // size * 4)
        rates.append(2 * size**3 / us / 1e6)
    return max(rates)


def measure(arms: Sequence[Arm], device: torch.device, seconds: float) -> list[Timing]:
    """Check and time every arm.

    Args:
        seconds: no new arm or round is begun after this; arms that had no turn say so.
    """
    end = time.monotonic() + seconds
    copy_tb_s = copy_rate(device)
    dense_tflops = dense_rate(device) if any(arm.flop is not None for arm in arms) else None
    graphs: dict[int, _Captured] = {}
    times: dict[int, list[float]] = {}
    notes: dict[int, str] = {}
    for round_ in range(ROUNDS):
        order = range(len(arms)) if round_ % 2 == 0 else reversed(range(len(arms)))
        for i in order:
            if time.monotonic() > end or i in notes:
                continue
            try:
                if round_ == 0:
                    graphs[i] = _prepare(arms[i])
                captured = graphs[i]
                times.setdefault(i, []).extend(_replay_us(captured.graphs) / captured.launches for _ in range(REPLAYS))
            except Exception as error:  # a peer that refuses a shape must not cost the other arms their run
                notes[i] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return [
        Timing(
            arm=arm,
            us=statistics.median(times[i]) if i in times and i not in notes else None,
            copy_tb_s=copy_tb_s,
            note=notes.get(i, "" if i in times else "not reached"),
            dense_tflops=dense_tflops,
        )
        for i, arm in enumerate(arms)
    ]


Graphs = list[torch.cuda.CUDAGraph]  # of every GPU that takes part, the measured one first


@dataclass(frozen=True, slots=True)
class _Captured:
    graphs: Graphs
    launches: int
    launch: Launch  # owns the memory that the graphs read and write


def _prepare(arm: Arm) -> _Captured:
    """Check the arm, then capture its launches."""
    if arm.is_pair and torch.cuda.device_count() < 2:
        raise ValueError("needs two GPUs")
    if arm.check is not None:
        arm.check()
    count = arm.copies or copies(arm.bytes_read)
    launches = max(count, min(math.ceil(GRAPH_BYTES / arm.bytes_read), LAUNCHES_MAX), 4)
    launch = arm.make(count)
    graphs = _capture(launch, launches, (0, 1) if arm.is_pair else (torch.cuda.current_device(),))
    _replay_us(graphs)
    return _Captured(graphs, launches, launch)


def _capture(launch: Launch, launches: int, devices: Sequence[int] | None = None) -> Graphs:
    streams = [torch.cuda.Stream(device) for device in devices or (torch.cuda.current_device(),)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            launch(0)  # compiles and loads outside of the capture
    for stream in streams:
        stream.synchronize()
    graphs = []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        # without torch.cuda.graph, which empties the allocator's cache for every arm
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                for i in range(launches):
                    launch(i)
            finally:
                graph.capture_end()
        graphs.append(graph)
    return graphs


def _replay_us(graphs: Graphs) -> float:
    """Replay on every GPU; the time of the first, whose partner waits for it in the first join."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for graph in graphs[1:]:
        graph.replay()
    start.record()
    graphs[0].replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def table(timings: Sequence[Timing], best: int) -> str:
    """Return as text, of every problem, the `best` fastest arms, the product's (with a star) and the peers'."""
    lines = [f"{'op':<10} {'shape':<14} {'T':>1} {'us':>7} {'TB/s':>5} {'copy':>6}   arm"]
    for (op, shape, rows), group in _grouped(timings, lambda a: (a.op, a.shape, a.rows)).items():
        ranked = sorted(group, key=lambda t: math.inf if t.us is None else t.us)
        own = [t for t in ranked if not t.arm.is_peer]
        for timing in ranked:
            if not (timing in own[:best] or timing.arm.is_product or timing.arm.is_peer):
                continue
            numbers = " " * 20
            if timing.us is not None and timing.tb_s is not None and timing.share is not None:
                rate = f"{timing.tb_s:5.2f}" if timing.tflops is None else f"{timing.tflops:4.0f}T"
                numbers = f"{timing.us:7.2f} {rate} {timing.share:6.1%}"
            mark = "*" if timing.arm.is_product else " "
            note = f"  [{timing.note[:60]}]" if timing.note else ""
            lines.append(f"{op:<10} {shape:<14} {rows:>1} {numbers} {mark} {timing.arm.name}{note}")
    return "\n".join([*lines, *_choices(timings)])


def _choices(timings: Sequence[Timing]) -> list[str]:
    """Of every shape the own arms nearest to the fastest over all numbers of rows, each by its worst ratio."""
    lines = []
    for (op, shape), group in _grouped(timings, lambda a: (a.op, a.shape)).items():
        own = [t for t in group if t.us is not None and not t.arm.is_peer]
        fastest: dict[int, float] = {}
        for t in own:
            fastest[t.arm.rows] = min(t.us or math.inf, fastest.get(t.arm.rows, math.inf))
        ratios: dict[str, dict[int, float]] = {}
        for t in own:
            ratios.setdefault(t.arm.name, {})[t.arm.rows] = (t.us or math.inf) / fastest[t.arm.rows]
        most = max((len(by_rows) for by_rows in ratios.values()), default=0)
        full = {name: max(by_rows.values()) for name, by_rows in ratios.items() if len(by_rows) == most}
        ranked = sorted(full.items(), key=lambda item: item[1])[:3]
        named = ", ".join(f"{name} ({worst:.3f})" for name, worst in ranked)
        lines.append(f"one arm for every T: {op} {shape}: {named}")
    return lines


def _grouped(timings: Sequence[Timing], key: Callable[[Arm], Key]) -> dict[Key, list[Timing]]:
    groups: dict[Key, list[Timing]] = {}
    for timing in timings:
        groups.setdefault(key(timing.arm), []).append(timing)
    return groups


def require_close(out: Tensor, exact: Tensor, limit: float) -> None:
    """Compare a result with the float64 one, row by row.

    Raises:
        AssertionError: a row differs by more than `limit` of its length, or is not finite.
    """
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert bool((error <= limit).all()), f"relative error {error.max().item():.1e}, limit {limit:.0e}"
