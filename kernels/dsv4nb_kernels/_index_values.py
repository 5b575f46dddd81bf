"""The Hadamard rotation and the rounding of index rows, in kernels (model.md 3.5, 4.3)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels._e8m0 import pow2_at_least, pow2_at_most, pow2_inverse

_LARGEST = tl.constexpr(6.0)
_PEAK_FLOOR = tl.constexpr(6.0 * 2.0**-126)
_MAGIC = tl.constexpr(1.5 * 2.0**23)  # added and taken away it leaves whole numbers, ties to even


@triton.jit
def hadamard_signs(WIDTH: tl.constexpr):
    """[WIDTH, WIDTH] of 1 and -1, WIDTH at most 256: the matrix in Sylvester order, times the root of its width."""
    b_common = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    b_common ^= b_common >> 4
    b_common ^= b_common >> 2
    b_common ^= b_common >> 1
    return 1.0 - 2.0 * (b_common & 1).to(tl.float32)


@triton.jit
def round_fp4(b_blocks):
    """Pass the blocks along the last axis of [R, blocks, 32] through e2m1, each with its power of two."""
    b_peak = tl.maximum(tl.max(tl.abs(b_blocks), axis=2), _PEAK_FLOOR)
    s_x = pow2_at_least(b_peak * (1 / _LARGEST))[:, :, None]
    b_x = b_blocks * pow2_inverse(s_x)
    # one mantissa bit: neighbours lie half a binade apart, and below 1 as far as just above it
    b_step = tl.maximum(pow2_at_most(b_x), 1.0) * 0.5
    return ((b_x * pow2_inverse(b_step) + _MAGIC) - _MAGIC) * (b_step * s_x)
