"""Forwards of random weights by width and context, the arms in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsv4nb.bench.rig import Rig, positions
from dsv4nb.bench.spread import Times

TURNS_MIN = 2  # there and back, so that no arm is always the first
TURNS_MAX = 64
AT_ONCE = 8  # samples of an arm in a turn, on the host's clock and on the GPU's each


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Forwards of one width at one context.

    Attributes:
        wall_ms: from the call to the tokens on the host, which the GPU chooses.
        device_ms: on the GPU's own clock; None without one.
        experts: different ones that a forward visits on a layer, on average.
        read_bytes: of weights, by the device that reads the most.
        read_tb_s: these bytes by the time on the GPU, 1e12 per second.
        copy_share: of the copy rate of the same run.
    """

    context: int
    width: int
    wall_ms: Times
    device_ms: Times | None
    experts: float
    read_bytes: int
    read_tb_s: float | None
    copy_share: float | None

    def row(self) -> str:
        """Return a line under `HEAD`."""
        own = f"{'-':>10}{'-':>10}" if self.device_ms is None else _times(self.device_ms)
        rate = "     -" if self.read_tb_s is None else f"{self.read_tb_s:6.2f}"
        share = "      -" if self.copy_share is None else f"{self.copy_share:7.1%}"
        return (
            f"{self.context:>8}{self.width:>3}{self.wall_ms.samples:>5} {_times(self.wall_ms)}{self.wall_ms.tail:6.2f}"
            f" {own}{self.experts:8.2f}{self.read_bytes / 1e9:9.3f}{rate}{share}"
        )


HEAD = (
    f"{'context':>8}{'T':>3}{'n':>5} {'wall ms':>10}{'p95':>10}{'/p50':>6} {'GPU ms':>10}{'p95':>10}{'experts':>8}"
    f"{'GB read':>9}{'TB/s':>6}{'copy':>7}"
)

Sample = Callable[[int, int], float]


def measured(rig: Rig, *, wall: Sample | None = None) -> tuple[Arm, ...]:
    """Measure every width at every context, forwards and backwards in turn until the time is over.

    Args:
        wall: takes one sample at (position, width), in ms; a forward alone when None.
    """
    wall = wall or rig.wall_ms
    keys = [(context, width) for context in rig.asked.contexts for width in rig.asked.widths]
    walls: Mapping[tuple[int, int], list[float]] = {key: [] for key in keys}
    owns: Mapping[tuple[int, int], list[float]] = {key: [] for key in keys}
    for context, width in keys:
        for _ in range(3):  # compiles, captures, replays
            rig.forward(context, width)
        wall(context, width)
    end = time.monotonic() + rig.asked.seconds
    turn = 0
    while turn < TURNS_MIN or (turn < TURNS_MAX and time.monotonic() < end):
        for context, width in keys if turn % 2 == 0 else reversed(keys):
            places = positions(context, width)
            for i in range(AT_ONCE):
                pos = places[(turn * AT_ONCE + i) % len(places)]
                walls[context, width].append(wall(pos, width))
                own = rig.device_ms(pos, width)
                if own is not None:
                    owns[context, width].append(own)
        turn += 1
    return tuple(_arm(rig, key, walls[key], owns[key]) for key in keys)


def ratio(arms: tuple[Arm, ...], context: int, width: int) -> float | None:
    """Return what a forward of `width` takes by what one row takes, on the GPU where there is one."""
    by_width = {arm.width: arm for arm in arms if arm.context == context}
    if width not in by_width or 1 not in by_width:
        return None
    one, many = (by_width[n].device_ms or by_width[n].wall_ms for n in (1, width))
    return many.median / one.median


def _arm(rig: Rig, key: tuple[int, int], walls: list[float], owns: list[float]) -> Arm:
    context, width = key
    experts = rig.experts[key]
    own = Times.of(owns) if owns else None
    read = rig.traffic.read(width, experts)
    rate = None if own is None else read / own.median / 1e9
    copy = rig.facts.copy_tb_s
    return Arm(
        context=context,
        width=width,
        wall_ms=Times.of(walls),
        device_ms=own,
        experts=experts,
        read_bytes=read,
        read_tb_s=rate,
        copy_share=None if rate is None or copy is None else rate / copy,
    )


def _times(times: Times) -> str:
    return f"{times.median:10.3f}{times.p95:10.3f}"
