"""One tile of the lower halves, 16 columns of D: the walk over the experts, and a warp's chains over its share of I."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4nb_kernels._expert_rows import round_lane
from dsv4nb_kernels._fp4 import (
    add_fp4_unit,
    add_fp4_unit_plainly,
    add_fp8_unit,
    add_fp8_unit_plainly,
    load_chunk_scales,
    load_codes_if,
    single,
)
from dsv4nb_kernels._lanes import KEEP, STREAM, after_loads, load_lanes
from dsv4nb_kernels._reduce import no_chains

_NONE = tl.constexpr(0x7FFFFFFF)  # no expert has this id


@triton.jit
def _next_expert(b_first, b_second, i_expert):
    """The smallest of the named experts above `i_expert`; half of the choices each."""
    b_first = tl.where(b_first > i_expert, b_first, _NONE)
    b_second = tl.where(b_second > i_expert, b_second, _NONE)
    return tl.min(tl.minimum(b_first, b_second), axis=0)


@triton.jit
def _load_expert(p_w, p_s, i_expert, i_fallback, STRIDE: tl.constexpr, CHUNKS: tl.constexpr):
    """A lane's codes and scales of one expert; without one (`_NONE`) the scales are those of `i_fallback`."""
    b_is = i_expert != _NONE
    o_codes = i_expert.to(tl.int64) * STRIDE
    o_scales = tl.where(b_is, i_expert, i_fallback).to(tl.int64) * STRIDE
    w = load_codes_if(p_w + o_codes, b_is.to(tl.int32), 2 * CHUNKS)
    s = load_chunk_scales(p_s + o_scales) if CHUNKS == 1 else load_lanes(p_s + o_scales, 1, 16, STREAM)
    return w, s


@triton.jit
def _next_step(b_first, b_second, i_expert, CHUNKS: tl.constexpr):
    """The experts of the step after the one that ends with `i_expert`: two of a chunk each, or one of two chunks."""
    i_next = _next_expert(b_first, b_second, i_expert)
    if CHUNKS == 2:
        return i_next, i_next
    else:
        return i_next, _next_expert(b_first, b_second, i_next)


@triton.jit
def _load_step(p_w, p_s, i_expert, i_second, i_fallback, STRIDE: tl.constexpr, CHUNKS: tl.constexpr):
    """A lane's codes and scales of the two chunks of a step."""
    w, s = _load_expert(p_w, p_s, i_expert, i_fallback, STRIDE, CHUNKS)
    if CHUNKS == 2:
        return w, s
    else:
        w_second, s_second = _load_expert(p_w, p_s, i_second, i_fallback, STRIDE, CHUNKS)
        return w + w_second, s + s_second


@triton.jit
def _load_inner(p_x, o_row, INNER: tl.constexpr, LOADS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    """A lane's activations in line `o_row`, 8 / COLUMNS units apart: 4 LOADS registers of float16 pairs."""
    x = ()
    if EARLY:
        for i in tl.static_range(LOADS):
            p_lane = p_x + (o_row * (INNER * 4) + i * (1024 // COLUMNS))
            x = x + round_lane(load_lanes(p_lane, 2, 16, KEEP))
    else:
        x = load_lanes(p_x + o_row * (INNER * 2), LOADS, 512 // COLUMNS, KEEP)
    return x


@triton.jit
def _line(named, i_expert, o_first, o_none, CHOICES: tl.constexpr):
    """The line of a row's choice of an expert, or the line of zeros."""
    o_line = o_none
    for j in tl.static_range(CHOICES):
        o_line = tl.where(named[j] == i_expert, o_first + j, o_line)
    return o_line


@triton.jit
def _load_lines(
    p_x,
    named,
    i_expert,
    i_second,
    o_g,
    o_first,
    o_none,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A lane's activations of the two chunks of a step."""
    if CHUNKS == 2:
        o_line = _line(named, i_expert, o_first, o_none, CHOICES)
        return _load_inner(p_x, o_line, INNER, COLUMNS, COLUMNS, EARLY)
    elif COLUMNS == 1:
        # columns 2t hold units of the first expert, columns 2t + 1 of the second
        o_line = _line(named, tl.where(o_g % 2 == 0, i_expert, i_second), o_first, o_none, CHOICES)
        return _load_inner(p_x, o_line, INNER, 1, 1, EARLY)
    else:
        o_line = _line(named, i_expert, o_first, o_none, CHOICES)
        o_line_2 = _line(named, i_second, o_first, o_none, CHOICES)
        x = _load_inner(p_x, o_line, INNER, COLUMNS // 2, COLUMNS, EARLY)
        return x + _load_inner(p_x, o_line_2, INNER, COLUMNS // 2, COLUMNS, EARLY)


@triton.jit
def sum_by_lanes(
    routed_ptr,
    shared_ptr,
    shared_scales_ptr,
    inner_ptr,
    experts_ptr,
    b_first,
    b_second,
    T,
    i_tile,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A lane's chains over its warp's columns of every expert."""
    CHUNKS: tl.constexpr = INNER // (128 * WARPS)
    ROW_BYTES: tl.constexpr = INNER // 256 * 2176  # of 16 rows
    STRIDE: tl.constexpr = HIDDEN // 16 * ROW_BYTES
    o_thread = tl.arange(0, 32 * WARPS)
    o_lane = o_thread % 32
    o_warp = o_thread // 32
    o_g = o_lane // 4
    o_t = o_lane % 4
    # chunks stand in pairs: 2048 bytes of codes, then 128 of scales
    i_chunk = o_warp * CHUNKS
    p_block = routed_ptr.to(tl.int64) + i_tile * ROW_BYTES + i_chunk // 2 * 2176
    p_w = p_block + (i_chunk % 2 * 1024 + o_lane * 16)
    p_s = p_block + (2048 + i_chunk % 2 * 8 + o_g * 16)
    i_expert, i_second = _next_step(b_first, b_second, -1, CHUNKS)
    w, s = _load_step(p_w, p_s, i_expert, i_second, i_expert, STRIDE, CHUNKS)
    p_shared = shared_ptr.to(tl.int64) + (i_tile * (INNER * 16) + i_chunk * 2048 + o_lane * 16)
    w_shared = load_lanes(p_shared, 4 * CHUNKS, 512, STREAM)

    i_row = o_g % COLUMNS
    o_first = i_row * (CHOICES + 1)
    o_none = T * (CHOICES + 1)
    named = ()
    for j in tl.static_range(CHOICES):
        p_named = experts_ptr + i_row * CHOICES + j
        named = named + single(tl.load(p_named, mask=i_row < T, other=-1, cache_modifier=".cg"))
    if COLUMNS > 1:
        i_unit = o_g // COLUMNS
    elif CHUNKS == 1:
        i_unit = o_g // 2
    else:  # columns 2t and 2t + 1 hold units t and t + 4
        i_unit = o_g // 2 + o_g % 2 * 4
    SIZE: tl.constexpr = 4 if EARLY else 2
    p_x = inner_ptr.to(tl.int64) + (i_chunk * 128 + i_unit * 32 + o_t * 8) * SIZE
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()

    acc = no_chains(32 * WARPS, COLUMNS)
    LOADS: tl.constexpr = COLUMNS * CHUNKS // 2 if COLUMNS * CHUNKS > 1 else 1
    o_line = tl.where(i_row < T, o_first + CHOICES, o_none)
    x_shared = _load_inner(p_x, o_line, INNER, LOADS, COLUMNS, EARLY)
    p_scale = shared_scales_ptr + i_tile // 8 * (INNER // 128) + i_chunk
    for u in tl.static_range(4 * CHUNKS):
        b_scale = tl.load(p_scale + u // 4).to(tl.int32, bitcast=True)
        x_chunk = x_shared[u // 4 * (COLUMNS // 2 * 4) :]
        acc = add_fp8_unit(acc, w_shared[u // 4 * 16 :], b_scale, b_scale, x_chunk, o_t, u, COLUMNS)

    # the ids run two steps ahead of the products, the weights one
    i_next, i_after = _next_step(b_first, b_second, i_second, CHUNKS)
    while i_expert != _NONE:
        x = _load_lines(p_x, named, i_expert, i_second, o_g, o_first, o_none, INNER, CHOICES, CHUNKS, COLUMNS, EARLY)
        w_next, s_next = _load_step(p_w, p_s, i_next, i_after, i_expert, STRIDE, CHUNKS)
        i_expert = i_next
        i_second = i_after
        i_next, i_after = _next_step(b_first, b_second, i_second, CHUNKS)
        p_w = after_loads(p_w)
        for u in tl.static_range(8):
            acc = add_fp4_unit(acc, w, s, x, o_t, u, COLUMNS)
        w = w_next
        s = s_next
    return acc


@triton.jit
def sum_plainly(
    routed_ptr,
    shared_ptr,
    shared_scales_ptr,
    inner_ptr,
    experts_ptr,
    b_first,
    b_second,
    T,
    i_tile,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The same without PTX, of rounded lines."""
    CHUNKS: tl.constexpr = INNER // (128 * WARPS)
    ROW_BYTES: tl.constexpr = INNER // 256 * 2176
    o_thread = tl.arange(0, 32 * WARPS)
    o_g = o_thread % 32 // 4
    i_even = o_thread % 4 * 2
    i_chunk = o_thread // 32 * CHUNKS
    o_none = T * (CHOICES + 1)
    p_x = inner_ptr + i_chunk * 128
    p_even = p_x + tl.where(i_even < T, i_even * (CHOICES + 1) + CHOICES, o_none) * INNER
    p_odd = p_x + tl.where(i_even + 1 < T, (i_even + 1) * (CHOICES + 1) + CHOICES, o_none) * INNER
    p_scale = shared_scales_ptr + i_tile // 8 * (INNER // 128) + i_chunk
    p_codes = shared_ptr.to(tl.pointer_type(tl.uint8)) + (i_tile * (INNER * 16) + i_chunk * 2048 + o_g * 64)
    acc = no_chains(32 * WARPS, 8)
    for u in tl.static_range(4 * CHUNKS):
        s = tl.load(p_scale + u // 4)
        acc = add_fp8_unit_plainly(acc, p_codes, s, s, p_even + u * 32, p_odd + u * 32, u)
    named_even = ()
    named_odd = ()
    for j in tl.static_range(CHOICES):
        p_named = experts_ptr + i_even * CHOICES + j
        named_even = named_even + single(tl.load(p_named, mask=i_even < T, other=-1))
        named_odd = named_odd + single(tl.load(p_named + CHOICES, mask=i_even + 1 < T, other=-1))
    p_block = routed_ptr.to(tl.pointer_type(tl.uint8)) + i_tile.to(tl.int64) * ROW_BYTES + i_chunk // 2 * 2176
    i_expert = _next_expert(b_first, b_second, -1)
    while i_expert != _NONE:
        p_w = p_block + i_expert.to(tl.int64) * (HIDDEN // 16 * ROW_BYTES)
        p_codes = p_w + i_chunk % 2 * 1024 + o_g * 64
        p_scales = p_w + 2048 + i_chunk % 2 * 8 + o_g * 16
        p_even = p_x + _line(named_even, i_expert, i_even * (CHOICES + 1), o_none, CHOICES) * INNER
        p_odd = p_x + _line(named_odd, i_expert, (i_even + 1) * (CHOICES + 1), o_none, CHOICES) * INNER
        for u in tl.static_range(4 * CHUNKS):
            acc = add_fp4_unit_plainly(acc, p_codes, p_scales, p_even + u * 32, p_odd + u * 32, u)
        i_expert = _next_expert(b_first, b_second, i_expert)
    return acc
