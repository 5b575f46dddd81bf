"""The rows of a chunk times a block-scaled FP8 matrix. Twin: `reference.fp8_chunk`.

Arithmetic T·N·K products of the tensor cores in float16, which holds both sides' codes: compute-bound
Grid       (N / 128, T / 128), or as `TUNINGS` has it; on Hopper two warpgroups of a program decode weights in registers
           and multiply, and one copies (`_chunk_lanes`)
Equality   a row's sums do not depend on the rows beside it, but their order is not that of `fp8_rows`: 128 k at a time
           by the tensor cores, from zero, and those sums in ascending order in float32

The weights are those of `fp8_rows`, in the same packing; so are groups and output, of which there is one part.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4nb_kernels import _chunk_lanes, _direct
from dsv4nb_kernels._chunk_lanes import (
    COLUMNS,
    COPIED_ROWS,
    FIRST,
    OTHER_REGISTERS,
    OTHER_WARPS,
    ROWS,
    SECOND,
    copy,
    multiply,
    ring,
    row_pointers,
    words_of,
)
from dsv4nb_kernels._chunk_plain import fp8_sum
from dsv4nb_kernels._chunk_rows import ChunkRows, require_chunk
from dsv4nb_kernels._launch import Limits, cdiv, require, require_tensor, runs_wgmma
from dsv4nb_kernels.fp8_rows import BLOCK, Fp8Matrix

LIMITS = {
    "lanes": Limits(registers=168, stack_bytes=48, shared_bytes=196808),
    "plain": Limits(registers=178, shared_bytes=8192),
}
PLAIN = {"COLUMNS": 64, "ROWS": 64}  # of a program where there is no `wgmma`
PLAIN_OPTIONS = {"num_warps": 4, "num_stages": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a product is cut on Hopper.

    Attributes:
        rows: tiles of 128 rows of the matrix in one program.
        columns: tiles of 64 rows of the chunk.
    """

    rows: int = 1
    columns: int = 2

    def __str__(self) -> str:
        return f"{128 * self.rows} x {64 * self.columns}"


# (N, K): measured on an H200, see kernels/README.md; no sum depends on the cut
TUNINGS = {
    (1536, 4096): Tuning(rows=1, columns=1),  # wq_a and wkv in one matrix
    (8192, 1024): Tuning(rows=2, columns=1),  # the indexer's wq_b
    (16384, 1024): Tuning(rows=2, columns=1),  # half of wq_b
    (4096, 4096): Tuning(rows=1, columns=2),  # half of wo_a, half of wo_b
}


def tuning(n: int, k: int) -> Tuning:
    """Return how an [n, k] matrix is cut on Hopper."""
    return TUNINGS.get((n, k), Tuning())


