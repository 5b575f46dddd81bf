"""Norm of the rows that the caches hold."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_rms(b_x, WIDTH: tl.constexpr, eps):
    """1 / sqrt(mean(x²) + eps) of [WIDTH]."""
    return tl.rsqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)
