"""Queries of the indexer: rotated, and in the rounded contract Hadamard and e2m1. Twin: `reference.index_rows`.

Traffic    reads the parts of a product and writes its rows once: latency-bound
Grid       (Hi / 16, T); of a chunk a program takes sixteen rows, one after the other
Equality   no program sees two rows: row i of a step or a chunk is bitwise the row alone

The signs of the Hadamard matrix are made before the kernel waits, and multiplied by the tensor cores: products with 1
and -1 are exact. Keys take the same way at the end of `compress`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._dots import dot_bf16
from dsv4nb_kernels._index_values import hadamard_signs, round_fp4
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, ROWS_MAX, Limits, cdiv, require, require_tensor, runs_ptx
from dsv4nb_kernels._rotary import angles_of, require_angles, turn_tails
from dsv4nb_kernels._rounded_rows import round_bf16
from dsv4nb_kernels._turns import take_turn

HEADS = 16  # of one program
CHUNK_ROWS = 16  # rows of a chunk in one program: making the signs is most of the work of a row alone
WARPS = 4
EAGER = True
LIMITS = Limits(registers=80, shared_bytes=54 * 1024)


@triton.jit(do_not_specialize=["T"])
def _index_rows_kernel(
    product_ptr,  # [S, T, Hi · d] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    out_ptr,  # [T, Hi, d] bfloat16
    T,  # int, 1 … 4096
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    FP4: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    first = tl.program_id(1) * ROWS
    o_head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    if FP4:
        b_signs = hadamard_signs(WIDTH).to(tl.bfloat16)
    take_turn(DEPENDENT, EAGER)
    # a loop of one turn, known to be so, is none
    for turn in range(1 if ROWS == 1 else tl.minimum(ROWS, T - first)):
        i_row = first + turn
        o_x = (i_row * H + o_head[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]
        b_x = tl.load(product_ptr + o_x)
        for i in tl.static_range(1, SPLITS):
            b_x += tl.load(product_ptr + i * T * (H * WIDTH) + o_x)
        b_cos, b_sin = angles_of(cos_ptr + i_row * TAIL, sin_ptr + i_row * TAIL, WIDTH, TAIL)
        b_x = round_bf16(turn_tails(round_bf16(b_x), b_cos, b_sin, HEADS, WIDTH, TAIL))
        if FP4:
            b_sum = dot_bf16(b_x.to(tl.bfloat16), b_signs, tl.zeros([HEADS, WIDTH], tl.float32), TENSOR_CORES)
            b_x = round_bf16(b_sum * (WIDTH**-0.5))
            b_x = tl.reshape(round_fp4(tl.reshape(b_x, [HEADS, WIDTH // 32, 32])), [HEADS, WIDTH])
        tl.store(out_ptr + o_x, b_x.to(tl.bfloat16))


def index_rows(
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    index_fp4: bool,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Make the rows whose products with the index keys are the scores.

    Args:
        product: [S, T, Hi · d] float32, T from 1 to 4096: parts, added from left to right; d is 64, 128 or 256.
        cos, sin: [T, rd] float32: each angle stands twice, the sine of an even element is negated.
        heads: Hi, a multiple of 16.
        index_fp4: rotate by the Hadamard matrix and round to e2m1 in blocks of 32. The matrix is orthogonal, so without
            the rounding it is left out.
        out: [T, Hi, d] bfloat16 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `product` has ended, and wait for it inside.

    Returns:
        [T, Hi, d] bfloat16.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(product.ndim == 3 and product.shape[0] > 0, "product must be [S, T, N]", tuple(product.shape))
    splits, rows, line = product.shape
    device = product.device
    require(1 <= rows <= CHUNK_ROWS_MAX, f"product must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require(heads > 0 and heads % HEADS == 0, f"heads must be a multiple of {HEADS}", heads)
    width = line // heads
    require(line % heads == 0 and width in (64, 128, 256), "a head must be 64, 128 or 256 wide", (line, heads))
    require_tensor(product, "product", (splits, rows, line), torch.float32)
    tail = require_angles(cos, sin, rows, width, device)
    if out is None:
        out = torch.empty(rows, heads, width, dtype=torch.bfloat16, device=device)
    require_tensor(out, "out", (rows, heads, width), torch.bfloat16, device)
    is_ptx = runs_ptx(device)
    together = 1 if rows <= ROWS_MAX else CHUNK_ROWS
    _direct.call(
        _index_rows_kernel, (heads // HEADS, cdiv(rows, together)),
        product, cos, sin, out, rows,
        **constants(heads, width, tail, splits, index_fp4, together, dependent and is_ptx, is_ptx),
        **({"num_warps": WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def constants(
    heads: int,
    width: int,
    tail: int,
    splits: int,
    index_fp4: bool,
    together: int = 1,
    dependent: bool = True,
    tensor_cores: bool = True,
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments; `together` rows in one program."""
    return {
        "H": heads,
        "WIDTH": width,
        "TAIL": tail,
        "HEADS": HEADS,
        "SPLITS": splits,
        "ROWS": together,
        "FP4": index_fp4,
        "TENSOR_CORES": tensor_cores,
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }
