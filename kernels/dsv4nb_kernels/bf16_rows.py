"""T rows times a bfloat16 matrix, for the steps of decode and verify. Twin: `reference.bf16_rows`.

Traffic    reads the N·K weights once and each program's rows of activations; writes S·T·N float32: bandwidth-bound
Grid       (S, N / (16 tiles)); a program owns tiles of 16 rows of the matrix and 1/S of K, its warps split that along K
Equality   one order of summation for T = 1 … 8 (`_reduce`): row i of a step is bitwise the row alone. The shape of a
           program depends on (N, K) alone

As `fp8_rows`, with weights and activations that enter `mma.sync` as they are stored.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4nb_kernels import _direct
from dsv4nb_kernels._lanes import KEEP, STREAM, after_loads, load_lanes, load_rows, row_offset
from dsv4nb_kernels._launch import (
    ROWS_MAX,
    STAGE,
    TILE,
    Tuning,
    columns,
    compiler_options,
    require,
    require_cut,
    require_tensor,
    runs_ptx,
)
from dsv4nb_kernels._reduce import add_unit, no_chains, store_lanes, sum_parts

SPILLED_BYTES_MAX = 32  # per thread, of every cut below with its cap of registers, on every GPU

# (N, K): measured on an H200, see kernels/README.md
TUNINGS = {
    (64, 4096): Tuning(splits=8, depth=4, registers=128),  # weights of the indexer's heads
    (256, 4096): Tuning(splits=8, depth=4, registers=128),  # the router's gate
    (512, 4096): Tuning(splits=8, depth=4, registers=128),  # the indexer's compressor
    (1024, 4096): Tuning(splits=8, depth=4, registers=128),  # the compressor of 128
    (2048, 4096): Tuning(splits=4, depth=4, registers=128),  # the compressor of 4
    (2624, 4096): Tuning(splits=4, depth=4, registers=128),  # the same, the indexer's compressor and its heads' weights
    (64640, 4096): Tuning(warps=4, depth=4, ahead=4, registers=128),  # half of the head
    (129280, 4096): Tuning(warps=4, depth=4, ahead=4, registers=128),  # the head
}

# rows g and g + 8 of a lane's weights are A, its activations are B; the pair of products starts from zero
_UNIT_PRODUCT = tl.constexpr("""{
.reg .f32 d<4>, z;
mov.f32 z, 0f00000000;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0,d1,d2,d3}, {$4,$8,$5,$9}, {$12,$13}, {z,z,z,z};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0,d1,d2,d3}, {$6,$10,$7,$11}, {$14,$15}, {d0,d1,d2,d3};
mov.f32 $0, d0;
mov.f32 $1, d1;
mov.f32 $2, d2;
mov.f32 $3, d3;
}""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Matrix:
    """A matrix in the order in which the lanes read it.

    Attributes:
        words: [N · K / 2] int32, two weights each: [tile][K/32][half][g][t][8 weights], see `pack`.
        n, k: rows and columns.
    """

    words: Tensor
    n: int
    k: int


