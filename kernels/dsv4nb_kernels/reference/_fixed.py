"""Exponentials and logarithms that every machine rounds alike (dspark.md 6.2, 6.3).

What a token's choice hangs on is made of additions, multiplications and divisions in float64, each rounded once by the
rules of IEEE 754, and of whole numbers. So two implementations that keep to the order of operations agree in every bit,
whatever their libraries' exp and log do. Masses are whole numbers, whose sums know no order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

ONE = 1 << 46  # the mass of the best token; those of 2^17 tokens fit into an int64
LOWEST = -40.0  # a log-weight whose mass is zero
GRAIN = 2.0**40  # log-weights are rounded to this part of one, which makes their masses ascend with them
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
EXP_TERMS = tuple(1 / math.factorial(n) for n in range(11, -1, -1))  # Taylor's, for |x| <= ln(2) / 2
LOG_TERMS = tuple(1 / n for n in range(17, 1, -2))  # of atanh(s) / s - 1 by s^2, for |s| <= 0.1716
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # of sqrt(0.5) as float64
CHUNK = 1 << 13  # so many float64 stay in a processor's nearest caches
SMALLEST_STEP = 2.0**-32
LARGEST_U = 1 - 2.0**-24


def masses(log_weights: Doubles) -> Whole:
    """Return the share of each token, exp(log-weight) in parts of ONE, rounded; 0 is the log-weight of the best."""
    found = np.empty(log_weights.shape, np.int64)
    for first in range(0, log_weights.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        found[part] = _masses(np.maximum(log_weights[part], LOWEST))
    return found


def _masses(x: Doubles) -> Doubles:
    """`masses`, as float64, of what is not below LOWEST and may be overwritten."""
    np.rint(np.multiply(x, GRAIN, out=x), out=x)
    x *= 1 / GRAIN
    power = np.rint(x * LOG2_E)
    x -= power * LN_2
    total = np.full_like(x, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        total *= x
        total += term
    scale = (power.astype(np.int64) + (1023 + 46)) << 52
    total *= scale.view(np.float64)
    return np.rint(total, out=total)


def reaching(total: int, share: float) -> int:
    """Return the least mass that reaches `share` of `total`, 1 at least."""
    return min(max(math.ceil(share * float(total)), 1), total)


def passing(total: int, share: float) -> int:
    """Return the least mass that is more than `share` of `total`, or all of it."""
    return min(math.floor(share * float(total)) + 1, total)


def times(words: Words) -> Singles:
    """Return the exponential arrival time of each random word: -log1p(-u), rounded to float32."""
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(SMALLEST_STEP), np.float32(LARGEST_U))
    wide = u.astype(np.float64)
    power, rest = _split(1.0 - wide)
    return (-_log(power, np.where(power == 0, -wide, rest))).astype(np.float32)


def scores(log_weights: Doubles, arrived: Singles) -> Singles:
    """Return log-weight - ln(arrival time), each rounded to float32: the token of the largest arrives first."""
    with np.errstate(over="ignore"):  # beyond float32 is far out of reach
        return log_weights.astype(np.float32) - _log(*_split(arrived.astype(np.float64))).astype(np.float32)


def _split(y: Doubles) -> tuple[Whole, Doubles]:
    """k and m - 1 of y = m · 2^k, m from sqrt(0.5) to sqrt(2)."""
    bits = y.view(np.int64)
    power = (bits - SQRT_HALF_BITS) >> 52
    return power, (bits - (power << 52)).view(np.float64) - 1.0


def _log(power: Whole, rest: Doubles) -> Doubles:
    """ln of 2^power · (1 + rest)."""
    s = rest / (rest + 2.0)
    square = s * s
    total = np.full_like(s, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        total *= square
        total += term
    s = s + s
    return power.astype(np.float64) * LN_2 + (s + s * (square * total))
