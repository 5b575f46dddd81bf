"""Sinkhorn's balancing of a 4x4, in scalars: every thread does all of it, and nothing is exchanged (model.md 3.1)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    inverse = 1.0 / ((a + b) + (c + d))
    return (a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps)


@triton.jit
def _shares(a, b, c, d, eps):
    inverse = 1.0 / ((a + b) + (c + d) + eps)
    return (a * inverse, b * inverse, c * inverse, d * inverse)


@triton.jit
def _balance_rows(c, eps):
    return (
        _shares(c[0], c[1], c[2], c[3], eps)
        + _shares(c[4], c[5], c[6], c[7], eps)
        + _shares(c[8], c[9], c[10], c[11], eps)
        + _shares(c[12], c[13], c[14], c[15], eps)
    )


@triton.jit
def _turned(c):
    """A 4x4 of scalars, rows for columns."""
    left = (c[0], c[4], c[8], c[12], c[1], c[5], c[9], c[13])
    return left + (c[2], c[6], c[10], c[14], c[3], c[7], c[11], c[15])


@triton.jit
def balance(c, eps, ITERATIONS: tl.constexpr):
    """Softmax over rows, then passes over columns with passes over rows between them: 16 scalars."""
    c = (
        _softmax(c[0], c[1], c[2], c[3], eps)
        + _softmax(c[4], c[5], c[6], c[7], eps)
        + _softmax(c[8], c[9], c[10], c[11], eps)
        + _softmax(c[12], c[13], c[14], c[15], eps)
    )
    c = _turned(_balance_rows(_turned(c), eps))
    for _ in range(ITERATIONS - 1):
        c = _turned(_balance_rows(_turned(_balance_rows(c, eps)), eps))
    return c
