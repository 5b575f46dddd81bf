"""Where the sorted list of a row ends, by number of tokens and by mass: counts over the bits of how far one is behind.

A filter keeps the beginning of a list sorted by logit and id, so it is a border: how far the last token's key is behind
the best one's, 32 bits, and how many of those at this distance are kept, the lowest ids first. Three launches find it,
each by a histogram over 11 bits of the distance among the tokens that agree in the bits above. The next launch looks up
in which bin the border lies. Numbers and masses are whole, so no order of additions matters.

Most tokens meet in a few bins of the first launch, and an address takes one addition at a time: there the tokens are
spread over 16 copies of the histogram, and a launch of its own adds the copies up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels import _fixed
from dsv4nb_kernels._best import NOTHING
from dsv4nb_kernels._order import ordered
from dsv4nb_kernels._turns import take_turn

BINS = 2048
LEVELS = 3  # of a search
BITS = (11, 11, 10)
COPIES = 16  # of the first histogram of a search
FOLDED = 128  # bins of a program that adds them up
STEPS = 2 * LEVELS  # by number, then by mass
STATE = 8  # int64 of each step: prefix, above, wanted; distance and kept of the border by number

_BINS, _COPIES, _FOLDED = tl.constexpr(BINS), tl.constexpr(COPIES), tl.constexpr(FOLDED)
_LEVELS = tl.constexpr(LEVELS)
_STATE = tl.constexpr(STATE)
_STEPS = tl.constexpr(STEPS)
_FAR = tl.constexpr(1 << 33)  # behind every token


@triton.constexpr_function
def _width(step):
    return BITS[step % LEVELS]


@triton.constexpr_function
def _shift(step):
    return sum(BITS[step % LEVELS + 1 :])


@triton.constexpr_function
def _begins(step):
    return step % LEVELS == 0


@triton.constexpr_function
def _ends(step):
    return step % LEVELS == LEVELS - 1


@triton.constexpr_function
def _first(by_number):
    return 0 if by_number else LEVELS


@triton.jit
def best_key(best_ptr, BLOCKS: tl.constexpr, BLOCK_BLOCKS: tl.constexpr):
    """The key of the best of a row, by the candidates of its blocks."""
    o_block = tl.arange(0, BLOCK_BLOCKS)
    best = tl.max(tl.load(best_ptr + o_block, mask=o_block < BLOCKS, other=NOTHING), axis=0)
    return (best >> 32).to(tl.int32)


@triton.jit
def key_value(b_key):
    """The number of a key of `ordered`."""
    return tl.where(b_key < 0, b_key ^ 0x7FFFFFFF, b_key).to(tl.float32, bitcast=True)


@triton.jit
def log_weights(b_x, top_key, temperature):
    """float64, (logit - best) / temperature."""
    return (b_x.to(tl.float64) - key_value(top_key).to(tl.float64)) / temperature


@triton.jit
def distances(b_x, top_key):
    """int64, how many float32 lie between a logit and the best."""
    return top_key.to(tl.int64) - ordered(b_x).to(tl.int64)


@triton.jit
def _mass_at(distance, top_key, temperature):
    b_key = (top_key.to(tl.int64) - distance).to(tl.int32)
    return _fixed.masses(log_weights(key_value(b_key), top_key, temperature))


@triton.jit
def state_before(p_state, p_bins, STEP: tl.constexpr, BY_NUMBER: tl.constexpr, top_key, temperature, top_k, top_p):
    """What is known when launch STEP of a row begins, its launch before having counted.

    Args:
        p_state, p_bins: the row's.
        STEP: 0 to 2 by number, 3 to 5 by mass, 6 when all is counted.
        BY_NUMBER: whether steps 0 to 2 took place.

    Returns:
        prefix, above, wanted, distance, kept: of the search under way, the bits of the border's distance that are
        known, what is nearer than they, what the search wants; and the border of what was found so far.
    """
    prefix = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    wanted = tl.full((), 0, tl.int64)
    distance = tl.full((), _FAR, tl.int64)
    kept = tl.full((), 0, tl.int64)
    FIRST: tl.constexpr = _first(BY_NUMBER)
    if STEP > FIRST:
        LAST: tl.constexpr = STEP - 1
        if LAST > FIRST:
            p_old = p_state + LAST * _STATE
            prefix = tl.load(p_old)
            above = tl.load(p_old + 1)
            wanted = tl.load(p_old + 2)
            distance = tl.load(p_old + 3)
            kept = tl.load(p_old + 4)
        o_bin = tl.arange(0, _BINS)
        b_bin = tl.load(p_bins + LAST * _BINS + o_bin)
        if LAST == 0:
            wanted = tl.sum(b_bin, axis=0)
            wanted = tl.where(top_k > 0, tl.minimum(wanted, top_k), wanted)
        is_open = tl.full((), True, tl.int1)
        if LAST == _LEVELS:
            # masses: those at the border by number take part as far as it keeps them
            counted = tl.sum(b_bin, axis=0)
            whole = counted
            if BY_NUMBER:
                each = _mass_at(distance, top_key, temperature)
                whole += kept * each
            wanted = _fixed.reaching(whole, top_p)
            is_open = (top_p < 1.0) & (wanted <= counted)
            if BY_NUMBER:
                # the mass is reached among those at the border, or top-p is off
                enough = (wanted - counted + each - 1) // tl.maximum(each, 1)
                kept = tl.where((top_p < 1.0) & (wanted > counted), enough, kept)
        b_sum = above + tl.cumsum(b_bin, axis=0)
        m_short = b_sum < wanted
        digit = tl.sum(m_short.to(tl.int64), axis=0)
        above = tl.max(tl.where(m_short, b_sum, above), axis=0)
        WIDTH: tl.constexpr = _width(LAST)
        prefix = tl.where((prefix >= 0) & is_open, (prefix << WIDTH) | digit, -1)
        if _ends(LAST):
            is_found = prefix >= 0
            if LAST < _LEVELS:
                distance = prefix
                kept = wanted - above
            else:
                each = tl.maximum(_mass_at(tl.where(is_found, prefix, 0), top_key, temperature), 1)
                kept = tl.where(is_found, (wanted - above + each - 1) // each, kept)
                distance = tl.where(is_found, prefix, distance)
            prefix = tl.full((), 0, tl.int64)
            above = tl.full((), 0, tl.int64)
            wanted = tl.full((), 0, tl.int64)
    return prefix, above, wanted, distance, kept


@triton.jit
def keep_state(p_state, STEP: tl.constexpr, prefix, above, wanted, distance, kept):
    """Leave what is known for the launches to come."""
    p_new = p_state + STEP * _STATE
    tl.store(p_new, prefix)
    tl.store(p_new + 1, above)
    tl.store(p_new + 2, wanted)
    tl.store(p_new + 3, distance)
    tl.store(p_new + 4, kept)


@triton.jit
def search_kernel(
    row_ptr,  # [T, V] float32
    best_ptr,  # [T, B] int64
    numbers_ptr,  # [T, NUMBERS] float64
    whole_ptr,  # [T, WHOLE] int64
    state_ptr,  # [T, STEPS + 1, STATE] int64
    bins_ptr,  # [T, STEPS, BINS] int64, zero
    copies_ptr,  # [T, 2, BINS, COPIES] int64, zero
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    NUMBERS: tl.constexpr,
    WHOLE: tl.constexpr,
    STEP: tl.constexpr,
    BY_NUMBER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_block = tl.program_id(1)
    o_v = i_block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(numbers_ptr + i_row * NUMBERS)
    top_p = tl.load(numbers_ptr + i_row * NUMBERS + 1)
    top_k = tl.load(whole_ptr + i_row * WHOLE)
    take_turn(DEPENDENT, False)
    p_state = state_ptr + i_row * ((_STEPS + 1) * _STATE)
    p_bins = bins_ptr + i_row * (_STEPS * _BINS)
    top_key = best_key(best_ptr + i_row * BLOCKS, BLOCKS, BLOCK_BLOCKS)
    prefix, above, wanted, distance, kept = state_before(
        p_state, p_bins, STEP, BY_NUMBER, top_key, temperature, top_k, top_p
    )
    if i_block == 0:
        keep_state(p_state, STEP, prefix, above, wanted, distance, kept)
    b_x = tl.load(row_ptr + i_row * V + o_v, mask=o_v < V, other=float("-inf"))
    b_distance = distances(b_x, top_key)
    WIDTH: tl.constexpr = _width(STEP)
    SHIFT: tl.constexpr = _shift(STEP)
    m_counts = (b_x > float("-inf")) & ((b_distance >> (SHIFT + WIDTH)) == prefix)
    if STEP < _LEVELS:
        b_add = tl.full([BLOCK], 1, tl.int64)
    else:
        b_add = _fixed.masses(log_weights(b_x, top_key, temperature))
        m_counts = m_counts & (b_distance < distance) & (b_add > 0)
    b_digit = (b_distance >> SHIFT) & ((1 << WIDTH) - 1)
    b_digit = tl.where(m_counts, b_digit, 0)
    if _begins(STEP):
        p_add = copies_ptr + ((i_row * 2 + STEP // _LEVELS) * _BINS + b_digit) * _COPIES + o_v % _COPIES
    else:
        p_add = p_bins + STEP * _BINS + b_digit
    tl.atomic_add(p_add, b_add, mask=m_counts, sem="relaxed")


@triton.jit
def fold_kernel(
    copies_ptr,  # [T, 2, BINS, COPIES] int64
    bins_ptr,  # [T, STEPS, BINS] int64
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_bin = tl.program_id(1) * _FOLDED + tl.arange(0, _FOLDED)
    o_copy = tl.arange(0, _COPIES)
    take_turn(DEPENDENT, False)
    p_copies = copies_ptr + ((i_row * 2 + STEP // _LEVELS) * _BINS + o_bin[:, None]) * _COPIES + o_copy[None, :]
    tl.store(bins_ptr + (i_row * _STEPS + STEP) * _BINS + o_bin, tl.sum(tl.load(p_copies), axis=1))
