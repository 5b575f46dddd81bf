"""The chosen experts' down projections and their sum. Twin: `reference.expert_down`, act_fp8=True.

Traffic    reads the codes and scales of every chosen expert once, however many rows chose it, and the shared expert's;
           writes T·D float32: bandwidth-bound
Grid       D/16 programs, each 16 output columns over all experts, so that nothing is added up outside a program; its
           warps split I
Equality   one order of summation for T = 1 … 8 (`_reduce`): the shared expert, then the chosen ones by ascending id.
           Rows that did not choose an expert meet it with zeros, which changes no bit of their sums. The shape of a
           program depends on (D, I) alone

The union of the rows' choices is walked in registers: the next expert is the smallest id above the last. Weights are on
their way before the kernel waits for the one ahead (`dependent`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4nb_kernels._expert_rows import INNER_SCALE, round_inner, round_lane
from dsv4nb_kernels._expert_weights import DownWeights
from dsv4nb_kernels._fp4 import (
    BLOCK,
    TILE,
    WORDS,
    add_fp4_unit,
    add_fp4_unit_plainly,
    add_fp8_unit,
    add_fp8_unit_plainly,
    load_chunk_scales,
    load_codes_if,
    single,
    sum_warps_plainly,
)
from dsv4nb_kernels._lanes import KEEP, STREAM, after_loads, load_lanes
from dsv4nb_kernels._launch import ROWS_MAX, columns, require, require_tensor, runs_ptx
from dsv4nb_kernels._reduce import no_chains, store_lanes, sum_chains
from dsv4nb_kernels.expert_up import require_choices

SPILLED_BYTES_MAX = {90: 16, 100: 16, 120: 16}  # by compute capability
CHUNK = 128  # columns of I that a warp takes of each expert at a time

_NONE = tl.constexpr(0x7FFFFFFF)  # no expert has this id


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a product is cut; a function of the matrix alone, because the cut along I fixes the order of the sum.

    Attributes:
        warps: warps of a program; I is 128 or 256 for each.
        registers: cap per thread, None for the assembler's choice.
        rounds_early: steps of one or two rows take what `expert_up` wrote and round it themselves, in every program;
            it saves the launch that rounds it once. The result is the same.
    """

    warps: int = 8
    registers: int | None = None
    rounds_early: bool = False

    def __str__(self) -> str:
        return f"{self.warps} warps" + ("" if self.registers is None else f" r{self.registers}")


# (D, I): measured on an H200, see kernels/README.md
TUNINGS = {
    (4096, 1024): Tuning(registers=112, rounds_early=True),  # half of each expert
    (4096, 2048): Tuning(registers=112, rounds_early=True),
}


