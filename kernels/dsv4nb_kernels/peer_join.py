"""Both GPUs' parts of a product become one sum on both. Twin: `reference.peer_join`.

Traffic    pushes 8 bytes a column to the other GPU and reads as many of its: latency-bound
Grid       (T, D/256); a program pushes its part of a row, then waits for the other GPU's program of the same part
Equality   no program sees two rows, and a + b is b + a: row i of a step is bitwise the row alone, on both GPUs

All programs of a launch must be on the GPU at a time, or one that waits could keep another from pushing: 128 at most.
Where streams follow, `hyper_mix` does the same in its first kernel and saves this one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._launch import ROWS_MAX, Limits, require, require_tensor, runs_ptx
from dsv4nb_kernels._peer import CHANNELS, Link, push, require_link, take
from dsv4nb_kernels._turns import take_turn

WARPS = 4
EAGER = False
LIMITS = Limits(registers=32, shared_bytes=16)


@triton.jit(do_not_specialize=["T", "polls"])
def _peer_join_kernel(
    parts_ptr,  # [S, T, D] float32
    theirs_ptr,  # [2, 8, D] int64, on the other GPU
    mine_ptr,  # [2, 8, D] int64
    counts_ptr,  # [8, D/256] int32
    error_ptr,  # [4] int32
    out_ptr,  # [T, D] float32
    T,  # int, 1 … 8
    polls,  # int
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PUSHES: tl.constexpr,
    TAKES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
    PTX: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_part = tl.program_id(1)
    o_d = i_part * CHANNELS + tl.arange(0, CHANNELS)
    take_turn(DEPENDENT, EAGER)
    p_count = counts_ptr + i_row * (D // CHANNELS) + i_part
    number = tl.load(p_count) + 1
    o_word = ((number & 1) * 8 + i_row) * D + o_d
    b_x = tl.load(parts_ptr + i_row * D + o_d)
    for i in tl.static_range(1, SPLITS):
        b_x += tl.load(parts_ptr + (i * T + i_row) * D + o_d)
    if PUSHES:
        push(theirs_ptr + o_word, b_x, number, PTX)
    if TAKES:
        b_x += take(mine_ptr + o_word, number, error_ptr, polls)
        tl.store(out_ptr + i_row * D + o_d, b_x)
        tl.store(p_count, number)


def peer_join(parts: Tensor, link: Link, *, out: Tensor | None = None, dependent: bool = False) -> Tensor:
    """Add up this GPU's parts of a product and the other GPU's; both must join, each with its own end of the pair.

    Args:
        parts: [S, T, D] float32, T from 1 to 8, D a multiple of 256: added from left to right.
        link: this GPU's end. Joins are counted: both GPUs must do the same joins, of as many rows, in one order.
        out: [T, D] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `parts` has ended, and wait for it inside.

    Returns:
        [T, D] float32, the same bits on both GPUs. Where the other GPU's part did not come in time, NaN; then
        `link.has_failed`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(parts, link, out=out, dependent=dependent)


def launch(
    parts: Tensor,
    link: Link,
    *,
    out: Tensor | None = None,
    dependent: bool = False,
    pushes: bool = True,
    takes: bool = True,
) -> Tensor:
    """`peer_join`, or one of its halves: both in turn where the GPUs are emulated one after the other."""
    require(parts.ndim == 3 and parts.shape[0] > 0, "parts must be [S, T, D]", tuple(parts.shape))
    splits, rows, width = parts.shape
    device = parts.device
    require(1 <= rows <= ROWS_MAX, f"parts must have 1 to {ROWS_MAX} rows", rows)
    require_tensor(parts, "parts", (splits, rows, width), torch.float32)
    require_link(link, width, device)
    if out is None:
        out = torch.empty(rows, width, dtype=torch.float32, device=device)
    require_tensor(out, "out", (rows, width), torch.float32, device)
    is_ptx = runs_ptx(device)
    _direct.call(
        _peer_join_kernel, (rows, width // CHANNELS),
        parts, link.theirs.words, link.mine.words, link.mine.counts, link.mine.error, out, rows, link.polls,
        **constants(width, splits, pushes, takes, dependent and is_ptx, is_ptx),
        **({"num_warps": WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def constants(
    width: int, splits: int, pushes: bool = True, takes: bool = True, dependent: bool = True, ptx: bool = True
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "D": width,
        "SPLITS": splits,
        "CHANNELS": CHANNELS,
        "PUSHES": pushes,
        "TAKES": takes,
        "DEPENDENT": dependent,
        "EAGER": EAGER,
        "PTX": ptx,
    }
