"""The experts' gate and up projections of a chunk, their clamped SwiGLU, and the rounding for what follows.

Twin: `reference.expert_up_chunk`, act_fp8=True.

Arithmetic T·(K+1)·2I·D products of the tensor cores in float16, which holds both sides' codes: compute-bound from about
           1,500 rows on, before that as long as the chosen experts' weights take to arrive
Grid       I/128 programs for each 64 rows of the shared expert, and for each tile of the plan; tiles beyond the last
           have no work. A program owns 128 gate rows and the same 128 up rows: one block of the rounding
Equality   a row's result does not depend on the rows beside it, but the order of its sums is not that of `expert_up`:
           128 k at a time by the tensor cores, from zero, and those sums in ascending order in float32

The weights are those of `expert_up`, in the same packing; on Hopper they are decoded in registers (`_chunk_lanes`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4nb_kernels import _chunk_lanes, _direct
from dsv4nb_kernels._chunk_lanes import (
    COLUMNS,
    COPIED_ROWS,
    FIRST,
    OTHER_REGISTERS,
    OTHER_WARPS,
    PRODUCT,
    ROWS,
    SECOND,
    copy,
    fp4_peaks,
    fp4_scales,
    multiply,
    ring,
    row_pointers,
    words_of,
)
from dsv4nb_kernels._chunk_plain import fp4_sum, fp8_sum
from dsv4nb_kernels._chunk_plan import ROWS as TILE_ROWS
from dsv4nb_kernels._chunk_plan import Plan, require_peaks, require_plan
from dsv4nb_kernels._chunk_rows import ChunkRows, column_in, require_chunk
from dsv4nb_kernels._e8m0 import pow2_at_least, pow2_inverse
from dsv4nb_kernels._expert_rows import INNER_SCALE, PEAK_FLOOR
from dsv4nb_kernels._expert_up_lanes import swiglu
from dsv4nb_kernels._expert_weights import HALF, UpWeights
from dsv4nb_kernels._fp4 import BLOCK, WORDS
from dsv4nb_kernels._fp8 import LARGEST, round_e4m3
from dsv4nb_kernels._launch import Limits, cdiv, require, require_tensor, runs_wgmma

COLUMNS_OF_PROGRAM = 128  # inner columns of a program: a block of the rounding
PLAIN_OPTIONS = {"num_warps": 8, "num_stages": 1}
LIMITS = {
    "lanes": Limits(registers=168, stack_bytes=40, shared_bytes=205392),
    "plain": Limits(registers=255, stack_bytes=64, shared_bytes=16384),
}

STORED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))

_swiglu = gluon.jit(swiglu.fn)
_pow2_at_least = gluon.jit(pow2_at_least.fn)
_pow2_inverse = gluon.jit(pow2_inverse.fn)


@gluon.jit
def _halves(b_rows):
    """[64, 64] of packed rows -> [32, 64] of gate rows, and of up rows."""
    b_tiles = gl.permute(gl.reshape(b_rows, [4, 2, 8, 64]), [0, 2, 3, 1])
    b_gate, b_up = gl.split(b_tiles)
    return gl.reshape(b_gate, [32, 64]), gl.reshape(b_up, [32, 64])


@gluon.jit
def _inner(b_rows, s_x, b_share, limit):
    """[32, 64] weighted inner columns of [64, 64] packed rows."""
    b_gate, b_up = _halves(b_rows * gl.expand_dims(s_x, 0))
    b_share, _ = _halves(gl.expand_dims(b_share, 0) + gl.zeros([64, 64], gl.float32, PRODUCT))
    return _swiglu(b_gate, b_up, limit) * b_share


@gluon.jit
def _store(p_out, b_inner, s_inner, o_line, m_line, ROUNDS: gl.constexpr):
    """Round [32 columns, 64 lines] with a scale for each line, and store them in the order of the instructions."""
    if ROUNDS:
        s_line = gl.expand_dims(s_inner, 0)
        b_codes = (b_inner * _pow2_inverse(s_line)).to(gl.float8e4nv).to(gl.float32)
        b_values = (b_codes * (s_line * (1 / INNER_SCALE))).to(gl.float16)
    else:
        b_values = b_inner
    b_places = gl.permute(gl.reshape(b_values, [4, 2, 2, 2, 64]), [4, 1, 2, 0, 3])
    b_stored = gl.convert_layout(gl.reshape(b_places, [64, 32]), STORED)
    o_place = gl.arange(0, 32, gl.SliceLayout(0, STORED))
    gl.store(p_out + gl.expand_dims(o_line, 1) + gl.expand_dims(o_place, 0), b_stored, mask=gl.expand_dims(m_line, 1))


@gluon.jit
def _tile(ends_ptr, tile_experts_ptr, tile_places_ptr, T, i_m, ROUTED: gl.constexpr):
    """The expert of a program's lines, their first place and the place after the last."""
    if ROUTED:
        i_expert = gl.load(tile_experts_ptr + i_m)
        return i_expert, gl.load(tile_places_ptr + i_m), gl.load(ends_ptr + gl.maximum(i_expert, 0))
    else:
        return 0, i_m * 64, T


