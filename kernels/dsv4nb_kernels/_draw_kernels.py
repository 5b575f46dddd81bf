"""The launches of a draw but the search: bias and penalties, ties at a border, the race, and its end; see `draw`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels import _fixed
from dsv4nb_kernels._best import NOTHING, candidate_id, candidate_value, candidates
from dsv4nb_kernels._search import best_key, distances, keep_state, log_weights, state_before
from dsv4nb_kernels._turns import take_turn


@triton.jit
def process_kernel(
    logits_ptr,  # [T, V] float32
    bias_ptr,  # [T, V] float64
    counts_ptr,  # [T, V] int32
    numbers_ptr,  # [T, NUMBERS] float64
    row_ptr,  # [T, V] float32
    best_ptr,  # [T, B] int64
    sums_ptr,  # [T, B, 2] float32
    bins_ptr,  # [T, ALL_BINS] int64
    copies_ptr,  # [T, ALL_COPIES] int64
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUMBERS: tl.constexpr,
    BIASED: tl.constexpr,
    PENALISED: tl.constexpr,
    ALL_BINS: tl.constexpr,
    CLEARED: tl.constexpr,
    ALL_COPIES: tl.constexpr,
    COPIES_CLEARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_block = tl.program_id(1)
    i_part = i_row * BLOCKS + i_block
    o_v = i_block * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < V
    take_turn(DEPENDENT, False)
    b_x = tl.load(logits_ptr + i_row * V + o_v, mask=m_v, other=float("-inf"))
    top = tl.max(b_x, axis=0)
    tl.store(sums_ptr + i_part * 2, top)
    tl.store(sums_ptr + i_part * 2 + 1, tl.sum(tl.exp(b_x - tl.where(top == float("-inf"), 0.0, top)), axis=0))
    if BIASED:
        b_x = (b_x.to(tl.float64) + tl.load(bias_ptr + i_row * V + o_v, mask=m_v, other=0.0)).to(tl.float32)
    if PENALISED:
        p_numbers = numbers_ptr + i_row * NUMBERS
        repetition = tl.load(p_numbers + 3)
        b_count = tl.load(counts_ptr + i_row * V + o_v, mask=m_v, other=0)
        b_wide = b_x.to(tl.float64)
        b_wide = tl.where(b_wide > 0, b_wide / repetition, b_wide * repetition)
        b_wide = b_wide - tl.load(p_numbers + 4) * b_count.to(tl.float64)
        b_wide = b_wide - tl.load(p_numbers + 5)
        b_x = tl.where(b_count > 0, b_wide.to(tl.float32), b_x)
    if BIASED or PENALISED:
        tl.store(row_ptr + i_row * V + o_v, b_x, mask=m_v)
    tl.store(best_ptr + i_part, tl.max(tl.where(m_v, candidates(b_x, o_v), NOTHING), axis=0))
    if ALL_BINS > 0:
        o_bin = i_block * CLEARED + tl.arange(0, CLEARED)
        tl.store(bins_ptr + i_row * ALL_BINS + o_bin, tl.zeros([CLEARED], tl.int64), mask=o_bin < ALL_BINS)
        o_copy = i_block * COPIES_CLEARED + tl.arange(0, COPIES_CLEARED)
        p_copy = copies_ptr + i_row * ALL_COPIES + o_copy
        tl.store(p_copy, tl.zeros([COPIES_CLEARED], tl.int64), mask=o_copy < ALL_COPIES)


@triton.jit
def ties_kernel(
    row_ptr,  # [T, V] float32
    best_ptr,  # [T, B] int64
    numbers_ptr,  # [T, NUMBERS] float64
    whole_ptr,  # [T, WHOLE] int64
    state_ptr,  # [T, STEPS + 1, STATE] int64
    bins_ptr,  # [T, STEPS, BINS] int64
    ties_ptr,  # [T, B] int32
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    NUMBERS: tl.constexpr,
    WHOLE: tl.constexpr,
    STATES: tl.constexpr,
    ALL_BINS: tl.constexpr,
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
    p_state = state_ptr + i_row * STATES
    top_key = best_key(best_ptr + i_row * BLOCKS, BLOCKS, BLOCK_BLOCKS)
    prefix, above, wanted, distance, kept = state_before(
        p_state, bins_ptr + i_row * ALL_BINS, STEP, BY_NUMBER, top_key, temperature, top_k, top_p
    )
    if i_block == 0:
        keep_state(p_state, STEP, prefix, above, wanted, distance, kept)
    b_x = tl.load(row_ptr + i_row * V + o_v, mask=o_v < V, other=float("-inf"))
    m_tie = (b_x > float("-inf")) & (distances(b_x, top_key) == distance)
    tl.store(ties_ptr + i_row * BLOCKS + i_block, tl.sum(m_tie.to(tl.int32), axis=0))


@triton.jit
def _random_words(o_v, seed, position, stream):
    b_block = (o_v >> 2).to(tl.uint32)
    b_zero = b_block & 0
    b_0, b_1, b_2, b_3 = tl.philox(
        seed, b_zero + position.to(tl.uint32), b_block, b_zero + stream.to(tl.uint32), b_zero
    )
    b_place = o_v & 3
    return tl.where(b_place < 2, tl.where(b_place == 0, b_0, b_1), tl.where(b_place == 2, b_2, b_3))


@triton.jit
def race_kernel(
    row_ptr,  # [T, V] float32
    best_ptr,  # [T, B] int64
    numbers_ptr,  # [T, NUMBERS] float64
    whole_ptr,  # [T, WHOLE] int64
    state_ptr,  # [T, STEPS + 1, STATE] int64
    ties_ptr,  # [T, B] int32
    raced_ptr,  # [T, B] int64
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    NUMBERS: tl.constexpr,
    WHOLE: tl.constexpr,
    STATES: tl.constexpr,
    BORDER: tl.constexpr,  # where the border stands in the state, 0 without a search
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_block = tl.program_id(1)
    o_v = i_block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(numbers_ptr + i_row * NUMBERS)
    low = tl.load(numbers_ptr + i_row * NUMBERS + 2)
    p_whole = whole_ptr + i_row * WHOLE
    b_word = _random_words(o_v, tl.load(p_whole + 1), tl.load(p_whole + 2), tl.load(p_whole + 3))
    b_time = _fixed.times(b_word)
    take_turn(DEPENDENT, False)
    top_key = best_key(best_ptr + i_row * BLOCKS, BLOCKS, BLOCK_BLOCKS)
    b_x = tl.load(row_ptr + i_row * V + o_v, mask=o_v < V, other=float("-inf"))
    b_log_weight = log_weights(b_x, top_key, temperature)
    m_kept = (b_x > float("-inf")) & (b_log_weight >= low)
    if BORDER > 0:
        distance = tl.load(state_ptr + i_row * STATES + BORDER)
        kept = tl.load(state_ptr + i_row * STATES + BORDER + 1)
        o_block = tl.arange(0, BLOCK_BLOCKS)
        before = tl.sum(tl.load(ties_ptr + i_row * BLOCKS + o_block, mask=o_block < i_block, other=0), axis=0)
        b_distance = distances(b_x, top_key)
        b_tie = ((b_distance == distance) & m_kept).to(tl.int32)
        m_first = (b_tie > 0) & (before + tl.cumsum(b_tie, axis=0) <= kept)
        m_kept = m_kept & ((b_distance < distance) | m_first)
    b_score = _fixed.scores(b_log_weight, b_time)
    tl.store(
        raced_ptr + i_row * BLOCKS + i_block,
        tl.max(tl.where(m_kept, candidates(b_score, o_v), NOTHING), axis=0),
    )


@triton.jit
def finish_kernel(
    logits_ptr,  # [T, V] float32
    numbers_ptr,  # [T, NUMBERS] float64
    best_ptr,  # [T, B] int64
    raced_ptr,  # [T, B] int64
    sums_ptr,  # [T, B, 2] float32
    ids_ptr,  # [T] int32
    log_probs_ptr,  # [T] float32
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    NUMBERS: tl.constexpr,
    RACES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_block = tl.arange(0, BLOCK_BLOCKS)
    o_part = i_row * BLOCKS + o_block
    m_block = o_block < BLOCKS
    is_greedy = tl.load(numbers_ptr + i_row * NUMBERS + 6) > 0
    take_turn(DEPENDENT, False)
    best = tl.max(tl.load(best_ptr + o_part, mask=m_block, other=NOTHING), axis=0)
    token = candidate_id(best)
    if RACES:
        winner = tl.max(tl.load(raced_ptr + o_part, mask=m_block, other=NOTHING), axis=0)
        token = tl.where(is_greedy, token, candidate_id(winner))
    is_finite = tl.abs(candidate_value(best)) < float("inf")
    token = tl.where(is_finite, token, -1)
    b_top = tl.load(sums_ptr + o_part * 2, mask=m_block, other=float("-inf"))
    b_sum = tl.load(sums_ptr + o_part * 2 + 1, mask=m_block, other=0.0)
    top = tl.max(b_top, axis=0)
    total = tl.sum(b_sum * tl.exp(b_top - top), axis=0)
    logit = tl.load(logits_ptr + i_row * V + tl.maximum(token, 0))
    tl.store(ids_ptr + i_row, token)
    tl.store(log_probs_ptr + i_row, tl.where(is_finite, (logit - top) - tl.log(total), float("nan")))