@gluon.jit
def _copy_part(
    words_ptr, x_ptr, T, words_shared, rows_shared, full, empty,
    N: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    i_n = gl.program_id(0) * (128 * R)
    first = gl.program_id(1) * (64 * C)
    # rows past T repeat the last one, and are not stored
    i_rows = gl.minimum(first + gl.arange(0, 64 * C, gl.SliceLayout(1, COPIED_ROWS)), T - 1)
    p_x = row_pointers(x_ptr + i_n // (N // GROUPS) * K, i_rows, GROUPS * K)
    copy(words_of(words_ptr, i_n // 16, K, R, False), p_x, words_shared, rows_shared, full, empty, K // 128, False)


@gluon.jit
def _product_part(
    w_scales_ptr, x_scales_ptr, out_ptr, T, words_shared, rows_shared, full, empty,
    N: gl.constexpr, K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    i_n = gl.program_id(0) * (128 * R) + PART * (64 * R)
    first = gl.program_id(1) * (64 * C)
    o_row = gl.arange(0, 64, ROWS)
    p_s = ()
    for r in gl.static_range(R):
        p_s = p_s + (w_scales_ptr + (i_n + r * 64) // 128 * (K // 128) + o_row * 0,)
    acc = multiply(p_s, p_s, words_shared, rows_shared, full, empty, K // 128, PART, R, C, False)
    for c in gl.static_range(C):
        o_m = first + c * 64 + gl.arange(0, 64, COLUMNS)
        s_x = gl.load(x_scales_ptr + o_m, mask=o_m < T, other=0.0)
        p_out = out_ptr + gl.expand_dims(o_m.to(gl.int64) * N, 0) + gl.expand_dims(i_n + o_row, 1)
        for r in gl.static_range(R):
            b_out = acc[r * C + c] * gl.expand_dims(s_x, 0)
            gl.store(p_out + r * 64, b_out, mask=gl.expand_dims(o_m < T, 0))


@gluon.jit(do_not_specialize=["T"])
def _fp8_chunk_lanes_kernel(
    words_ptr,  # [N · K / 4] int32
    w_scales_ptr,  # [N/128, K/128] float32
    x_ptr,  # [T, G · K] float16
    x_scales_ptr,  # [T] float32
    out_ptr,  # [T, N] float32
    T,  # int, 1 … 4096
    N: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
):
    words_shared, rows_shared, full, empty = ring(R, C, False)
    gl.warp_specialize(
        [
            (
                _product_part,
                (w_scales_ptr, x_scales_ptr, out_ptr, T, words_shared, rows_shared, full, empty, N, K, R, C, FIRST),
            ),
            (
                _product_part,
                (w_scales_ptr, x_scales_ptr, out_ptr, T, words_shared, rows_shared, full, empty, N, K, R, C, SECOND),
            ),
            (_copy_part, (words_ptr, x_ptr, T, words_shared, rows_shared, full, empty, N, K, GROUPS, R, C)),
        ],
        OTHER_WARPS,
        OTHER_REGISTERS,
    )


@triton.jit(do_not_specialize=["T"])
def _fp8_chunk_kernel(
    words_ptr,
    w_scales_ptr,
    x_ptr,
    x_scales_ptr,
    out_ptr,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    o_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i_group = tl.program_id(0) * COLUMNS // (N // GROUPS)
    p_x = x_ptr + tl.minimum(o_m, T - 1).to(tl.int64) * (GROUPS * K) + i_group * K
    acc = fp8_sum(words_ptr, o_n, w_scales_ptr + o_n // 128 * (K // 128), p_x, K)
    s_x = tl.load(x_scales_ptr + o_m, mask=o_m < T, other=0.0)
    p_out = out_ptr + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    tl.store(p_out, acc * s_x[None, :], mask=(o_m < T)[None, :])


def fp8_chunk(rows: ChunkRows, matrix: Fp8Matrix, *, groups: int = 1, out: Tensor | None = None) -> Tensor:
    """Multiply the rows of a chunk by the transposed matrix.

    Args:
        rows: [T, G · K] from `round_chunk`, T from 1 to 4096.
        matrix: [N, K], N a multiple of 128; rows g · N/G … of it meet columns g · K … of `rows`.
        groups: G; N/G must be a multiple of 128.
        out: [1, T, N] float32 destination, for graph capture; allocated when None.

    Returns:
        [1, T, N] float32: one part, as `fp8_rows` gives several.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(rows, matrix, tuning(matrix.n, matrix.k), groups=groups, out=out)


def launch(
    rows: ChunkRows,
    matrix: Fp8Matrix,
    cut: Tuning,
    *,
    groups: int = 1,
    out: Tensor | None = None,
    lanes: bool | None = None,
) -> Tensor:
    """`fp8_chunk` with another cut or form: for benches and tests."""
    n, k, device = matrix.n, matrix.k, matrix.words.device
    count = rows.values.shape[0]
    require_chunk(rows, count, groups * k, device)
    require(k % (2 * BLOCK) == 0 and k > 0, f"K must be a multiple of {2 * BLOCK}", k)
    whole = groups * BLOCK * cut.rows
    require(groups > 0 and n > 0 and n % whole == 0, f"N must be a multiple of {BLOCK * cut.rows} for each group", n)
    require_tensor(matrix.words, "words", (n * k // 4,), torch.int32, device)
    require_tensor(matrix.scales, "matrix scales", (n // BLOCK, k // BLOCK), torch.float32, device)
    if out is None:
        out = torch.empty(1, count, n, dtype=torch.float32, device=device)
    require_tensor(out, "out", (1, count, n), torch.float32, device)
    arguments = (matrix.words, matrix.scales, rows.values, rows.scales, out, count)
    if runs_wgmma(device) if lanes is None else lanes:
        grid = (n // (128 * cut.rows), cdiv(count, 64 * cut.columns))
        _direct.call(
            _fp8_chunk_lanes_kernel, grid, *arguments, **lane_constants(n, k, groups, cut), num_warps=_chunk_lanes.WARPS
        )
    else:
        grid = (n // PLAIN["COLUMNS"], cdiv(count, PLAIN["ROWS"]))
        _direct.call(_fp8_chunk_kernel, grid, *arguments, N=n, K=k, GROUPS=groups, **PLAIN, **PLAIN_OPTIONS)
    return out


def lane_constants(n: int, k: int, groups: int, cut: Tuning) -> dict[str, int]:
    """Return the compile-time arguments of the kernel for Hopper."""
    return {"N": n, "K": k, "GROUPS": groups, "R": cut.rows, "C": cut.columns}
