"""`chunk_attention` on Hopper: keys in shared memory are the left operand of both products, straight and transposed.

A program of four warps has 32 heads of one row, and keeps [hd, 32] sums in half of its registers. It holds one tile of
64 keys at a time, so that two programs fit a multiprocessor: while one waits for its keys the other multiplies.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Gluon compiles no starred tuples)

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WARPS = 4
KEYS = 64
HEADS = 32
PART = 128  # channels of one product's sums

_KEYS = gl.constexpr(KEYS)
_HEADS = gl.constexpr(HEADS)
_PART = gl.constexpr(PART)
_LOWEST = gl.constexpr(-3.0e38)  # stands for the maximum of no keys: finite, so that nothing minus nothing is no NaN
_LOG2_E = gl.constexpr(math.log2(math.e))

SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 16]))
LINES = gl.constexpr(gl.SliceLayout(0, SUMS.value))  # heads
PLACES = gl.constexpr(gl.SliceLayout(1, SUMS.value))  # keys
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # four keys of a thread, 16 bytes at a time
COPIED_KEYS = gl.constexpr(gl.SliceLayout(1, COPIED.value))
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SHARED_SHARES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


@gluon.jit
def _max(b_left, b_right):
    return gl.maximum(b_left, b_right)


@gluon.jit
def _key_rows(i, o_key, position, held, visible, p_list, SEEN: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr):
    """Where the keys of tile i stand in the ring or among the entries, and which of them a row sees."""
    FIRST: gl.constexpr = SEEN // _KEYS
    begin = position - (SEEN - 1) + i * _KEYS
    i_key = (begin + held) % held + o_key
    i_key = gl.where(i_key < held, i_key, i_key - held)
    m_key = begin + o_key >= 0
    if RATIO > 0:
        i_entry = (i - FIRST) * _KEYS + o_key
        m_entry = i_entry < visible
        if CHOSEN:
            i_entry = gl.load(p_list + i_entry, mask=m_entry & (i >= FIRST), other=-1)
            m_entry = i_entry >= 0
        i_key = gl.where(i < FIRST, i_key, i_entry)
        m_key = gl.where(i < FIRST, m_key, m_entry)
    return i_key, m_key


@gluon.jit
def _copy(ring_ptr, entries_ptr, keys_shared, i, i_key, m_key, FIRST: gl.constexpr, PARTS: gl.constexpr):
    """Ask for a tile of keys."""
    p_cache = gl.where(i < FIRST, ring_ptr, entries_ptr)
    o_d = gl.arange(0, _PART, gl.SliceLayout(0, COPIED))
    p_keys = p_cache + gl.expand_dims(i_key * (PARTS * _PART), 1) + gl.expand_dims(o_d, 0)
    m_keys = gl.expand_dims(m_key, 1)
    for c in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(keys_shared.index(c), p_keys + c * _PART, mask=m_keys)
    async_copy.commit_group()


@gluon.jit
def chunk_attention_lanes_kernel(
    query_ptr,  # [T, H, hd] bfloat16
    ring_ptr,  # [C, hd] bfloat16
    entries_ptr,  # [E, hd] bfloat16
    places_ptr,  # [T, N] int32
    position_ptr,  # [1] int32
    sink_ptr,  # [H] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    out_ptr,  # [T, H, hd] bfloat16
    held,  # int, C
    most,  # int, N, or E where there are no places
    scale,  # float
    SEEN: gl.constexpr,  # keys of the window
    RATIO: gl.constexpr,  # 0: no entries
    CHOSEN: gl.constexpr,
    H: gl.constexpr,
    WIDTH: gl.constexpr,
    TAIL: gl.constexpr,
):
    PARTS: gl.constexpr = WIDTH // _PART
    FIRST: gl.constexpr = SEEN // _KEYS
    i_row = gl.num_programs(1) - 1 - gl.program_id(1)
    i_head = gl.program_id(0) * _HEADS
    position = gl.load(position_ptr) + i_row
    visible = 0
    if RATIO > 0:
        visible = gl.minimum((position + 1) // RATIO, most)
    p_list = places_ptr + i_row * most
    o_copied = gl.arange(0, _KEYS, COPIED_KEYS)
    o_place = gl.arange(0, _KEYS, PLACES)
    # tiles of the window before the first position have no keys
    start = gl.maximum(SEEN - 1 - position, 0) // _KEYS
    end = FIRST + (visible + _KEYS - 1) // _KEYS

    query_shared = gl.allocate_shared_memory(gl.bfloat16, [PARTS, _HEADS, _PART], SHARED)
    keys_shared = gl.allocate_shared_memory(gl.bfloat16, [PARTS, _KEYS, _PART], SHARED)
    shares_shared = gl.allocate_shared_memory(gl.bfloat16, [2, _KEYS, _HEADS], SHARED_SHARES)
    o_head = gl.arange(0, _HEADS, COPIED_KEYS)
    o_d = gl.arange(0, _PART, gl.SliceLayout(0, COPIED))
    p_query = query_ptr + gl.expand_dims((i_row * H + i_head + o_head) * WIDTH, 1) + gl.expand_dims(o_d, 0)
    for c in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(query_shared.index(c), p_query + c * _PART)
    i_key, m_key = _key_rows(start, o_copied, position, held, visible, p_list, SEEN, RATIO, CHOSEN)
    _copy(ring_ptr, entries_ptr, keys_shared, start, i_key, m_key, FIRST, PARTS)

    b_top = gl.full([_HEADS], _LOWEST, gl.float32, LINES)
    b_total = gl.zeros([_KEYS, _HEADS], gl.float32, SUMS)
    z = gl.zeros([_KEYS, _HEADS], gl.float32, SUMS)
    z_sums = gl.zeros([_PART, _HEADS], gl.float32, SUMS)
    acc = (z_sums,)
    for c in gl.static_range(1, PARTS):  # noqa: B007 - as many as there are parts
        acc = acc + (z_sums,)
    for i in range(start, end):
        # zero, which the compiler does not know: else it makes all descriptors before the loop, and spills them
        at = gl.minimum(position + i, 0)
        # the places of the next keys arrive while these are multiplied
        i_next, m_next = _key_rows(i + 1, o_copied, position, held, visible, p_list, SEEN, RATIO, CHOSEN)
        m_place = _key_rows(i, o_place, position, held, visible, p_list, SEEN, RATIO, CHOSEN)[1]
        async_copy.wait_group(0)
        fence_async_shared()
        b_z = warpgroup_mma(
            keys_shared.index(at), query_shared.index(at).permute([1, 0]), z, use_acc=False, is_async=True
        )
        for c in gl.static_range(1, PARTS):
            query = query_shared.index(at + c).permute([1, 0])
            b_z = warpgroup_mma(keys_shared.index(at + c), query, b_z, is_async=True)
        b_z = warpgroup_mma_wait(0, [b_z])
        b_z = gl.where(gl.expand_dims(m_place, 1), b_z * (scale * _LOG2_E), float("-inf"))
        b_new = gl.maximum(b_top, gl.reduce(b_z, 0, _max))
        b_raised = gl.exp2(b_z - gl.expand_dims(b_new, 0))
        b_kept = gl.expand_dims(gl.exp2(b_top - b_new), 0)
        b_total = b_total * b_kept + b_raised
        b_top = b_new
        b_high = b_raised.to(gl.bfloat16)
        shares_shared.index(0).store((b_raised - b_high.to(gl.float32)).to(gl.bfloat16))
        shares_shared.index(1).store(b_high)
        fence_async_shared()
        mixed = ()
        for c in gl.static_range(PARTS):
            turned = keys_shared.index(at + c).permute([1, 0])
            b_sum = warpgroup_mma(turned, shares_shared.index(at), acc[c] * b_kept, is_async=True)
            mixed = mixed + (warpgroup_mma(turned, shares_shared.index(at + 1), b_sum, is_async=True),)
        waited = warpgroup_mma_wait(0, mixed)
        acc = waited if PARTS > 1 else (waited,)  # of one it returns that one, not a tuple
        gl.thread_barrier()  # no warp still reads the keys
        if i + 1 < end:
            _copy(ring_ptr, entries_ptr, keys_shared, i + 1, i_next, m_next, FIRST, PARTS)

    sink = gl.load(sink_ptr + i_head + gl.arange(0, _HEADS, LINES)) * _LOG2_E
    b_share = gl.expand_dims(1.0 / (gl.sum(b_total, 0) + gl.exp2(gl.minimum(sink - b_top, 126.0))), 0)
    o_head = gl.arange(0, _HEADS, gl.SliceLayout(1, STORED))
    o_d = gl.arange(0, _PART, gl.SliceLayout(0, STORED))
    p_out = out_ptr + gl.expand_dims((i_row * H + i_head + o_head) * WIDTH, 1) + gl.expand_dims(o_d, 0)
    for c in gl.static_range(PARTS):
        b_out = gl.convert_layout(gl.permute(acc[c] * b_share, [1, 0]), STORED)
        if c == PARTS - 1:
            b_left, b_right = gl.split(gl.reshape(b_out, [_HEADS, _PART // 2, 2]))
            b_crossed = gl.convert_layout(gl.reshape(gl.join(b_right, b_left), [_HEADS, _PART]), STORED)
            m_tail = o_d >= _PART - TAIL
            o_turn = i_row * TAIL + o_d - (_PART - TAIL)
            b_cos = gl.expand_dims(gl.load(cos_ptr + o_turn, mask=m_tail, other=1.0), 0)
            b_sin = gl.expand_dims(gl.load(sin_ptr + o_turn, mask=m_tail, other=0.0), 0)
            b_out = gl.where(gl.expand_dims(m_tail, 0), b_out * b_cos + b_crossed * b_sin, b_out)
        gl.store(p_out + c * _PART, b_out.to(gl.bfloat16))
