"""A bound that few enough keys of a block reach, in few counts: four bounds are counted at a time."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-0x7FFFFFFF)  # every key of a number reaches it, and NEVER does not


@triton.jit
def reached(b_key, t1, t2, t3, t4):
    """How many of fewer than 2^15 keys reach each of four bounds, int64 each: 16 bits each of one sum."""
    b_low = (b_key >= t1.to(tl.int32)).to(tl.int32) + ((b_key >= t2.to(tl.int32)).to(tl.int32) << 16)
    b_high = (b_key >= t3.to(tl.int32)).to(tl.int32) + ((b_key >= t4.to(tl.int32)).to(tl.int32) << 16)
    packed = tl.sum(b_low.to(tl.int64) | (b_high.to(tl.int64) << 32), axis=0)
    return packed & 0xFFFF, (packed >> 16) & 0xFFFF, (packed >> 32) & 0xFFFF, packed >> 48


@triton.jit
def fifth(low, high):
    """How far the four bounds between two stand apart."""
    return tl.maximum(((high - low) * 13) >> 6, 1)


@triton.jit
def between(low, high, count, step, c1, c2, c3, c4, K: tl.constexpr):
    """The narrower pair of bounds by what reaches those between them, and what reaches the lower one."""
    n = (c1 >= K).to(tl.int64) + (c2 >= K).to(tl.int64) + (c3 >= K).to(tl.int64) + (c4 >= K).to(tl.int64)
    c12 = tl.where(n == 1, c1, c2)
    c34 = tl.where(n == 3, c3, c4)
    count = tl.where(n == 0, count, tl.where(n <= 2, c12, c34))
    high = tl.where(n == 4, high, tl.minimum(low + (n + 1) * step, high))
    return low + n * step, high, count


@triton.jit
def narrow(b_key, low, high, count, KEPT: tl.constexpr, K: tl.constexpr):
    """The bound from `low` on that K to KEPT keys reach, else the K-th largest key; and how many reach it.

    `low`, `high`, `count`: int64; `count` keys reach `low`, at least K or nothing is to do; fewer reach `high`.
    """
    while (count > KEPT) & (high - low > 1):
        step = fifth(low, high)
        # bounds that are no longer between the two are the upper one, which too few reach
        t2 = tl.minimum(low + 2 * step, high)
        t3 = tl.minimum(low + 3 * step, high)
        t4 = tl.minimum(low + 4 * step, high)
        c1, c2, c3, c4 = reached(b_key, low + step, t2, t3, t4)
        low, high, count = between(low, high, count, step, c1, c2, c3, c4, K)
    return low, count


@triton.jit
def find(b_key, KEPT: tl.constexpr, K: tl.constexpr):
    """A number that K to KEPT keys reach, else the K-th largest key, else one below all; and how many reach it: int64.

    First an eighth of an octave below the largest key, a half, two octaves and eight; then between two of these.
    """
    lowest = tl.full((), FLOOR, tl.int64)
    top = tl.max(b_key, axis=0).to(tl.int64)
    t4 = tl.maximum(top - (1 << 20), lowest)
    t3 = tl.maximum(top - (1 << 22), lowest)
    t2 = tl.maximum(top - (1 << 24), lowest)
    t1 = tl.maximum(top - (1 << 26), lowest)
    c1, c2, c3, c4 = reached(b_key, t1, t2, t3, t4)
    high = tl.where(c4 >= K, top + 1, tl.where(c3 >= K, t4, tl.where(c2 >= K, t3, tl.where(c1 >= K, t2, t1))))
    low = tl.where(c4 >= K, t4, tl.where(c3 >= K, t3, tl.where(c2 >= K, t2, tl.where(c1 >= K, t1, lowest))))
    count = tl.where(c4 >= K, c4, tl.where(c3 >= K, c3, tl.where(c2 >= K, c2, c1)))
    if c1 < K:
        count = tl.sum((b_key >= FLOOR).to(tl.int32), axis=0).to(tl.int64)
    return narrow(b_key, low, high, count, KEPT, K)


@triton.jit
def take(b_key, bound, count, KEPT: tl.constexpr, K: tl.constexpr):
    """int32, 1 for each key that reaches the bound, of too many equal ones for the first; and how many there are."""
    b_taken = (b_key >= bound.to(tl.int32)).to(tl.int32)
    count = count.to(tl.int32)
    if count > KEPT:
        b_equal = (b_key == bound.to(tl.int32)).to(tl.int32)
        b_above = (b_key > bound.to(tl.int32)).to(tl.int32)
        m_first = (b_equal > 0) & (tl.cumsum(b_equal, axis=0) <= K - tl.sum(b_above, axis=0))
        b_taken = b_above | m_first.to(tl.int32)
        count = K
    return b_taken, count
