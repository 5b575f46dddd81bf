"""The experts' lower halves of V4-Flash: whole, as one GPU of a pair holds them, and behind their upper halves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dsv4nb_kernels import expert_down, expert_up
from dsv4nb_kernels._expert_rows import round_inner
from dsv4nb_kernels._expert_weights import DownWeights
from dsv4nb_kernels._launch import columns
from dsv4nb_kernels.bench import expert_up as up
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.bench.expert_up import CHOICES, HIDDEN, INNER, PROBLEMS, SWEPT, SWEPT_ROWS

OP = "expert_down"
CAPS = (96, 104, 112, 116, 120, 128, None)
UNROUNDED = 1e-6

# where the lines are rounded: in the kernel itself, by a launch of its own, or outside of what is timed
Rounding = Literal["early", "apart", "before"]


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every problem, other cuts at T = 1 and 6, and both halves in a row."""
    return [
        arm
        for shape, (size, unions) in PROBLEMS.items()
        for rows, distinct in unions.items()
        for arm in (*_own(device, shape, size, rows, distinct), *_both(device, shape, size, rows, distinct))
    ]


def _own(device: torch.device, shape: str, size: str, rows: int, distinct: int) -> Iterator[Arm]:
    inner = INNER[size]
    product = expert_down.tuning(HIDDEN, inner)
    chosen = _rounding(product, rows)

    def arm(cut: expert_down.Tuning, rounding: Rounding, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name=f"{cut}, rounded {rounding}" + ("" if dependent else ", not dependent"),
            bytes_read=bytes_read(inner, distinct),
            make=partial(_make, device, inner, rows, distinct, cut, rounding, dependent),
            compile=partial(compile_down, inner, cut, rows, rounding == "early", dependent),
            check=partial(_check, device, inner, rows, distinct, cut, rounding),
            is_product=cut == product and rounding == chosen and dependent,
        )

    ways: tuple[Rounding, ...] = ("early", "apart", "before") if rows <= 2 else ("apart", "before")
    yield from (arm(product, rounding) for rounding in ways)
    if (shape, rows) in SWEPT or (size == "whole" and rows in SWEPT_ROWS):
        warps, caps = (4, (112, 128, None)) if size == "half" else (16, (112, 128))
        cuts = [replace(product, registers=cap) for cap in CAPS]
        cuts += [replace(product, warps=warps, registers=cap) for cap in caps]
        yield from (arm(cut, chosen) for cut in cuts if cut != product)
        yield arm(product, chosen, dependent=False)


def _rounding(cut: expert_down.Tuning, rows: int) -> Rounding:
    return "early" if cut.rounds_early and rows <= 2 else "apart"


def bytes_read(inner: int, distinct: int) -> int:
    """Return the codes and scales of `distinct` experts' lower halves and of the shared one's."""
    routed = HIDDEN * inner // 2 + HIDDEN * inner // 32
    return distinct * routed + HIDDEN * inner + 4 * (HIDDEN // 128) * (inner // 128)


def compile_down(inner: int, cut: expert_down.Tuning, rows: int, early: bool, dependent: bool) -> None:
    """Fill Triton's cache."""
    expert_down._expert_down_kernel.warmup(
        torch.int32,
        torch.int32,
        torch.float32,
        torch.float32 if early else torch.float16,
        torch.int32,
        torch.float32,
        1,
        grid=(1,),
        **expert_down.constants(HIDDEN, inner, CHOICES, cut, columns(rows), early, dependent),
        **expert_down.options(cut, dependent),
    )


@functools.cache
def _lines(device: torch.device, inner: int, rows: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    lines = torch.randn(rows * (CHOICES + 1) + 1, inner, device=device, generator=generator)
    lines[-1] = 0.0
    return lines


def down_launch(
    device: torch.device,
    inner: int,
    rows: int,
    distinct: int,
    cut: expert_down.Tuning,
    rounding: Rounding,
    dependent: bool,
    lines: Tensor,
    count: int,
) -> tuple[Launch, Tensor]:
    """Return the launch and what it writes."""
    routed = up.routed_words(device, HIDDEN, inner)
    shared = up.shared_matrices(device, HIDDEN, inner, count)
    weights = [DownWeights(routed=routed, shared=matrix) for matrix in shared]
    experts, rounded = up.routes(device, rows, distinct, count), round_inner(lines)
    out = torch.empty(rows, HIDDEN, device=device)

    def launch(i: int) -> Tensor:
        turn = i % count
        if rounding == "apart":
            round_inner(lines, out=rounded, dependent=dependent)
        source = lines if rounding == "early" else rounded
        return expert_down.launch(source, experts[turn], weights[turn], cut, out=out, dependent=dependent)

    return launch, out


def _make(
    device: torch.device,
    inner: int,
    rows: int,
    distinct: int,
    cut: expert_down.Tuning,
    rounding: Rounding,
    dependent: bool,
    count: int,
) -> Launch:
    lines = _lines(device, inner, rows)
    return down_launch(device, inner, rows, distinct, cut, rounding, dependent, lines, count)[0]


@functools.cache
def _expected(device: torch.device, inner: int, rows: int, distinct: int) -> Tensor:
    values = (round_inner(_lines(device, inner, rows)).double() / 128)[:-1].view(rows, CHOICES + 1, inner)
    routed, experts = up.routed_words(device, HIDDEN, inner), up.routes(device, rows, distinct, 1)[0]
    out = values[:, CHOICES] @ up.e4m3_values(up.shared_matrices(device, HIDDEN, inner, 1)[0]).t()
    for expert in experts.unique().tolist():
        row, choice = (experts == expert).nonzero(as_tuple=True)
        out[row] += values[row, choice] @ up.e2m1_values(routed[expert]).t()
    return out


def _check(
    device: torch.device, inner: int, rows: int, distinct: int, cut: expert_down.Tuning, rounding: Rounding
) -> None:
    lines = _lines(device, inner, rows)
    launch, out = down_launch(device, inner, rows, distinct, cut, rounding, False, lines, 1)
    launch(0)
    require_close(out, _expected(device, inner, rows, distinct), UNROUNDED)


def _both(device: torch.device, shape: str, size: str, rows: int, distinct: int) -> Iterator[Arm]:
    """A step's whole experts: upper halves, rounding, lower halves."""
    inner = INNER[size]
    down_cut = expert_down.tuning(HIDDEN, inner)
    ways: tuple[Rounding, ...] = ("early", "apart") if rows <= 2 else ("apart",)
    for rounding in ways:
        yield Arm(
            op="experts",
            shape=shape,
            rows=rows,
            name=f"up, then down, rounded {rounding}",
            bytes_read=up.bytes_read(inner, distinct) + bytes_read(inner, distinct),
            make=partial(_make_both, device, inner, rows, distinct, rounding),
            compile=partial(compile_down, inner, down_cut, rows, rounding == "early", True),
            is_product=rounding == _rounding(down_cut, rows),
        )


def _make_both(device: torch.device, inner: int, rows: int, distinct: int, rounding: Rounding, count: int) -> Launch:
    up_cut, down_cut = expert_up.tuning(HIDDEN, inner), expert_down.tuning(HIDDEN, inner)
    launch_up, lines = up.up_launch(device, inner, rows, distinct, up_cut, True, False, count)
    launch_up(0)
    launch_down, _ = down_launch(device, inner, rows, distinct, down_cut, rounding, True, lines, count)

    def launch(i: int) -> None:
        launch_up(i)
        launch_down(i)

    return launch
