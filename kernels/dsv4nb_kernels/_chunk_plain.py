"""Products of a chunk on the decode kernels' packing, for every GPU and for the interpreter: `tl.dot` on decoded tiles.

On Hopper `_chunk_lanes` has the same sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels._chunk_rows import place_of
from dsv4nb_kernels._fp4 import decode_plainly
from dsv4nb_kernels._fp8 import decode_e4m3


@triton.jit
def fp8_sum(words_ptr, i_row, p_s, p_x, K: tl.constexpr):
    """[N, M] float32.

    `i_row`: [N] rows of a matrix that `fp8_rows.pack` packed; `p_s`: [N] pointers to their scales; `p_x`: [M] pointers
    to arranged activations.
    """
    o_row = i_row.to(tl.int64) // 16 * (K * 16) + i_row % 16 // 8 * 512 + i_row % 8 * 64
    p_w = words_ptr.to(tl.pointer_type(tl.uint8)) + o_row
    o_k = tl.arange(0, 32)
    p_codes = p_w[:, None] + (o_k // 8 * 16 + o_k % 8)[None, :]
    p_values = p_x[None, :] + place_of(o_k)[:, None]
    acc = tl.zeros([p_w.shape[0], p_x.shape[0]], tl.float32)
    for i_chunk in range(K // 128):
        b_d = tl.zeros([p_w.shape[0], p_x.shape[0]], tl.float32)
        for u in tl.static_range(4):
            b_w = decode_e4m3(tl.load(p_codes + (i_chunk * 2048 + u // 2 * 1024 + u % 2 * 8)).to(tl.int32))
            b_x = tl.load(p_values + (i_chunk * 128 + u * 32))
            b_d = tl.dot(b_w.to(tl.float16), b_x, b_d)
        acc += b_d * tl.load(p_s + i_chunk)[:, None]
    return acc


@triton.jit
def fp4_sum(words_ptr, i_row, p_x, K: tl.constexpr):
    """[N, M] float32; `i_row`: [N] rows that `pack_fp4` packed; `p_x`: [M] pointers to arranged activations."""
    p_tile = words_ptr.to(tl.pointer_type(tl.uint8)) + i_row.to(tl.int64) // 16 * (K // 256 * 2176)
    o_half = i_row % 16 // 8
    p_w = p_tile + o_half * 512 + i_row % 8 * 64
    p_s = p_tile + 2048 + o_half * 4 + i_row % 8 * 16
    o_k = tl.arange(0, 32)
    p_values = p_x[None, :] + place_of(o_k)[:, None]
    acc = tl.zeros([p_w.shape[0], p_x.shape[0]], tl.float32)
    for i_chunk in range(K // 128):
        o_chunk = i_chunk // 2 * 2176
        for u in tl.static_range(4):
            b_w = decode_plainly(p_w + (o_chunk + i_chunk % 2 * 1024 + u * 4))
            b_x = tl.load(p_values + (i_chunk * 128 + u * 32))
            s_w = (tl.load(p_s + (o_chunk + i_chunk % 2 * 8 + u)).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            acc += tl.dot(b_w.to(tl.float16), b_x) * s_w[:, None]
    return acc