def tuning(hidden: int, inner: int) -> Tuning:
    """Return how an expert of `hidden` rows over `inner` columns is cut."""
    return TUNINGS.get((hidden, inner), Tuning(warps=max(inner // BLOCK, 1)))


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
def _sum_by_lanes(
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
def _sum_plainly(
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


@triton.jit(do_not_specialize=["T"])
def _expert_down_kernel(
    routed_ptr,  # [E, D/16, I/256, 544] int32
    shared_ptr,  # [D/16 · I · 4] int32
    shared_scales_ptr,  # [D/128, I/128] float32
    inner_ptr,  # [T · (K+1) + 1, I] float16, or float32 when EARLY
    experts_ptr,  # [T, K] int32
    out_ptr,  # [T, D] float32
    T,  # int, 1 … 8
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PTX: tl.constexpr,
):
    i_tile = tl.program_id(0)
    # a kernel that started early may share a processor with older ones: its first reads must not come from their L1
    o_choice = tl.arange(0, 32)
    b_first = tl.load(experts_ptr + o_choice, mask=o_choice < T * CHOICES, other=-1, cache_modifier=".cg")
    b_second = b_first
    if COLUMNS * CHOICES > 32:
        m_choice = o_choice + 32 < T * CHOICES
        b_second = tl.load(experts_ptr + 32 + o_choice, mask=m_choice, other=-1, cache_modifier=".cg")
    if PTX:
        acc = _sum_by_lanes(
            routed_ptr, shared_ptr, shared_scales_ptr, inner_ptr, experts_ptr, b_first, b_second, T, i_tile,
            HIDDEN, INNER, CHOICES, COLUMNS, WARPS, EARLY, DEPENDENT,
        )  # fmt: skip
        scaled = ()
        for i in tl.static_range(2 * COLUMNS):
            scaled = scaled + single(acc[i] * INNER_SCALE)
        store_lanes(out_ptr, scaled, T, i_tile, HIDDEN, 1, WARPS, COLUMNS)
    else:
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        acc = _sum_plainly(
            routed_ptr, shared_ptr, shared_scales_ptr, inner_ptr, experts_ptr, b_first, b_second, T, i_tile,
            HIDDEN, INNER, CHOICES, WARPS,
        )  # fmt: skip
        acc = sum_warps_plainly(sum_chains(acc, 8), WARPS)
        o_thread = tl.arange(0, 32 * WARPS)
        o_even = o_thread % 4 * 2
        p_even = out_ptr + (o_even * HIDDEN + i_tile * 16 + o_thread % 32 // 4)
        m_even = (o_thread < 32) & (o_even < T)
        m_odd = (o_thread < 32) & (o_even + 1 < T)
        tl.store(p_even, acc[0] * INNER_SCALE, mask=m_even)
        tl.store(p_even + HIDDEN, acc[1] * INNER_SCALE, mask=m_odd)
        tl.store(p_even + 8, acc[2] * INNER_SCALE, mask=m_even)
        tl.store(p_even + HIDDEN + 8, acc[3] * INNER_SCALE, mask=m_odd)


def expert_down(
    inner: Tensor,
    experts: Tensor,
    down: DownWeights,
    *,
    rounded: Tensor | None = None,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Run the lower halves of the chosen experts and of the shared one, and add them up for each row.

    Args:
        inner: [T · (K+1) + 1, I] float32 from `expert_up`, within ±511.
        experts: [T, K] int32, as given to `expert_up`.
        rounded: room for `inner` in float16, for graph capture; allocated when None and needed.
        out: [T, D] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel ahead has ended: weights are loaded, then it waits. The kernel ahead must be
            `expert_up`, or one that started after the one that wrote `experts` had ended.

    Returns:
        [T, D] float32.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    cut = tuning(down.hidden, down.inner)
    out = _require_problem(inner, torch.float32, experts, down, cut, out)
    if not (cut.rounds_early and experts.shape[0] <= 2 and runs_ptx(inner.device)):
        inner = round_inner(inner, out=rounded, dependent=dependent)
    return launch(inner, experts, down, cut, out=out, dependent=dependent)


def launch(
    inner: Tensor,
    experts: Tensor,
    down: DownWeights,
    cut: Tuning,
    *,
    out: Tensor | None = None,
    dependent: bool = False,
    ptx: bool | None = None,
    token_columns: int | None = None,
) -> Tensor:
    """`expert_down` of lines that are rounded (float16) or not (float32), with another cut or form."""
    early = inner.dtype == torch.float32
    out = _require_problem(inner, torch.float32 if early else torch.float16, experts, down, cut, out)
    by_lanes = runs_ptx(inner.device) if ptx is None else ptx
    count, choices = experts.shape
    token_columns = token_columns or (columns(count) if by_lanes else ROWS_MAX)
    require(by_lanes or not early, "inner must be float16 where there is no PTX", inner.dtype)
    require(not early or token_columns <= 2, "inner must be float16 for more than 2 rows", inner.dtype)
    is_dependent = dependent and runs_ptx(inner.device)
    _expert_down_kernel[(down.hidden // TILE,)](
        down.routed,
        down.shared.words,
        down.shared.scales,
        inner,
        experts,
        out,
        count,
        **constants(down.hidden, down.inner, choices, cut, token_columns, early, is_dependent, by_lanes),
        **options(cut, is_dependent),
    )
    return out


def _require_problem(
    inner: Tensor, dtype: torch.dtype, experts: Tensor, down: DownWeights, cut: Tuning, out: Tensor | None
) -> Tensor:
    """Refuse what does not fit together; return `out`, allocated when None."""
    hidden, width, device = down.hidden, down.inner, down.routed.device
    count, choices = require_choices(experts, device)
    require_tensor(inner, "inner", (count * (choices + 1) + 1, width), dtype, device)
    fits = width in (CHUNK * cut.warps, BLOCK * cut.warps) and cut.warps & (cut.warps - 1) == 0
    require(fits, f"I must be {CHUNK} or {BLOCK} for each warp of {cut}, a power of two", width)
    tiles = (hidden // TILE, width // BLOCK, WORDS)
    require_tensor(down.routed, "routed", (down.routed.shape[0], *tiles), torch.int32, device)
    require_tensor(down.shared.words, "shared", (hidden * width // 4,), torch.int32, device)
    if out is None:
        out = torch.empty(count, hidden, dtype=torch.float32, device=device)
    require_tensor(out, "out", (count, hidden), torch.float32, device)
    return out


def constants(
    hidden: int,
    inner: int,
    choices: int,
    cut: Tuning,
    token_columns: int,
    early: bool,
    dependent: bool = True,
    ptx: bool = True,
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "HIDDEN": hidden,
        "INNER": inner,
        "CHOICES": choices,
        "COLUMNS": token_columns,
        "WARPS": cut.warps,
        "EARLY": early,
        "DEPENDENT": dependent,
        "PTX": ptx,
    }


def options(cut: Tuning, dependent: bool = True) -> dict[str, int | bool]:
    """Return the compiler's options."""
    cap = {} if cut.registers is None else {"maxnreg": cut.registers}
    return {"num_warps": cut.warps, **cap, **({"launch_pdl": True} if dependent else {})}
