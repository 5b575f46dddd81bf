"""A prompt's chunk times a bfloat16 matrix: compressors, router, index weights. Twin: `reference.bf16_chunk`.

Work       2·T·N·K operations of the tensor cores
Grid       (N / columns, T / rows, S); a program owns a tile of the product and 1/S of K
Equality   a row takes part in no sum of another, and the cut depends on (N, K) alone: a row has the same bits in every
           chunk. They are not those of `bf16_rows`, which adds in another order

The weights are those of `bf16_rows`, in their order: 32 columns of 16 rows lie together.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._dots import dot_bf16
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, cdiv, require, require_few, require_tensor, runs_ptx
from dsv4nb_kernels._turns import take_turn
from dsv4nb_kernels.bf16_rows import Bf16Matrix

LIMITS = Limits(registers=255, shared_bytes=146 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a product is cut; no part of it may depend on the number of rows.

    Attributes:
        rows, columns: of a program's tile of the product.
        depth: of K in one product.
        splits: programs along K; their sums stay apart for the next kernel.
        warps: of one program.
        stages: tiles of K that are there or on their way at a time.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    splits: int = 1
    warps: int = 8
    stages: int = 4

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.columns}x{self.depth}"
        return f"{tile} s{self.splits}, {self.warps} warps, {self.stages} stages"


# (N, K): measured on an H200, see kernels/README.md
TUNINGS = {
    (64, 4096): Tuning(columns=64, warps=4, splits=8),  # weights of the indexer's heads
    (256, 4096): Tuning(splits=4),  # the router's gate
    (512, 4096): Tuning(splits=2, stages=3),  # the indexer's compressor
    (1024, 4096): Tuning(columns=256, splits=2, stages=3),  # the compressor of 128
    (2048, 4096): Tuning(rows=256, stages=3),  # the compressor of 4
}


def tuning(n: int, k: int) -> Tuning:
    """Return how an [n, k] matrix is cut."""
    columns = next(size for size in (128, 64, 32, 16) if n % size == 0)
    return TUNINGS.get((n, k), Tuning(columns=columns, depth=min(64, k)))


@triton.jit(do_not_specialize=["T"])
def _bf16_chunk_kernel(
    x_ptr,  # [T, K] bfloat16
    weights_ptr,  # [N/16, K/32, 16, 32] bfloat16
    out_ptr,  # [S, T, N] float32
    T,  # int, 1 … 4096
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_split = tl.program_id(2)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    o_k = i_split * (K // SPLITS) + tl.arange(0, DEPTH)
    # rows past T repeat the last one and are not stored
    p_x = x_ptr + tl.minimum(o_row, T - 1)[:, None] * K + o_k[None, :]
    p_weights = weights_ptr + (o_n // 16 * (16 * K) + o_n % 16 * 32)[:, None] + (o_k // 32 * 512 + o_k % 32)[None, :]
    take_turn(DEPENDENT, False)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.range(K // SPLITS // DEPTH, num_stages=STAGES):
        b_x = tl.load(p_x + i * DEPTH)
        b_weights = tl.load(p_weights + i * (DEPTH * 16))
        acc = dot_bf16(b_x, tl.trans(b_weights), acc, TENSOR_CORES)
    p_out = out_ptr + (i_split * T + o_row)[:, None] * N + o_n[None, :]
    tl.store(p_out, acc, mask=(o_row < T)[:, None])


def bf16_chunk(x: Tensor, matrix: Bf16Matrix, *, out: Tensor | None = None, dependent: bool = False) -> Tensor:
    """Multiply rows by the transposed matrix; the result is the sum of the returned splits, from left to right.

    Args:
        x: [T, K] bfloat16, T from 1 to 4096.
        matrix: [N, K], as `bf16_rows.pack` leaves it.
        out: [S, T, N] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `x` has ended, and wait for it inside.

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
    tensor_cores: bool | None = None,
) -> Tensor:
    """`bf16_chunk` with another cut or form: for benches and tests."""
    n, k, device = matrix.n, matrix.k, matrix.words.device
    require(x.ndim == 2 and 1 <= x.shape[0] <= CHUNK_ROWS_MAX, f"x must be 1 to {CHUNK_ROWS_MAX} rows", tuple(x.shape))
    count = x.shape[0]
    require(n % cut.columns == 0, f"N must be a multiple of {cut.columns}", n)
    whole = cut.depth * cut.splits
    require(cut.depth % 32 == 0 and k % whole == 0, f"K must be a multiple of {whole}", k)
    require_tensor(x, "x", (count, k), torch.bfloat16, device)
    require_tensor(matrix.words, "words", (n * k // 2,), torch.int32)
    if out is None:
        out = torch.empty(cut.splits, count, n, dtype=torch.float32, device=device)
    require_tensor(out, "out", (cut.splits, count, n), torch.float32, device)
    require_few(out.numel(), "out")
    is_ptx = runs_ptx(device)
    by_cores = is_ptx if tensor_cores is None else tensor_cores
    _direct.call(
        _bf16_chunk_kernel, (n // cut.columns, cdiv(count, cut.rows), cut.splits),
        x, matrix.words.view(torch.bfloat16), out, count,
        **constants(n, k, cut, dependent and is_ptx, by_cores),
        **({"num_warps": cut.warps, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def constants(n: int, k: int, cut: Tuning, dependent: bool = True, tensor_cores: bool = True) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "N": n,
        "K": k,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "DEPTH": cut.depth,
        "SPLITS": cut.splits,
        "STAGES": cut.stages,
        "TENSOR_CORES": tensor_cores,
        "DEPENDENT": dependent,
    }