@gluon.jit
def _row_of(order_ptr, o_place, end, CHOICES: gl.constexpr, ROUTED: gl.constexpr):
    """Which row of the chunk stands in a place, and which choice; places past the end repeat the last."""
    o_place = gl.minimum(o_place, end - 1)
    if ROUTED:
        i_choice = gl.load(order_ptr + o_place)
        return i_choice // CHOICES, i_choice
    else:
        return o_place, o_place


@gluon.jit
def _copy_part(
    words_ptr, x_ptr, order_ptr, i_tile, first, end, words_shared, rows_shared, full, empty,
    HIDDEN: gl.constexpr, CHOICES: gl.constexpr, ROUTED: gl.constexpr,
):  # fmt: skip
    o_place = first + gl.arange(0, 64, gl.SliceLayout(1, COPIED_ROWS))
    i_rows, _ = _row_of(order_ptr, o_place, end, CHOICES, ROUTED)
    p_x = row_pointers(x_ptr, i_rows, HIDDEN)
    p_w = words_of(words_ptr, i_tile, HIDDEN, 2, ROUTED)
    copy(p_w, p_x, words_shared, rows_shared, full, empty, HIDDEN // 128, ROUTED)


@gluon.jit
def _product_part(
    words_ptr, peaks_ptr, scales_ptr, x_scales_ptr, weights_ptr, order_ptr, out_ptr, T, limit, i_n, i_tile, first, end,
    words_shared, rows_shared, full, empty, peaks_shared, ready,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, CHOICES: gl.constexpr, ROUTED: gl.constexpr, ROUNDS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    i_row, i_choice = _row_of(order_ptr, first + gl.arange(0, 64, COLUMNS), end, CHOICES, ROUTED)
    s_x = gl.load(x_scales_ptr + i_row)
    if ROUTED:
        b_share = gl.load(weights_ptr + i_choice)
        p_s = fp4_scales(words_ptr, i_tile + PART * 8, HIDDEN, 2)
        b_peaks, s_w = fp4_peaks(peaks_ptr, i_tile + PART * 8, 2)
        acc = multiply(p_s, b_peaks, words_shared, rows_shared, full, empty, HIDDEN // 128, PART, 2, 1, True)
        b_low = acc[0] * gl.expand_dims(s_w[0], 1)
        b_high = acc[1] * gl.expand_dims(s_w[1], 1)
    else:
        b_share = gl.full([64], 1.0, gl.float32, COLUMNS)
        UP: gl.constexpr = INNER // 128 * (HIDDEN // 128)
        p_scale = scales_ptr + i_n * (HIDDEN // 128) + gl.where(gl.arange(0, 64, ROWS) % 16 < 8, 0, UP)
        p_s = (p_scale, p_scale)
        acc = multiply(p_s, p_s, words_shared, rows_shared, full, empty, HIDDEN // 128, PART, 2, 1, False)
        b_low = acc[0]
        b_high = acc[1]
    b_low = _inner(b_low, s_x, b_share, limit)
    b_high = _inner(b_high, s_x, b_share, limit)
    # a block of the rounding is the columns of both warpgroups
    b_peak = gl.maximum(gl.max(gl.abs(b_low), axis=0), gl.max(gl.abs(b_high), axis=0))
    peaks_shared.index(PART).store(b_peak)
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)
    b_peak = gl.maximum(b_peak, peaks_shared.index(1 - PART).load(b_peak.type.layout))
    s_inner = _pow2_at_least(gl.maximum(b_peak, PEAK_FLOOR) * (1 / LARGEST))
    o_place = first + gl.arange(0, 64, gl.SliceLayout(1, STORED))
    o_line = o_place if ROUTED else o_place + T * CHOICES
    o_line = o_line.to(gl.int64) * INNER
    p_out = out_ptr + (i_n * 128 + PART * 64)
    _store(p_out, b_low, s_inner, o_line, o_place < end, ROUNDS)
    _store(p_out + 32, b_high, s_inner, o_line, o_place < end, ROUNDS)


@gluon.jit(do_not_specialize=["T"])
def _expert_up_chunk_lanes_kernel(
    words_ptr,  # [E, I/8, D/256, 544] int32, or [I/8 · D · 4] of the shared expert
    peaks_ptr,  # [E, 2I] uint8
    scales_ptr,  # [2I/128, D/128] float32, of the shared expert
    x_ptr,  # [T, D] float16
    x_scales_ptr,  # [T] float32
    weights_ptr,  # [T·K] float32
    order_ptr,  # [T·K] int32
    ends_ptr,  # [E] int32
    tile_experts_ptr,  # [M] int32
    tile_places_ptr,  # [M] int32
    out_ptr,  # [T·(K+1), I] float16, or float32 when not ROUNDS
    T,  # int, 1 … 4096
    limit,  # float
    HIDDEN: gl.constexpr,
    INNER: gl.constexpr,
    CHOICES: gl.constexpr,
    ROUNDS: gl.constexpr,
    ROUTED: gl.constexpr,
):
    TILES: gl.constexpr = INNER // 128
    i_n = gl.program_id(0) % TILES
    i_expert, first, end = _tile(ends_ptr, tile_experts_ptr, tile_places_ptr, T, gl.program_id(0) // TILES, ROUTED)
    if i_expert >= 0:
        i_tile = i_expert * (INNER // 8) + i_n * 16
        words_shared, rows_shared, full, empty = ring(2, 1, ROUTED)
        peaks_shared = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=2)
        gl.warp_specialize(
            [
                (
                    _product_part,
                    (
                        words_ptr, peaks_ptr, scales_ptr, x_scales_ptr, weights_ptr, order_ptr, out_ptr, T, limit, i_n,
                        i_tile, first, end, words_shared, rows_shared, full, empty, peaks_shared, ready,
                        HIDDEN, INNER, CHOICES, ROUTED, ROUNDS, FIRST,
                    ),
                ),
                (
                    _product_part,
                    (
                        words_ptr, peaks_ptr, scales_ptr, x_scales_ptr, weights_ptr, order_ptr, out_ptr, T, limit, i_n,
                        i_tile, first, end, words_shared, rows_shared, full, empty, peaks_shared, ready,
                        HIDDEN, INNER, CHOICES, ROUTED, ROUNDS, SECOND,
                    ),
                ),
                (
                    _copy_part,
                    (
                        words_ptr, x_ptr, order_ptr, i_tile, first, end, words_shared, rows_shared, full, empty,
                        HIDDEN, CHOICES, ROUTED,
                    ),
                ),
            ],
            OTHER_WARPS,
            OTHER_REGISTERS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _expert_up_chunk_kernel(
    routed_ptr,
    shared_ptr,
    shared_scales_ptr,
    x_ptr,
    x_scales_ptr,
    weights_ptr,
    order_ptr,
    ends_ptr,
    tile_experts_ptr,
    tile_places_ptr,
    out_ptr,
    T,
    limit,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    TILES: tl.constexpr = INNER // 128
    i_n = tl.program_id(0) % TILES
    i_m = tl.program_id(0) // TILES
    shared_tiles = (T + 63) // 64
    is_shared = i_m < shared_tiles
    i_tile = tl.maximum(i_m - shared_tiles, 0)
    i_expert = tl.load(tile_experts_ptr + i_tile)
    if is_shared | (i_expert >= 0):
        first = tl.where(is_shared, i_m * 64, tl.load(tile_places_ptr + i_tile))
        end = tl.where(is_shared, T, tl.load(ends_ptr + tl.maximum(i_expert, 0)))
        o_place = first + tl.arange(0, 64)
        o_known = tl.minimum(o_place, end - 1)
        i_choice = tl.load(order_ptr + tl.where(is_shared, 0, o_known))
        i_row = tl.where(is_shared, o_known, i_choice // CHOICES)
        s_x = tl.load(x_scales_ptr + i_row)
        b_share = tl.where(is_shared, 1.0, tl.load(weights_ptr + i_choice))
        p_x = x_ptr + i_row.to(tl.int64) * HIDDEN
        # columns in the order in which they are stored
        o_inner = i_n * 128 + column_in(tl.arange(0, 128))
        i_gate = o_inner // 8 * 16 + o_inner % 8
        if is_shared:
            UP: tl.constexpr = INNER // 128 * (HIDDEN // 128)
            p_s = shared_scales_ptr + o_inner // 128 * (HIDDEN // 128)
            b_gate = fp8_sum(shared_ptr, i_gate, p_s, p_x, HIDDEN)
            b_up = fp8_sum(shared_ptr, i_gate + 8, p_s + UP, p_x, HIDDEN)
        else:
            p_expert = routed_ptr + i_expert.to(tl.int64) * (INNER // 8 * (HIDDEN // 256) * 544)
            b_gate = fp4_sum(p_expert, i_gate, p_x, HIDDEN)
            b_up = fp4_sum(p_expert, i_gate + 8, p_x, HIDDEN)
        b_inner = swiglu(b_gate * s_x[None, :], b_up * s_x[None, :], limit) * b_share[None, :]
        b_peak = tl.max(tl.abs(b_inner), axis=0)
        s_inner = pow2_at_least(tl.maximum(b_peak, PEAK_FLOOR) * (1 / LARGEST))
        if ROUNDS:
            b_codes = round_e4m3(b_inner * pow2_inverse(s_inner)[None, :])
            b_inner = (b_codes * (s_inner * (1 / INNER_SCALE))[None, :]).to(tl.float16)
        o_line = (tl.where(is_shared, T * CHOICES, 0) + o_place).to(tl.int64) * INNER
        p_out = out_ptr + i_n * 128 + o_line[None, :] + tl.arange(0, 128)[:, None]
        tl.store(p_out, b_inner, mask=(o_place < end)[None, :])


def expert_up_chunk(
    rows: ChunkRows,
    plan: Plan,
    weights: Tensor,
    up: UpWeights,
    peaks: Tensor,
    *,
    limit: float,
    out: Tensor | None = None,
) -> Tensor:
    """Run the upper halves of the chosen experts and of the shared one on the rows of a chunk.

    Args:
        rows: [T, D] from `round_chunk`, T from 1 to 4096.
        plan: from `plan_chunk`, of the rows' choices [T, K].
        weights: [T, K] float32, the routing weights.
        up: as `expert_up` takes them, D a multiple of 256 and I of 256.
        peaks: `row_peaks(up.routed)`.
        limit: bound of the SwiGLU's clamps, > 0; limit² times a weight must stay within 511.
        out: [T · (K+1), I] float16 destination, for graph capture; allocated when None.

    Returns:
        2^7 times the inner rows, weighted, and rounded to e4m3 in blocks of 128, their columns in the order of
        `ChunkRows`: line p is that of the choice in place p of the plan, line T·K + i the shared expert's of row i.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(rows, plan, weights, up, peaks, limit=limit, out=out)


def launch(
    rows: ChunkRows,
    plan: Plan,
    weights: Tensor,
    up: UpWeights,
    peaks: Tensor,
    *,
    limit: float,
    out: Tensor | None = None,
    lanes: bool | None = None,
    rounds: bool = True,
) -> Tensor:
    """`expert_up_chunk` in another form, or with float32 results that are neither rounded nor enlarged: for tests."""
    hidden, inner, device = up.hidden, up.inner, up.routed.device
    require(weights.ndim == 2, "weights must be [T, K]", tuple(weights.shape))
    count, choices = weights.shape
    require_tensor(weights, "weights", (count, choices), torch.float32, device)
    require_chunk(rows, count, hidden, device)
    experts = up.routed.shape[0]
    require_plan(plan, count, choices, experts, device)
    require(limit > 0, "limit must be > 0", limit)
    require(hidden % BLOCK == 0 and hidden > 0, f"D must be a multiple of {BLOCK}", hidden)
    require(inner % COLUMNS_OF_PROGRAM == 0 and inner > 0, f"I must be a multiple of {COLUMNS_OF_PROGRAM}", inner)
    tiles = (inner // HALF, hidden // BLOCK, WORDS)
    require_tensor(up.routed, "routed", (experts, *tiles), torch.int32, device)
    require_tensor(up.shared.words, "shared", (inner * hidden // 2,), torch.int32, device)
    require_peaks(peaks, experts, 2 * inner, device)
    lines = count * (choices + 1)
    dtype = torch.float16 if rounds else torch.float32
    if out is None:
        out = torch.empty(lines, inner, dtype=dtype, device=device)
    require_tensor(out, "out", (lines, inner), dtype, device)
    shape = constants(hidden, inner, choices, rounds)
    of_rows, columns = cdiv(count, TILE_ROWS), inner // COLUMNS_OF_PROGRAM
    of_plan = plan.tile_experts.shape[0]
    activations = (rows.values, rows.scales, weights, plan.order, plan.ends, plan.tile_experts, plan.tile_places)
    if runs_wgmma(device) if lanes is None else lanes:
        for words, tiles_of_rows, routed in ((up.shared.words, of_rows, False), (up.routed, of_plan, True)):
            _direct.call(
                _expert_up_chunk_lanes_kernel, (columns * tiles_of_rows,),
                words, peaks, up.shared.scales, *activations, out, count, limit,
                **shape, ROUTED=routed, num_warps=_chunk_lanes.WARPS,
            )  # fmt: skip
    else:
        _direct.call(
            _expert_up_chunk_kernel, (columns * (of_rows + of_plan),),
            up.routed, up.shared.words, up.shared.scales, *activations, out, count, limit,
            **shape, **PLAIN_OPTIONS,
        )  # fmt: skip
    return out


def constants(hidden: int, inner: int, choices: int, rounds: bool = True) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {"HIDDEN": hidden, "INNER": inner, "CHOICES": choices, "ROUNDS": rounds}
