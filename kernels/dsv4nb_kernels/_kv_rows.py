"""Norm and rounding of the rows that the caches hold."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels._e8m0 import pow2_at_least, pow2_inverse
from dsv4nb_kernels._fp8 import LARGEST, round_e4m3

KV_BLOCK = 64  # elements of a key/value row that share a scale

_PEAK_FLOOR = tl.constexpr(1e-4)  # blocks that are all but zero keep a finite scale


@triton.jit
def inverse_rms(b_x, WIDTH: tl.constexpr, eps):
    """1 / sqrt(mean(x²) + eps) of [WIDTH]."""
    return tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)


@triton.jit
def round_kv(b_x, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Pass [WIDTH] through e4m3 in blocks of 64, but for the last TAIL."""
    b_blocks = tl.reshape(b_x, [WIDTH // 64, 64])
    s_x = pow2_at_least(tl.maximum(tl.max(tl.abs(b_blocks), axis=1), _PEAK_FLOOR) * (1 / LARGEST))
    b_rounded = tl.reshape(round_e4m3(b_blocks * pow2_inverse(s_x)[:, None]) * s_x[:, None], [WIDTH])
    return tl.where(tl.arange(0, WIDTH) < WIDTH - TAIL, b_rounded, b_x)
