"""Source rows of a compressor into its ring; finished windows into entries. Twin: `reference.compress`.

Traffic    reads the parts of a product and writes a ring row each; of a row that ends a window, reads the window's rows
           from the ring and writes an entry: latency-bound
Grid       (T, 2n) for the source rows, then (T,); a program whose row ends no window has nothing to do
Equality   a window is pooled from the ring, always as many rows at a time: an entry does not depend on how its rows
           were grouped into steps or chunks
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._index_values import hadamard_signs, round_fp4
from dsv4nb_kernels._kv_records import KV_BLOCK, record_bytes, require_cache, store_record
from dsv4nb_kernels._kv_rows import inverse_rms
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, power_of_two, require, require_tensor, runs_ptx
from dsv4nb_kernels._rotary import angles_of, require_angles, turn_tail
from dsv4nb_kernels._rounded_rows import round_bf16
from dsv4nb_kernels._turns import take_turn

SOURCE_WARPS = 4
EAGER = True
TOGETHER_MAX = 32  # rows of a window that are pooled at a time: all in the registers of a channel's thread
LIMITS = {"source": Limits(registers=40), "pool": Limits(registers=200, shared_bytes=4096)}

Rounding = Literal["none", "kv", "index"]
_ROUNDINGS: tuple[Rounding, ...] = ("none", "kv", "index")
_LOWEST = tl.constexpr(-3.0e38)  # stands for the maximum of no rows: finite, so that nothing minus nothing is no NaN


@triton.jit(do_not_specialize=["T"])
def _source_kernel(
    product_ptr,  # [S, T, 2 · halves · d] float32
    offset_ptr,  # [r, 2 · halves · d] float32
    position_ptr,  # [1] int32
    ring_ptr,  # [C, 2 · halves · d] float32
    T,  # int, 1 … 4096
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    LINE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    take_turn(DEPENDENT, EAGER)
    position = tl.load(position_ptr) + i_row
    b_row = tl.load(product_ptr + i_row * LINE + o_column)
    for i in tl.static_range(1, SPLITS):
        b_row += tl.load(product_ptr + (i * T + i_row) * LINE + o_column)
    b_row += tl.load(offset_ptr + position % RATIO * LINE + o_column)
    tl.store(ring_ptr + position % RING * LINE + o_column, b_row)


@triton.jit
def _pool_kernel(
    position_ptr,  # [1] int32
    ring_ptr,  # [C, 2 · halves · d] float32
    norm_ptr,  # [d] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    entries_ptr,  # [E, d] bfloat16, or [E, R] uint8 records
    eps,  # float
    RATIO: tl.constexpr,
    HALVES: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROUNDING: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    LINE: tl.constexpr = 2 * HALVES * WIDTH
    REACH: tl.constexpr = HALVES * RATIO
    i_row = tl.program_id(0)
    o_d = tl.arange(0, WIDTH)
    o_place = tl.arange(0, TOGETHER)
    b_norm = tl.load(norm_ptr + o_d)
    take_turn(DEPENDENT, EAGER)
    position = tl.load(position_ptr) + i_row
    if position % RATIO == RATIO - 1:
        b_top = tl.full([WIDTH], _LOWEST, tl.float32)
        b_total = tl.zeros([WIDTH], tl.float32)
        b_pooled = tl.zeros([WIDTH], tl.float32)
        for start in range(0, REACH, TOGETHER):
            o_position = position - (REACH - 1) + start + o_place
            m_row = (o_position >= 0)[:, None]
            # of the window before its first half of the columns, of the own window the second
            o_row = o_position % RING * LINE + (start + o_place) // RATIO * WIDTH
            p_values = ring_ptr + o_row[:, None] + o_d[None, :]
            b_scores = tl.load(p_values + HALVES * WIDTH, mask=m_row, other=float("-inf"))
            b_values = tl.load(p_values, mask=m_row, other=0.0)
            b_new = tl.maximum(b_top, tl.max(b_scores, axis=0))
            b_raised = tl.exp(b_scores - b_new[None, :])
            b_kept = tl.exp(b_top - b_new)
            b_total = b_total * b_kept + tl.sum(b_raised, axis=0)
            b_pooled = b_pooled * b_kept + tl.sum(b_raised * b_values, axis=0)
            b_top = b_new
        b_cos, b_sin = angles_of(cos_ptr + i_row * TAIL, sin_ptr + i_row * TAIL, WIDTH, TAIL)
        b_x = round_bf16(b_pooled / b_total)
        b_x = round_bf16(b_norm * (b_x * inverse_rms(b_x, WIDTH, eps)))
        b_x = round_bf16(turn_tail(b_x, b_cos, b_sin, WIDTH, TAIL))
        i_entry = (position // RATIO).to(tl.int64)
        if ROUNDING == 1:
            store_record(entries_ptr + i_entry * record_bytes(WIDTH, TAIL), b_x, WIDTH, TAIL)
        else:
            if ROUNDING == 2:
                b_x = round_bf16(tl.sum(hadamard_signs(WIDTH) * b_x[:, None], axis=0) * (WIDTH**-0.5))
                b_x = tl.reshape(round_fp4(tl.reshape(b_x, [1, WIDTH // 32, 32])), [WIDTH])
            tl.store(entries_ptr + i_entry * WIDTH + o_d, b_x.to(tl.bfloat16))


def compress(
    product: Tensor,
    offset: Tensor,
    position: Tensor,
    ring: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    entries: Tensor,
    *,
    eps: float,
    rounding: Rounding,
    dependent: bool = False,
) -> None:
    """Write a step's source rows into the ring, and the entries of the windows that it ends.

    Args:
        product: [S, T, 2·n·d] float32, T from 1 to 4096: parts, added from left to right; of a row first the values,
            then the scores, n halves each. d is a power of two from 128 on.
        offset: [r, 2·n·d] float32, added by the place in a window; n = 2, where windows overlap, for r = 4; else n = 1.
        position: [1] int32, of the first row; the others follow it.
        ring: [C, 2·n·d] float32, the rows of earlier steps, each at its position modulo C; C at least n·r + T.
        norm: [d] float32.
        cos, sin: [T, rd] float32, angles of the entry that each row ends, at the first position of its window; not read
            for other rows. Each angle stands twice, the sine of an even element is negated.
        entries: [E, R] uint8 records (`_kv_records`) with the rounding "kv", else [E, d] bfloat16; written at the
            windows' numbers.
        rounding: what the cache holds. "kv": everything outside the rotated tail rounded to e4m3, blocks of 64;
            "index": rotated by the Hadamard matrix, d at most 256, and passed through e2m1, blocks of 32.
        dependent: start before the kernel that writes `product` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(product.ndim == 3 and product.shape[0] > 0, "product must be [S, T, N]", tuple(product.shape))
    splits, rows, line = product.shape
    require(1 <= rows <= CHUNK_ROWS_MAX, f"product must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require_tensor(product, "product", (splits, rows, line), torch.float32)
    require_tensor(position, "position", (1,), torch.int32, product.device)
    pool = shape_of(offset, ring, norm, cos, sin, entries, rounding, rows, line, product.device)
    is_ptx = runs_ptx(product.device)
    is_dependent = dependent and is_ptx
    _direct.call(
        _source_kernel, (rows, 2 * pool.halves),
        product, offset, position, ring, rows,
        **source_constants(pool.ratio, pool.held, line, pool.width, splits, is_dependent),
        **({"num_warps": SOURCE_WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    _direct.call(
        _pool_kernel, (rows,),
        position, ring, norm, cos, sin, entries, eps,
        **pool_constants(pool.ratio, pool.halves, pool.held, pool.width, pool.tail, rounding, is_dependent),
        **({"num_warps": pool_warps(pool.ratio, pool.halves), "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip


class Pool(NamedTuple):
    """The sizes of a compressor: window, halves of a line, rows of its ring, channels, and those that are rotated."""

    ratio: int
    halves: int
    held: int
    width: int
    tail: int


def shape_of(
    offset: Tensor,
    ring: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    entries: Tensor,
    rounding: Rounding,
    rows: int,
    line: int,
    device: torch.device,
) -> Pool:
    """Return the sizes of a compressor of source rows of `line` columns.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    width = norm.shape[0]
    require(width >= 128 and width == power_of_two(width), "norm must be a power of two from 128 on", width)
    halves, ratio = line // (2 * width), offset.shape[0]
    require(halves in (1, 2) and line == 2 * halves * width, f"product must be {2 * width} or {4 * width} wide", line)
    require(ratio > 0 and halves * ratio % 8 == 0, "a window must have a multiple of 8 rows", halves * ratio)
    require_tensor(offset, "offset", (ratio, line), torch.float32, device)
    held = ring.shape[0]
    require(held >= halves * ratio + rows, f"ring must have at least {halves * ratio + rows} rows", held)
    require_tensor(ring, "ring", (held, line), torch.float32, device)
    require_tensor(norm, "norm", (width,), torch.float32, device)
    tail = require_angles(cos, sin, rows, width, device)
    require((width - tail) % KV_BLOCK == 0, f"d - rd must be a multiple of {KV_BLOCK}", (width, tail))
    require(rounding in _ROUNDINGS, f"rounding must be one of {_ROUNDINGS}", rounding)
    require_cache(entries, "entries", width, tail, rounding == "kv", device)
    require(rounding != "index" or width <= 256, 'rows of rounding "index" must be at most 256 wide', width)
    return Pool(ratio, halves, held, width, tail)


def source_constants(
    ratio: int, ring: int, line: int, width: int, splits: int, dependent: bool = True
) -> dict[str, int | bool]:
    """Return the first kernel's compile-time arguments."""
    return {
        "RATIO": ratio,
        "RING": ring,
        "LINE": line,
        "WIDTH": width,
        "SPLITS": splits,
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }


def pool_warps(ratio: int, halves: int) -> int:
    """Return the warps of a pooling program: more for windows that take several turns."""
    return 8 if halves * ratio >= TOGETHER_MAX else 4


def pool_constants(
    ratio: int, halves: int, ring: int, width: int, tail: int, rounding: Rounding, dependent: bool = True
) -> dict[str, int | bool]:
    """Return the second kernel's compile-time arguments."""
    return {
        "RATIO": ratio,
        "HALVES": halves,
        "RING": ring,
        "WIDTH": width,
        "TAIL": tail,
        "TOGETHER": math.gcd(halves * ratio, TOGETHER_MAX),
        "ROUNDING": _ROUNDINGS.index(rounding),
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }
