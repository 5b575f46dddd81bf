"""T rows times a block-scaled FP8 matrix, for the steps of decode and verify. Twin: `reference.fp8_rows`.

Traffic    reads the N·K codes once and each program's rows of activations; writes S·T·N float32: bandwidth-bound
Grid       (N / (16 tiles), S); a program owns tiles of 16 rows of the matrix and 1/S of K, its warps split that along K
Equality   one order of summation for T = 1 … 8 (`_reduce`): row i of a step is bitwise the row alone. The shape of a
           program depends on (N, K) alone

Each warp streams its weights straight into the registers of `mma.sync`, no shared memory: the matrix is packed at load
time so that a lane's 16-byte loads are the operand. Weights are on their way before the kernel waits for the one before
it (`dependent`).
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
from dsv4nb_kernels._e8m0 import bytes_of, require_scale_bytes, scales_of
from dsv4nb_kernels._fp8 import decode_e4m3, unit_product
from dsv4nb_kernels._lanes import KEEP, SHARED, STREAM, after_loads, load_lanes, load_pair, load_rows, row_offset
from dsv4nb_kernels._launch import (
    ROWS_MAX,
    STAGE,
    TILE,
    Tuning,
    cdiv,
    columns,
    compiler_options,
    require,
    require_cut,
    require_tensor,
    runs_ptx,
)
from dsv4nb_kernels._reduce import add_unit, no_chains, store_lanes, sum_parts
from dsv4nb_kernels._rounded_rows import RoundedRows, require_rows

BLOCK = 128  # rows and columns that share a scale; activations share one along K
_NAN_CODE = 0x7F

SPILLED_BYTES_MAX = 32  # per thread, of every cut below with its cap of registers, on every GPU

# (N, K): measured on an H200, see kernels/README.md
TUNINGS = {
    (1536, 4096): Tuning(splits=8, registers=96),  # wq_a and wkv in one matrix
    (8192, 1024): Tuning(registers=128),  # the indexer's wq_b
    (16384, 1024): Tuning(depth=6, ahead=4, registers=96, wide=(4, 4, 112)),  # half of wq_b
    (32768, 1024): Tuning(tiles=4, warps=1, ahead=8, registers=128),  # wq_b
    (4096, 4096): Tuning(splits=4, depth=6, ahead=4, registers=96, wide=(6, 4, 128)),  # half of wo_a, half of wo_b
    (8192, 4096): Tuning(splits=4, registers=128),  # wo_a
    (4096, 8192): Tuning(splits=4, warps=4, registers=96),  # wo_b
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Matrix:
    """A matrix in the order in which the lanes read it.

    Attributes:
        words: [N · K / 4] int32, the codes: [tile][K/64][half][g][t][unit][8 bytes], see `pack`.
        scales: [ceil(N/128), K/128] float32, powers of two.
        n, k: rows and columns.
    """

    words: Tensor
    scales: Tensor
    n: int
    k: int


def pack(codes: Tensor, scale_bytes: Tensor) -> Fp8Matrix:
    """Reorder a checkpoint's matrix for the kernel.

    A tile is 16 rows, a chunk 64 columns. Lane (g, t) of a warp, g in 0 … 7 and t in 0 … 3, holds rows g and g + 8 of a
    tile (half 0 and 1) and columns 8t … 8t + 7 of each of the two units of a chunk.

    Args:
        codes: [N, K] float8_e4m3fn, N a multiple of 16 and K of 256.
        scale_bytes: [ceil(N/128), K/128] uint8, e8m0.

    Raises:
        ValueError: a shape or dtype does not fit, a code is NaN, or a scale byte is above 240.
    """
    require(codes.ndim == 2 and codes.dtype == torch.float8_e4m3fn, "codes must be [N, K] float8_e4m3fn", codes.dtype)
    n, k = codes.shape
    require(n % TILE == 0 and n > 0, f"codes must have a multiple of {TILE} rows", n)
    require(k % STAGE == 0 and k > 0, f"codes must have a multiple of {STAGE} columns", k)
    require_tensor(scale_bytes, "scale_bytes", (cdiv(n, BLOCK), k // BLOCK), torch.uint8, codes.device)
    require_scale_bytes(scale_bytes, "scale_bytes")
    raw = codes.view(torch.uint8)
    nans = int(((raw & _NAN_CODE) == _NAN_CODE).sum())
    require(nans == 0, "codes must be numbers; 0x7f and 0xff are NaN", f"{nans} NaN")
    lanes = raw.view(n // TILE, 2, 8, k // 64, 2, 4, 8).permute(0, 3, 1, 2, 5, 4, 6).contiguous()
    return Fp8Matrix(words=lanes.view(torch.int32).view(-1), scales=scales_of(scale_bytes), n=n, k=k)


def unpack(matrix: Fp8Matrix) -> tuple[Tensor, Tensor]:
    """Return the checkpoint's codes and scale bytes; inverse of `pack`."""
    lanes = matrix.words.view(torch.uint8).view(matrix.n // TILE, matrix.k // 64, 2, 8, 4, 2, 8)
    raw = lanes.permute(0, 2, 3, 1, 5, 4, 6).reshape(matrix.n, matrix.k)
    return raw.view(torch.float8_e4m3fn), bytes_of(matrix.scales)


def tuning(n: int, k: int) -> Tuning:
    """Return how an [n, k] matrix is cut."""
    return TUNINGS.get((n, k), Tuning(warps=2 if k % (2 * STAGE) == 0 else 1))


@triton.constexpr_function
def _scale_loads(chunk, ahead, chunks):
    """How many of the activations' scales are under way, one for two chunks; as `rows_loads`."""
    return min(-(-(chunk + ahead) // 2), chunks // 2)


@triton.jit
def _load_row_scales(
    p_x_scales,
    CHUNK: tl.constexpr,
    NEXT: tl.constexpr,
    AHEAD: tl.constexpr,
    CHUNKS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """The scales of the activations at the lane's two columns; as `load_rows`."""
    FIRST: tl.constexpr = _scale_loads(CHUNK, AHEAD, CHUNKS) if NEXT > 0 else 0
    LAST: tl.constexpr = _scale_loads(NEXT, AHEAD, CHUNKS)
    s = ()
    for i in tl.static_range(FIRST, LAST):
        s = s + load_pair(p_x_scales + i * 32, CACHE)
    return s


@triton.jit
def _add_product(acc, w, s_w, x, s_x, o_t, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply unit UNIT of the warp's slice and add it to its chain."""
    W: tl.constexpr = UNIT // 2 * 8 + UNIT % 2 * 2
    X: tl.constexpr = UNIT * COLUMNS // 8 * 4
    S: tl.constexpr = UNIT // 4
    b_d = unit_product(w[W : W + 2], w[W + 4 : W + 6], x[X : X + 4])
    return add_unit(acc, b_d, s_w[S] * s_x[2 * S], s_w[S] * s_x[2 * S + 1], o_t, UNIT % 8, COLUMNS)


@triton.jit
def _slice_by_lanes(
    words_ptr,
    w_scales_ptr,
    x_ptr,
    x_scales_ptr,
    T,
    i_tile,
    i_split,
    x_first,
    X_WIDTH: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OLDER: tl.constexpr,
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
    p_w = words_ptr.to(tl.int64) + i_tile.to(tl.int64) * (K * 16) + (k_first * 16 + o_lane * 16)
    p_w_scales = w_scales_ptr.to(tl.int64) + (i_tile // 8 * (K // 128) + k_first // 128) * 4
    p_x = x_ptr.to(tl.int64) + (x_first + k_first + row_offset(o_g, o_t, T, X_WIDTH, COLUMNS)) * 2
    p_x_scales = x_scales_ptr.to(tl.int64) + ((x_first + k_first) // 128 * 8 + o_t * 2 % COLUMNS) * 4
    acc = no_chains(THREADS, COLUMNS)
    CACHE: tl.constexpr = SHARED if OLDER else KEEP

    w = load_lanes(p_w, 2 * EARLY, 512, STREAM)
    s_w = ()
    for i in tl.static_range(CHUNKS // 4):
        s_w = s_w + load_pair(p_w_scales + i * 8, KEEP)
    if DEPENDENT:
        gdc_launch_dependents()
        if not OLDER:
            gdc_wait()
    x = load_rows(p_x, 0, 0, AHEAD, CHUNKS, COLUMNS, CACHE)
    s_x = _load_row_scales(p_x_scales, 0, 0, AHEAD, CHUNKS, CACHE)
    for c in tl.static_range(CHUNKS):
        x = x + load_rows(p_x, c, c + 1, AHEAD, CHUNKS, COLUMNS, CACHE)
        s_x = s_x + _load_row_scales(p_x_scales, c, c + 1, AHEAD, CHUNKS, CACHE)
        p_w = after_loads(p_w)
        acc = _add_product(acc, w, s_w, x, s_x, o_t, 2 * c, COLUMNS)
        acc = _add_product(acc, w, s_w, x, s_x, o_t, 2 * c + 1, COLUMNS)
        if c + DEPTH < CHUNKS:
            w = w + load_lanes(p_w + (c + DEPTH) * 1024, 2, 512, STREAM)
    if DEPENDENT and OLDER:  # before anything is written, and so that our end is that of the kernels ahead too
        gdc_wait()
    return acc


@triton.jit
def _slice_plainly(
    words_ptr,
    w_scales_ptr,
    x_ptr,
    x_scales_ptr,
    T,
    i_tile,
    i_stage,
    x_first,
    X_WIDTH: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One warp's [16, 8] of one tile without PTX: the same layout, the same chains."""
    o_row = tl.arange(0, 16)[:, None]
    o_k = tl.arange(0, 32)[None, :]
    o_column = tl.arange(0, 8)[:, None]
    p_w = words_ptr.to(tl.pointer_type(tl.uint8)) + i_tile.to(tl.int64) * (K * 16) + i_stage * 4096
    p_w += o_row // 8 * 512 + o_row % 8 * 64 + o_k // 8 * 16 + o_k % 8
    p_x = x_ptr + o_column * X_WIDTH + x_first + i_stage * 256 + o_k
    p_x_scales = x_scales_ptr + (x_first // 128 + i_stage * 2) * 8 + tl.arange(0, 8)
    p_w_scales = w_scales_ptr + i_tile // 8 * (K // 128) + i_stage * 2
    z = tl.zeros([16, 8], tl.float32)
    chains = (z, z, z, z)
    for i in range(STAGES):
        for u in tl.static_range(8):
            b_w = decode_e4m3(tl.load(p_w + i * 4096 + u // 2 * 1024 + u % 2 * 8).to(tl.int32))
            b_x = tl.load(p_x + i * 256 + u * 32, mask=o_column < T, other=0.0).to(tl.float32)
            s = tl.load(p_w_scales + i * 2 + u // 4) * tl.load(p_x_scales + (i * 2 + u // 4) * 8)
            b_d = tl.sum(b_w[:, None, :] * b_x[None, :, :], axis=2)
            b_sum = tl.fma(b_d, tl.broadcast_to(s[None, :], b_d.shape), chains[u % 4])
            chains = chains[: u % 4] + (b_sum,) + chains[u % 4 + 1 :]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


@triton.jit(do_not_specialize=["T"])
def _fp8_rows_kernel(
    words_ptr,  # [N · K / 4] int32
    w_scales_ptr,  # [N/128, K/128] float32
    x_ptr,  # [T, G · K] float16
    x_scales_ptr,  # [G · K / 128, 8] float32
    out_ptr,  # [S, T, N] float32
    T,  # int, 1 … 8
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OLDER: tl.constexpr,
    PTX: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_tile = tl.program_id(1) * TILES
    x_first = i_tile * 16 // (N // GROUPS) * K
    p_out = out_ptr + i_split * T * N
    if PTX:
        acc = _slice_by_lanes(
            words_ptr,
            w_scales_ptr,
            x_ptr,
            x_scales_ptr,
            T,
            i_tile,
            i_split,
            x_first,
            GROUPS * K,
            K,
            TILES,
            WARPS,
            SPLITS,
            COLUMNS,
            DEPTH,
            AHEAD,
            DEPENDENT,
            OLDER,
        )
        store_lanes(p_out, acc, T, i_tile, N, TILES, WARPS, COLUMNS)
    else:
        STAGES: tl.constexpr = K // (256 * WARPS * SPLITS)
        o_row = tl.arange(0, 16)[:, None]
        o_column = tl.arange(0, 8)[None, :]
        for tile in range(TILES):
            parts = ()
            for warp in tl.static_range(WARPS):
                parts = parts + (
                    _slice_plainly(
                        words_ptr,
                        w_scales_ptr,
                        x_ptr,
                        x_scales_ptr,
                        T,
                        i_tile + tile,
                        (i_split * WARPS + warp) * STAGES,
                        x_first,
                        GROUPS * K,
                        K,
                        STAGES,
                    ),
                )
            p_tile = p_out + o_column * N + (i_tile + tile) * 16 + o_row
            tl.store(p_tile, sum_parts(parts, WARPS), mask=o_column < T)


def fp8_rows(
    rows: RoundedRows,
    matrix: Fp8Matrix,
    *,
    groups: int = 1,
    out: Tensor | None = None,
    dependent: bool = False,
    rows_are_older: bool = False,
) -> Tensor:
    """Multiply rows by the transposed matrix; the result is the sum of the returned splits, from left to right.

    Args:
        rows: [T, G · K], T from 1 to 8.
        matrix: [N, K]; rows g · N/G … of it meet columns g · K … of `rows`.
        groups: G; N/G must be a multiple of 16 times the tiles of the matrix's tuning.
        out: [S, T, N] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `rows` has ended: weights are loaded, then it waits.
        rows_are_older: what writes `rows` stands before a kernel ahead that lets the next one start only after it has
            waited. Then all is done beside the kernels that run, and the wait comes before the result is written.

    Returns:
        [S, T, N] float32, S = `tuning(N, K).splits`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(
        rows,
        matrix,
        tuning(matrix.n, matrix.k),
        groups=groups,
        out=out,
        dependent=dependent,
        rows_are_older=rows_are_older,
    )


def launch(
    rows: RoundedRows,
    matrix: Fp8Matrix,
    cut: Tuning,
    *,
    groups: int = 1,
    out: Tensor | None = None,
    dependent: bool = False,
    rows_are_older: bool = False,
    ptx: bool | None = None,
    token_columns: int | None = None,
) -> Tensor:
    """`fp8_rows` with another cut, form or number of token columns: for benches and tests."""
    n, k, device = matrix.n, matrix.k, matrix.words.device
    count = rows.codes.shape[0]
    require(1 <= count <= ROWS_MAX, f"rows must be 1 to {ROWS_MAX}", count)
    require_cut(cut, n, k, groups)
    require_rows(rows, count, groups * k, device)
    if out is None:
        out = torch.empty(cut.splits, count, n, dtype=torch.float32, device=device)
    require_tensor(out, "out", (cut.splits, count, n), torch.float32, device)
    by_lanes = runs_ptx(device) if ptx is None else ptx
    token_columns = token_columns or columns(count)
    cut = cut.at(token_columns)
    _direct.call(
        _fp8_rows_kernel,
        (cut.splits, n // (TILE * cut.tiles)),
        matrix.words,
        matrix.scales,
        rows.codes,
        rows.scales,
        out,
        count,
        **constants(n, k, cut, token_columns, groups, dependent and by_lanes, by_lanes, rows_are_older),
        **(compiler_options(cut, dependent) if by_lanes else {}),
    )
    return out


def constants(
    n: int,
    k: int,
    cut: Tuning,
    token_columns: int,
    groups: int = 1,
    dependent: bool = True,
    ptx: bool = True,
    older: bool = False,
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "N": n,
        "K": k,
        "GROUPS": groups,
        "TILES": cut.tiles,
        "WARPS": cut.warps,
        "SPLITS": cut.splits,
        "COLUMNS": token_columns,
        "DEPTH": cut.depth,
        "AHEAD": cut.ahead,
        "DEPENDENT": dependent,
        "OLDER": older,
        "PTX": ptx,
    }
