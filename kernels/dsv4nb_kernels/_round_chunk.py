"""The rows of a chunk between two products: summed, rounded, in the order in which the next product reads them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._chunk_rows import ChunkRows, require_chunk, to_places
from dsv4nb_kernels._expert_rows import share_scale
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, power_of_two, require, require_few, require_tensor, runs_ptx
from dsv4nb_kernels._rounded_rows import BLOCK, codes_of, round_bf16
from dsv4nb_kernels._turns import take_turn

WIDTH_MAX = 32768
WARPS = 8
LIMITS = Limits(registers=200, shared_bytes=4 * 1024)


@triton.jit
def _round_chunk_kernel(
    x_ptr,  # [S, T, W] float32 or bfloat16
    values_ptr,  # [T, W] float16
    scales_ptr,  # [T] float32
    W: tl.constexpr,  # multiple of 128
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_k = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    m_k = o_k < W
    p_x = x_ptr + i_row * W + o_k
    take_turn(DEPENDENT, False)
    b_x = tl.load(p_x, mask=m_k, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SPLITS):
        b_x += tl.load(p_x + i * tl.num_programs(0) * W, mask=m_k, other=0.0).to(tl.float32)
    b_codes, s_x = codes_of(round_bf16(b_x), FP8)
    b_values, s_row = share_scale(b_codes, s_x, FP8)
    tl.store(values_ptr + i_row * W + o_k, to_places(b_values, BLOCKS), mask=m_k)
    tl.store(scales_ptr + i_row, s_row)


def round_chunk(x: Tensor, *, act_fp8: bool, out: ChunkRows | None = None, dependent: bool = False) -> ChunkRows:
    """Add up the splits of the last product, round to bfloat16 and prepare the rows for the next one.

    Args:
        x: [S, T, W] float32, or [T, W] bfloat16; T from 1 to 4096, W a multiple of 128 up to 32768.
        act_fp8: round to e4m3, as the twin does; else the values stay bfloat16.
        out: [T, W] destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `x` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    splits = x if x.ndim == 3 else x[None]
    require(splits.ndim == 3, "x must be [S, T, W] or [T, W]", tuple(x.shape))
    require_tensor(splits, "x", splits.shape, torch.float32 if x.ndim == 3 else torch.bfloat16)
    require_few(splits.numel(), "x")
    count, rows, width = splits.shape
    require(1 <= rows <= CHUNK_ROWS_MAX, f"x must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require(
        count > 0 and 0 < width <= WIDTH_MAX and width % BLOCK == 0,
        f"x must have a multiple of {BLOCK} columns, at most {WIDTH_MAX}",
        tuple(x.shape),
    )
    if out is None:
        out = ChunkRows.empty(rows, width, x.device)
    require_chunk(out, rows, width, x.device)
    is_ptx = runs_ptx(x.device)
    _direct.call(
        _round_chunk_kernel, (rows,),
        x, out.values, out.scales,
        **constants(count, width, act_fp8, dependent and is_ptx),
        **({"num_warps": WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def constants(splits: int, width: int, act_fp8: bool, dependent: bool = True) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    blocks = power_of_two(width // BLOCK)
    return {"W": width, "SPLITS": splits, "BLOCKS": blocks, "FP8": act_fp8, "DEPENDENT": dependent}
