"""Rotation of the interleaved pairs at the end of a row, in kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels._launch import require, require_tensor


@triton.jit
def angles_of(p_cos, p_sin, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Ask for the angles of a row of WIDTH, to be taken with everything else: behind a sum they would come later."""
    o_d = tl.arange(0, WIDTH)
    m_tail = o_d >= WIDTH - TAIL
    b_cos = tl.load(p_cos + o_d - (WIDTH - TAIL), mask=m_tail, other=1.0)
    b_sin = tl.load(p_sin + o_d - (WIDTH - TAIL), mask=m_tail, other=0.0)
    return b_cos, b_sin


@triton.jit
def turn_tail(b_x, b_cos, b_sin, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Rotate the last TAIL of [WIDTH]; the angles stand twice, the sine of an even element is negated."""
    b_left, b_right = tl.split(tl.reshape(b_x, [WIDTH // 2, 2]))
    b_crossed = tl.reshape(tl.join(b_right, b_left), [WIDTH])
    return tl.where(tl.arange(0, WIDTH) >= WIDTH - TAIL, b_x * b_cos + b_crossed * b_sin, b_x)


@triton.jit
def turn_tails(b_x, b_cos, b_sin, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Rotate the last TAIL of each row of [ROWS, WIDTH], all by the same angles; as `turn_tail`."""
    b_left, b_right = tl.split(tl.reshape(b_x, [ROWS, WIDTH // 2, 2]))
    b_crossed = tl.reshape(tl.join(b_right, b_left), [ROWS, WIDTH])
    m_tail = tl.arange(0, WIDTH)[None, :] >= WIDTH - TAIL
    return tl.where(m_tail, b_x * b_cos[None, :] + b_crossed * b_sin[None, :], b_x)


def require_angles(cos: Tensor, sin: Tensor, rows: int, width: int, device: torch.device) -> int:
    """Refuse angles that are not of `rows` rows of `width` elements; return how many elements they turn.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(cos.ndim == 2, "cos must be [T, rd]", tuple(cos.shape))
    tail = cos.shape[1]
    require(0 < tail <= width and tail % 2 == 0, f"cos must have an even number of angles, at most {width}", tail)
    require_tensor(cos, "cos", (rows, tail), torch.float32, device)
    require_tensor(sin, "sin", (rows, tail), torch.float32, device)
    return tail
