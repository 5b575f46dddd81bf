"""Exponentials and logarithms that every machine rounds alike: the operations of `reference._fixed`, in their order.

A kernel that calls these must be compiled without fused multiply-adds (`EXACT`), which round once where two roundings
are meant.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels.reference import _fixed

EXACT = {"enable_fp_fusion": False}

_GRAIN, _PART = tl.constexpr(_fixed.GRAIN), tl.constexpr(1 / _fixed.GRAIN)
_LOWEST = tl.constexpr(_fixed.LOWEST)
_LOG2_E, _LN_2 = tl.constexpr(_fixed.LOG2_E), tl.constexpr(_fixed.LN_2)
_EXP_TERMS, _LOG_TERMS = tl.constexpr(_fixed.EXP_TERMS), tl.constexpr(_fixed.LOG_TERMS)
_EXP_COUNT, _LOG_COUNT = tl.constexpr(len(_fixed.EXP_TERMS)), tl.constexpr(len(_fixed.LOG_TERMS))
_SQRT_HALF_BITS = tl.constexpr(_fixed.SQRT_HALF_BITS)
_SMALLEST_STEP, _LARGEST_U = tl.constexpr(_fixed.SMALLEST_STEP), tl.constexpr(_fixed.LARGEST_U)
_WHOLE = tl.constexpr(1.5 * 2.0**52)  # float64 of this size have no fraction, and are rounded to even
_BIAS = tl.constexpr(1023 + 46)


@triton.jit
def _rounded(b_x):
    return (b_x + _WHOLE) - _WHOLE


@triton.jit
def masses(b_log_weight):
    """int64, exp(log-weight) in parts of 2^46."""
    b_x = tl.maximum(b_log_weight, _LOWEST)
    b_x = _rounded(b_x * _GRAIN) * _PART
    b_power = _rounded(b_x * _LOG2_E)
    b_x = b_x - b_power * _LN_2
    b_total = b_x * 0.0 + _EXP_TERMS[0]
    for i in tl.static_range(1, _EXP_COUNT):
        b_total = b_total * b_x + _EXP_TERMS[i]
    b_scale = ((b_power.to(tl.int64) + _BIAS) << 52).to(tl.float64, bitcast=True)
    return _rounded(b_total * b_scale).to(tl.int64)


@triton.jit
def reaching(total, share):
    """int64, the least mass that reaches a share below 1 of the total, 1 at least."""
    product = share * total.to(tl.float64)
    least = product.to(tl.int64)  # towards zero
    least += (least.to(tl.float64) < product).to(tl.int64)
    return tl.minimum(tl.maximum(least, 1), total)


@triton.jit
def times(b_word):
    """float32, the exponential arrival time of a random uint32."""
    b_u = tl.minimum((b_word.to(tl.float32) + 0.5) * _SMALLEST_STEP, _LARGEST_U).to(tl.float64)
    b_power, b_rest = _split(1.0 - b_u)
    return (0.0 - _log(b_power, tl.where(b_power == 0, 0.0 - b_u, b_rest))).to(tl.float32)


@triton.jit
def scores(b_log_weight, b_time):
    """float32, log-weight - ln(arrival time)."""
    b_power, b_rest = _split(b_time.to(tl.float64))
    return b_log_weight.to(tl.float32) - _log(b_power, b_rest).to(tl.float32)


@triton.jit
def _split(b_y):
    b_bits = b_y.to(tl.int64, bitcast=True)
    b_power = (b_bits - _SQRT_HALF_BITS) >> 52
    return b_power, (b_bits - (b_power << 52)).to(tl.float64, bitcast=True) - 1.0


@triton.jit
def _log(b_power, b_rest):
    b_s = b_rest / (b_rest + 2.0)
    b_square = b_s * b_s
    b_total = b_square * 0.0 + _LOG_TERMS[0]
    for i in tl.static_range(1, _LOG_COUNT):
        b_total = b_total * b_square + _LOG_TERMS[i]
    b_s = b_s + b_s
    return b_power.to(tl.float64) * _LN_2 + (b_s + b_s * (b_square * b_total))