def pack(weight: Tensor) -> Bf16Matrix:
    """Reorder a checkpoint's matrix for the kernel.

    A tile is 16 rows, a unit 32 columns. Lane (g, t) of a warp, g in 0 … 7 and t in 0 … 3, holds rows g and g + 8 of a
    tile (half 0 and 1) and columns 8t … 8t + 7 of a unit.

    Args:
        weight: [N, K] bfloat16, N a multiple of 16 and K of 256.

    Raises:
        ValueError: a shape or the dtype does not fit.
    """
    require(weight.ndim == 2 and weight.dtype == torch.bfloat16, "weight must be [N, K] bfloat16", weight.dtype)
    n, k = weight.shape
    require(n % TILE == 0 and n > 0, f"weight must have a multiple of {TILE} rows", n)
    require(k % STAGE == 0 and k > 0, f"weight must have a multiple of {STAGE} columns", k)
    lanes = weight.view(torch.int16).view(n // TILE, 2, 8, k // 32, 32).permute(0, 3, 1, 2, 4).contiguous()
    return Bf16Matrix(words=lanes.view(torch.int32).view(-1), n=n, k=k)


def unpack(matrix: Bf16Matrix) -> Tensor:
    """Return the checkpoint's matrix; inverse of `pack`."""
    lanes = matrix.words.view(torch.int16).view(matrix.n // TILE, matrix.k // 32, 2, 8, 32)
    return lanes.permute(0, 2, 3, 1, 4).reshape(matrix.n, matrix.k).view(torch.bfloat16)


def tuning(n: int, k: int) -> Tuning:
    """Return how an [n, k] matrix is cut."""
    return TUNINGS.get((n, k), Tuning(warps=2 if k % (2 * STAGE) == 0 else 1, depth=4))


@triton.jit
def _unit_product(b_low, b_high, b_x):
    """As `_fp8.unit_product`, of 8 weights of a row in 4 registers."""
    return tl.inline_asm_elementwise(
        _UNIT_PRODUCT,
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r",
        b_low + b_high + b_x,
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_product(acc, w, x, s_one, o_t, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply unit UNIT of the warp's slice and add it to its chain."""
    W: tl.constexpr = UNIT * 8
    X: tl.constexpr = UNIT * COLUMNS // 8 * 4
    b_d = _unit_product(w[W : W + 4], w[W + 4 : W + 8], x[X : X + 4])
    return add_unit(acc, b_d, s_one, s_one, o_t, UNIT % 8, COLUMNS)


@triton.jit
def _slice_by_lanes(
    words_ptr,
    x_ptr,
    T,
    i_tile,
    i_split,
    K: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each lane's chains over its warp's slice of K, which is unrolled."""
    THREADS: tl.constexpr = 32 * TILES * WARPS
    CHUNKS: tl.constexpr = K // (64 * WARPS * SPLITS)
    EARLY: tl.constexpr = DEPTH if DEPTH < CHUNKS else CHUNKS
    o_thread = tl.arange(0, THREADS)
    o_lane = o_thread % 32
    o_warp = o_thread // 32
    o_g = o_lane // 4
    o_t = o_lane % 4
    i_tile += o_warp // WARPS
    k_first = (i_split * WARPS + o_warp % WARPS) * (CHUNKS * 64)
    p_w = words_ptr.to(tl.int64) + i_tile.to(tl.int64) * (K * 32) + (k_first * 32 + o_lane * 16)
    p_x = x_ptr.to(tl.int64) + (k_first + row_offset(o_g, o_t, T, K, COLUMNS)) * 2
    s_one = tl.full([THREADS], 1.0, tl.float32)
    acc = no_chains(THREADS, COLUMNS)

    w = load_lanes(p_w, 4 * EARLY, 512, STREAM)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = load_rows(p_x, 0, 0, AHEAD, CHUNKS, COLUMNS, KEEP)
    for c in tl.static_range(CHUNKS):
        x = x + load_rows(p_x, c, c + 1, AHEAD, CHUNKS, COLUMNS, KEEP)
        p_w = after_loads(p_w)
        acc = _add_product(acc, w, x, s_one, o_t, 2 * c, COLUMNS)
        acc = _add_product(acc, w, x, s_one, o_t, 2 * c + 1, COLUMNS)
        if c + DEPTH < CHUNKS:
            w = w + load_lanes(p_w + (c + DEPTH) * 2048, 4, 512, STREAM)
    return acc


@triton.jit
def _slice_plainly(words_ptr, x_ptr, T, i_tile, i_stage, K: tl.constexpr, STAGES: tl.constexpr):
    """One warp's [16, 8] of one tile without PTX: the same layout, the same chains."""
    o_row = tl.arange(0, 16)[:, None]
    o_k = tl.arange(0, 32)[None, :]
    o_column = tl.arange(0, 8)[:, None]
    p_w = words_ptr.to(tl.pointer_type(tl.bfloat16)) + i_tile.to(tl.int64) * (K * 16) + i_stage * 4096
    p_w += o_row // 8 * 256 + o_row % 8 * 32 + o_k
    p_x = x_ptr + o_column * K + i_stage * 256 + o_k
    z = tl.zeros([16, 8], tl.float32)
    chains = (z, z, z, z)
    for i in range(STAGES):
        for u in tl.static_range(8):
            b_w = tl.load(p_w + i * 4096 + u * 512).to(tl.float32)
            b_x = tl.load(p_x + i * 256 + u * 32, mask=o_column < T, other=0.0).to(tl.float32)
            b_sum = chains[u % 4] + tl.sum(b_w[:, None, :] * b_x[None, :, :], axis=2)
            chains = chains[: u % 4] + (b_sum,) + chains[u % 4 + 1 :]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


@triton.jit(do_not_specialize=["T"])
def _bf16_rows_kernel(
    words_ptr,  # [N · K / 2] int32
    x_ptr,  # [T, K] bfloat16
    out_ptr,  # [S, T, N] float32
    T,  # int, 1 … 8
    N: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PTX: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_tile = tl.program_id(1) * TILES
    p_out = out_ptr + i_split * T * N
    if PTX:
        acc = _slice_by_lanes(
            words_ptr, x_ptr, T, i_tile, i_split, K, TILES, WARPS, SPLITS, COLUMNS, DEPTH, AHEAD, DEPENDENT
        )
        store_lanes(p_out, acc, T, i_tile, N, TILES, WARPS, COLUMNS)
    else:
        STAGES: tl.constexpr = K // (256 * WARPS * SPLITS)
        o_row = tl.arange(0, 16)[:, None]
        o_column = tl.arange(0, 8)[None, :]
        for tile in range(TILES):
            parts = ()
            for warp in tl.static_range(WARPS):
                i_stage = (i_split * WARPS + warp) * STAGES
                parts = parts + (_slice_plainly(words_ptr, x_ptr, T, i_tile + tile, i_stage, K, STAGES),)
            p_tile = p_out + o_column * N + (i_tile + tile) * 16 + o_row
            tl.store(p_tile, sum_parts(parts, WARPS), mask=o_column < T)


def bf16_rows(x: Tensor, matrix: Bf16Matrix, *, out: Tensor | None = None, dependent: bool = False) -> Tensor:
    """Multiply rows by the transposed matrix; the result is the sum of the returned splits, from left to right.

    Args:
        x: [T, K] bfloat16, T from 1 to 8.
        matrix: [N, K].
        out: [S, T, N] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `x` has ended: weights are loaded, then it waits.

    Returns:
        [S, T, N] float32, S = `tuning(N, K).splits`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(x, matrix, tuning(matrix.n, matrix.k), out=out, dependent=dependent)


def launch(
    x: Tensor,
    matrix: Bf16Matrix,
    cut: Tuning,
    *,
    out: Tensor | None = None,
    dependent: bool = False,
    ptx: bool | None = None,
    token_columns: int | None = None,
) -> Tensor:
    """`bf16_rows` with another cut, form or number of token columns: for benches and tests."""
    n, k, device = matrix.n, matrix.k, matrix.words.device
    require(x.ndim == 2 and 1 <= x.shape[0] <= ROWS_MAX, f"x must be 1 to {ROWS_MAX} rows", tuple(x.shape))
    count = x.shape[0]
    require_cut(cut, n, k)
    require_tensor(x, "x", (count, k), torch.bfloat16, device)
    if out is None:
        out = torch.empty(cut.splits, count, n, dtype=torch.float32, device=device)
    require_tensor(out, "out", (cut.splits, count, n), torch.float32, device)
    by_lanes = runs_ptx(device) if ptx is None else ptx
    _direct.call(
        _bf16_rows_kernel,
        (cut.splits, n // (TILE * cut.tiles)),
        matrix.words,
        x,
        out,
        count,
        **constants(n, k, cut, token_columns or columns(count), dependent and by_lanes, by_lanes),
        **(compiler_options(cut, dependent) if by_lanes else {}),
    )
    return out


def constants(
    n: int, k: int, cut: Tuning, token_columns: int, dependent: bool = True, ptx: bool = True
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "N": n,
        "K": k,
        "TILES": cut.tiles,
        "WARPS": cut.warps,
        "SPLITS": cut.splits,
        "COLUMNS": token_columns,
        "DEPTH": cut.depth,
        "AHEAD": cut.ahead,
        "DEPENDENT": dependent,
        "PTX": ptx,
    }
