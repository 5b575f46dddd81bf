"""Products of bfloat16 tiles by the tensor cores, and their equal where there are none."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 16  # of a product with a step's rows on the right: what the tensor cores take at least


@triton.jit
def dot_bf16(b_left, b_right, acc, TENSOR_CORES: tl.constexpr):
    """acc + left · right, accumulated in float32; the interpreter multiplies no bfloat16."""
    if TENSOR_CORES:
        return tl.dot(b_left, b_right, acc)
    else:
        return tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def dot_float(b_left, b_right, acc, TENSOR_CORES: tl.constexpr):
    """acc + left · right with float32 on the left, of which 16 bits take part, and bfloat16 on the right."""
    if TENSOR_CORES:
        b_high = b_left.to(tl.bfloat16)
        acc = tl.dot((b_left - b_high.to(tl.float32)).to(tl.bfloat16), b_right, acc)
        return tl.dot(b_high, b_right, acc)
    else:
        return tl.dot(b_left, b_right.to(tl.float32), acc, input_precision="ieee")
