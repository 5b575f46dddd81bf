"""The two compressors of a layer with an indexer in one: entries and index keys of a step. Twin: `reference.compress`.

Traffic    as of `compress`, whose kernel pools here too
Grid       (T, columns / 4 di) for the source rows of both, then (T, 2)
Equality   as of `compress`: an entry or a key has the same bits by either
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct, compress
from dsv4nb_kernels._launch import ROWS_MAX, Limits, require, require_tensor, runs_ptx
from dsv4nb_kernels._turns import take_turn
from dsv4nb_kernels.compress import EAGER, SOURCE_WARPS, Rounding, _pool_kernel, pool_constants, pool_warps, shape_of

LIMITS = {"source": Limits(registers=40), "pool": Limits(registers=200, shared_bytes=4096)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What one of the compressors adds to, keeps and makes; as of `compress`.

    Attributes:
        offset: [r, 2·n·d] float32.
        ring: [C, 2·n·d] float32.
        norm: [d] float32.
        entries: written at the windows' numbers.
        rounding: of the entries.
    """

    offset: Tensor
    ring: Tensor
    norm: Tensor
    entries: Tensor
    rounding: Rounding


@triton.jit(do_not_specialize=["T"])
def _sources_kernel(
    product_ptr,  # [S, T, N] float32
    position_ptr,  # [1] int32
    offset_ptr,  # [r, LINE] float32
    ring_ptr,  # [RING, LINE] float32
    keys_offset_ptr,  # [r, KEYS_LINE] float32
    keys_ring_ptr,  # [KEYS_RING, KEYS_LINE] float32
    T,  # int, 1 … 8
    N: tl.constexpr,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    LINE: tl.constexpr,
    KEYS_RING: tl.constexpr,
    KEYS_LINE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    first = tl.program_id(1) * WIDTH
    o_column = first + tl.arange(0, WIDTH)
    take_turn(DEPENDENT, EAGER)
    position = tl.load(position_ptr) + i_row
    b_row = tl.load(product_ptr + i_row * N + o_column)
    for i in tl.static_range(1, SPLITS):
        b_row += tl.load(product_ptr + (i * T + i_row) * N + o_column)
    if first < LINE:
        b_row += tl.load(offset_ptr + position % RATIO * LINE + o_column)
        tl.store(ring_ptr + position % RING * LINE + o_column, b_row)
    else:
        o_column -= LINE
        b_row += tl.load(keys_offset_ptr + position % RATIO * KEYS_LINE + o_column)
        tl.store(keys_ring_ptr + position % KEYS_RING * KEYS_LINE + o_column, b_row)


@triton.jit
def _pools_kernel(
    position_ptr,  # [1] int32
    ring_ptr,
    norm_ptr,
    entries_ptr,
    keys_ring_ptr,
    keys_norm_ptr,
    keys_ptr,
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    eps,  # float
    RATIO: tl.constexpr,
    HALVES: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDING: tl.constexpr,
    KEYS_RING: tl.constexpr,
    KEYS_WIDTH: tl.constexpr,
    KEYS_ROUNDING: tl.constexpr,
    TAIL: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _pool_kernel(
            position_ptr, ring_ptr, norm_ptr, cos_ptr, sin_ptr, entries_ptr, eps,
            RATIO, HALVES, RING, WIDTH, TAIL, TOGETHER, ROUNDING, DEPENDENT, EAGER,
        )  # fmt: skip
    else:
        _pool_kernel(
            position_ptr, keys_ring_ptr, keys_norm_ptr, cos_ptr, sin_ptr, keys_ptr, eps,
            RATIO, HALVES, KEYS_RING, KEYS_WIDTH, TAIL, TOGETHER, KEYS_ROUNDING, DEPENDENT, EAGER,
        )  # fmt: skip


def compress_both(
    product: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    entries: Cache,
    keys: Cache,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """Write a step's source rows of both compressors, and the entries and keys of the windows that it ends.

    Args:
        product: [S, T, N] float32, T from 1 to 8: parts, added from left to right; of a row first what `compress` takes
            for the entries, then what it takes for the keys. What is behind them is not read.
        position: [1] int32, of the first row.
        cos, sin: [T, rd] float32, as of `compress`.
        entries, keys: windows of both are as long.
        dependent: start before the kernel that writes `product` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(product.ndim == 3 and product.shape[0] > 0, "product must be [S, T, N]", tuple(product.shape))
    splits, rows, n = product.shape
    device = product.device
    require(1 <= rows <= ROWS_MAX, f"product must have 1 to {ROWS_MAX} rows", rows)
    require_tensor(product, "product", (splits, rows, n), torch.float32)
    require_tensor(position, "position", (1,), torch.int32, device)
    own, other = (
        shape_of(
            each.offset, each.ring, each.norm, cos, sin, each.entries, each.rounding, rows, each.offset.shape[1], device
        )
        for each in (entries, keys)
    )
    require(own[:2] == other[:2], "entries and keys must be of windows that are alike", (own, other))
    line, keys_line = entries.offset.shape[1], keys.offset.shape[1]
    require(n >= line + keys_line, f"product must be {line + keys_line} wide at least", n)
    is_ptx = runs_ptx(device)
    options = {"launch_pdl": dependent} if is_ptx else {}
    constants = source_constants(own.ratio, n, (own.held, line), (other.held, keys_line), splits, dependent and is_ptx)
    _direct.call(
        _sources_kernel, (rows, (line + keys_line) // constants["WIDTH"]),
        product, position, entries.offset, entries.ring, keys.offset, keys.ring, rows,
        **constants, **options, **({"num_warps": SOURCE_WARPS} if is_ptx else {}),
    )  # fmt: skip
    _direct.call(
        _pools_kernel, (rows, 2),
        position, entries.ring, entries.norm, entries.entries, keys.ring, keys.norm, keys.entries, cos, sin, eps,
        **both_constants(own, other, entries.rounding, keys.rounding, dependent and is_ptx),
        **options, **({"num_warps": pool_warps(own.ratio, own.halves)} if is_ptx else {}),
    )  # fmt: skip


def source_constants(
    ratio: int, n: int, own: tuple[int, int], other: tuple[int, int], splits: int, dependent: bool = True
) -> dict[str, int]:
    """Return the first kernel's compile-time arguments; of both rings the rows and the columns."""
    return {
        "N": n,
        "RATIO": ratio,
        "RING": own[0],
        "LINE": own[1],
        "KEYS_RING": other[0],
        "KEYS_LINE": other[1],
        "WIDTH": gcd(own[1], other[1]),
        "SPLITS": splits,
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }


def both_constants(
    own: compress.Pool, other: compress.Pool, rounding: Rounding, keys_rounding: Rounding, dependent: bool = True
) -> dict[str, int | bool]:
    """Return the second kernel's compile-time arguments."""
    ratio, halves, held, width, tail = own
    own_constants = pool_constants(ratio, halves, held, width, tail, rounding, dependent)
    keys = pool_constants(ratio, halves, other.held, other.width, tail, keys_rounding, dependent)
    return own_constants | {f"KEYS_{name}": keys[name] for name in ("RING", "WIDTH", "ROUNDING")}
