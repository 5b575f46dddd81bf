"""The chosen experts' gate and up projections and their clamped SwiGLU. Twin: `reference.expert_up`, act_fp8=True.

Traffic    reads the codes and scales of every chosen expert once, however many rows chose it, and the shared expert's;
           writes T·(K+1)·I float32: bandwidth-bound
Grid       I/8 programs for the shared expert, then I/8 for each of the T·K choices. A choice whose expert an earlier
           one names too has nothing to do. A program owns 8 gate rows and the same 8 up rows; its warps split D
Columns    few rows choose the same expert: one that one or two rows chose takes the columns of one or two tokens,
           however many rows the step has, so it reads and stores what a step of one or two rows would
Equality   one order of summation for T = 1 … 8 (`_reduce`): a row of a step is bitwise the row alone, whatever the
           others chose. The shape of a program depends on (D, I) alone

The shared expert needs no route: its programs have weights on their way before the router has ended (`dependent`), or
all their work done where the rows are older than the router (`rows_are_older`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4nb_kernels import _direct
from dsv4nb_kernels._expert_choices import choices_naming, require_choices, shares_of
from dsv4nb_kernels._expert_rows import ExpertRows, require_rows
from dsv4nb_kernels._expert_up_lanes import routed_by_lanes, routed_plainly, shared_by_lanes, shared_plainly, swiglu
from dsv4nb_kernels._expert_weights import HALF, UpWeights
from dsv4nb_kernels._fp4 import BLOCK, WORDS, sum_warps_plainly
from dsv4nb_kernels._launch import columns, require, require_tensor, runs_ptx
from dsv4nb_kernels._reduce import sum_chains, sum_warps

# by compute capability; in the programs of the shared expert and of experts that three rows and more chose
SPILLED_BYTES_MAX = {90: 104, 100: 80, 120: 224}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a product is cut; a function of the matrix alone, because the cut along D fixes the order of the sum.

    Attributes:
        warps: warps that share a tile; D must be a multiple of 256 for each.
        registers: cap per thread, None for the assembler's choice.
        depth: blocks of 256 k of weights on their way beyond the one in use.
        few: an expert that one or two rows chose takes the columns of one or two rows, in larger steps too.
    """

    warps: int = 4
    registers: int | None = None
    depth: int = 1
    few: bool = True

    def __str__(self) -> str:
        cap = "" if self.registers is None else f" r{self.registers}"
        return f"{self.warps} warps d{self.depth}{cap}" + ("" if self.few else ", all columns")


# (D, I): measured on an H200, see kernels/README.md
TUNINGS = {
    (4096, 1024): Tuning(registers=72),  # half of each expert
    (4096, 2048): Tuning(registers=72),
}


def tuning(hidden: int, inner: int) -> Tuning:
    """Return how an expert of `inner` rows over `hidden` columns is cut."""
    blocks = hidden // BLOCK
    return TUNINGS.get((hidden, inner), Tuning(warps=4 if blocks % 4 == 0 else 2 if blocks % 2 == 0 else 1))


@triton.jit
def _store_inner(
    acc,
    x_scales_ptr,
    experts_ptr,
    weights_ptr,
    out_ptr,
    T,
    limit,
    i_tile,
    i_expert,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    ROUTED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Add up chains and warps, and write the tile's eight inner columns of every row that chose the expert."""
    o_thread = tl.arange(0, 32 * WARPS)
    o_warp = o_thread // 32
    o_even = o_thread % 4 * 2
    # where columns repeat, the lanes beyond the first hold what lies past T
    m_even = (o_warp == 0) & (o_even < T)
    m_odd = (o_warp == 0) & (o_even + 1 < T)
    s_even = tl.load(x_scales_ptr + o_even)
    s_odd = tl.load(x_scales_ptr + o_even + 1)
    if ROUTED:
        # on their way while the warps are added up
        shares_even, chosen_even = shares_of(experts_ptr, weights_ptr, i_expert, o_even, m_even, CHOICES)
        if COLUMNS > 1:
            shares_odd, chosen_odd = shares_of(experts_ptr, weights_ptr, i_expert, o_even + 1, m_odd, CHOICES)
    if PTX:
        acc = sum_warps(sum_chains(acc, COLUMNS), o_thread, o_warp, WARPS, WARPS)
    else:
        acc = sum_warps_plainly(sum_chains(acc, 8), WARPS)
    UP: tl.constexpr = len(acc) // 2
    b_even = swiglu(acc[0] * s_even, acc[UP] * s_even, limit)
    p_even = out_ptr + (o_even * (CHOICES + 1) * INNER + i_tile * 8 + o_thread % 32 // 4)
    p_odd = p_even + (CHOICES + 1) * INNER
    if ROUTED:
        for j in tl.static_range(CHOICES):
            tl.store(p_even + j * INNER, b_even * shares_even[j], mask=m_even & chosen_even[j])
    else:
        tl.store(p_even + CHOICES * INNER, b_even, mask=m_even)
    if COLUMNS > 1:
        b_odd = swiglu(acc[1] * s_odd, acc[UP + 1] * s_odd, limit)
        if ROUTED:
            for j in tl.static_range(CHOICES):
                tl.store(p_odd + j * INNER, b_odd * shares_odd[j], mask=m_odd & chosen_odd[j])
        else:
            tl.store(p_odd + CHOICES * INNER, b_odd, mask=m_odd)


@triton.jit
def _lines_of_few(
    p_w,
    x_ptr,
    x_scales_ptr,
    weights_ptr,
    out_ptr,
    limit,
    zero,
    i_tile,
    i_first,
    i_last,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    NAMING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of an expert that one or two choices name: the columns hold units of those rows, however many rows there are."""
    o_thread = tl.arange(0, 32 * WARPS)
    o_lane = o_thread % 32
    o_warp = o_thread // 32
    o_g = o_lane // 4
    o_t = o_lane % 4
    if NAMING == 1:
        i_row = i_first // CHOICES
        o_unit = o_g // 2 + o_g % 2 * 4  # columns 2t and 2t + 1 hold units t and t + 4
    else:
        i_row = tl.where(o_g % 2 == 0, i_first, i_last) // CHOICES
        o_unit = o_g // 2
    o_x = (o_warp * 8 + o_unit) * (64 * COLUMNS) + i_row * 64 + o_t * 16
    p_x = x_ptr.to(tl.int64) + o_x
    acc = routed_by_lanes(p_w, p_x, o_g, o_t, zero, BLOCKS, WARPS, DEPTH, NAMING, COLUMNS)
    i_choice = tl.where(o_t == 0, i_first, i_last)
    i_row = i_choice // CHOICES
    m_line = (o_warp == 0) & (o_t < NAMING)
    s_row = tl.load(x_scales_ptr + i_row, mask=m_line, other=0.0)
    b_share = tl.load(weights_ptr + i_choice, mask=m_line, other=0.0)
    acc = sum_warps(sum_chains(acc, NAMING), o_thread, o_warp, WARPS, WARPS)
    if NAMING == 1:
        b_gate = acc[0]
        b_up = acc[1]
    else:
        b_gate = tl.where(o_t == 0, acc[0], acc[1])
        b_up = tl.where(o_t == 0, acc[2], acc[3])
    b_inner = swiglu(b_gate * s_row, b_up * s_row, limit) * b_share
    # line i · (K+1) + j of choice i · K + j
    tl.store(out_ptr + ((i_choice + i_row) * INNER + i_tile * 8 + o_g), b_inner, mask=m_line)


@triton.jit(do_not_specialize=["T", "zero"])
def _expert_up_kernel(
    routed_ptr,  # [E, I/8, D/256, 544] int32
    shared_ptr,  # [I/8 · D · 4] int32
    shared_scales_ptr,  # [2I/128, D/128] float32
    x_ptr,  # [D/32, C, 32] float16
    x_scales_ptr,  # [8] float32
    experts_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    out_ptr,  # [T · (K+1) + 1, I] float32
    T,  # int, 1 … 8
    limit,  # float
    zero,  # int, 0
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    FEW: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OLDER: tl.constexpr,
    PTX: tl.constexpr,
):
    TILES: tl.constexpr = INNER // 8
    BLOCKS: tl.constexpr = HIDDEN // (256 * WARPS)
    UP: tl.constexpr = INNER // 128 * (HIDDEN // 128)
    o_thread = tl.arange(0, 32 * WARPS)
    o_lane = o_thread % 32
    o_warp = o_thread // 32
    o_g = o_lane // 4
    o_t = o_lane % 4
    i_program = tl.program_id(0)
    i_tile = i_program % TILES
    i_choice = i_program // TILES - 1
    if PTX:
        # of a single token, columns 2t and 2t + 1 hold units t and t + 4
        o_x = (o_g // 2 + o_g % 2 * 4) * 64 + o_t * 16 if COLUMNS == 1 else o_lane * 16
        p_x = x_ptr.to(tl.int64) + (o_warp * (512 * COLUMNS) + o_x)
    else:
        p_even = x_ptr + o_warp * (256 * COLUMNS) + tl.minimum(o_t * 2, T - 1) * 32
        p_odd = x_ptr + o_warp * (256 * COLUMNS) + tl.minimum(o_t * 2 + 1, T - 1) * 32

    if i_choice < 0:
        p_s = shared_scales_ptr + (i_tile // 16 * (HIDDEN // 128) + o_warp * 2)
        o_w = i_tile * (HIDDEN * 16) + o_warp * 4096
        if PTX:
            p_w = shared_ptr.to(tl.int64) + (o_w + o_lane * 16)
            acc = shared_by_lanes(p_w, p_s, p_x, o_t, zero, UP, BLOCKS, WARPS, COLUMNS, DEPENDENT, OLDER)
        else:
            if DEPENDENT:
                gdc_wait()
                gdc_launch_dependents()
            p_w = shared_ptr.to(tl.pointer_type(tl.uint8)) + o_w
            acc = shared_plainly(p_w, p_s, p_even, p_odd, o_g, UP, COLUMNS * 32, BLOCKS, WARPS)
        _store_inner(
            acc, x_scales_ptr, experts_ptr, weights_ptr, out_ptr, T, limit, i_tile, 0,
            INNER, CHOICES, COLUMNS, WARPS, False, PTX,
        )  # fmt: skip
        # the down projection reads it for rows that did not choose an expert
        p_zero = out_ptr + (T * (CHOICES + 1) * INNER + i_tile * 8 + o_g)
        tl.store(p_zero, tl.zeros([32 * WARPS], tl.float32), mask=(o_warp == 0) & (o_t == 0))
    else:
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        i_expert = tl.load(experts_ptr + i_choice)
        i_first, i_last, naming = choices_naming(experts_ptr, i_expert, T, CHOICES, COLUMNS, "")
        if i_first == i_choice:
            o_matrix = (i_expert.to(tl.int64) * TILES + i_tile) * (HIDDEN // 256 * 2176)
            if PTX:
                p_w = routed_ptr.to(tl.int64) + o_matrix + (o_warp * 2176 + o_lane * 16)
                if FEW and COLUMNS > 1:
                    if naming == 1:
                        _lines_of_few(
                            p_w, x_ptr, x_scales_ptr, weights_ptr, out_ptr, limit, zero, i_tile, i_first, i_last,
                            INNER, CHOICES, BLOCKS, WARPS, DEPTH, 1, COLUMNS,
                        )  # fmt: skip
                    elif naming == 2:
                        _lines_of_few(
                            p_w, x_ptr, x_scales_ptr, weights_ptr, out_ptr, limit, zero, i_tile, i_first, i_last,
                            INNER, CHOICES, BLOCKS, WARPS, DEPTH, 2, COLUMNS,
                        )  # fmt: skip
                    elif COLUMNS > 2:
                        acc = routed_by_lanes(p_w, p_x, o_g, o_t, zero, BLOCKS, WARPS, 1, COLUMNS, COLUMNS)
                        _store_inner(
                            acc, x_scales_ptr, experts_ptr, weights_ptr, out_ptr, T, limit, i_tile, i_expert,
                            INNER, CHOICES, COLUMNS, WARPS, True, True,
                        )  # fmt: skip
                else:
                    acc = routed_by_lanes(p_w, p_x, o_g, o_t, zero, BLOCKS, WARPS, DEPTH, COLUMNS, COLUMNS)
                    _store_inner(
                        acc, x_scales_ptr, experts_ptr, weights_ptr, out_ptr, T, limit, i_tile, i_expert,
                        INNER, CHOICES, COLUMNS, WARPS, True, True,
                    )  # fmt: skip
            else:
                p_w = routed_ptr.to(tl.pointer_type(tl.uint8)) + o_matrix + o_warp * 2176
                acc = routed_plainly(p_w, p_even, p_odd, o_g, COLUMNS * 32, BLOCKS, WARPS)
                _store_inner(
                    acc, x_scales_ptr, experts_ptr, weights_ptr, out_ptr, T, limit, i_tile, i_expert,
                    INNER, CHOICES, COLUMNS, WARPS, True, False,
                )  # fmt: skip


def expert_up(
    rows: ExpertRows,
    experts: Tensor,
    weights: Tensor,
    up: UpWeights,
    *,
    limit: float,
    out: Tensor | None = None,
    dependent: bool = False,
    rows_are_older: bool = False,
) -> Tensor:
    """Run the upper halves of the chosen experts and of the shared one.

    Args:
        rows: [T, D] from `round_rows`, T from 1 to 8.
        experts: [T, K] int32 below E, no row naming one twice; T·K at most 64.
        weights: [T, K] float32, the routing weights.
        limit: bound of the SwiGLU's clamps, > 0.
        out: [T · (K+1) + 1, I] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel ahead has ended; the shared expert's weights are loaded, then it waits.
        rows_are_older: the kernel ahead waited for the one that wrote `rows` before it let this one start. Then the
            shared expert waits for nothing until it writes.

    Returns:
        `out`: line i · (K+1) + j is row i's j-th choice, weighted; j = K is the shared expert. The last line is zero.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    cut = tuning(up.hidden, up.inner)
    return launch(
        rows, experts, weights, up, cut, limit=limit, out=out, dependent=dependent, rows_are_older=rows_are_older
    )


def launch(
    rows: ExpertRows,
    experts: Tensor,
    weights: Tensor,
    up: UpWeights,
    cut: Tuning,
    *,
    limit: float,
    out: Tensor | None = None,
    dependent: bool = False,
    rows_are_older: bool = False,
    ptx: bool | None = None,
    token_columns: int | None = None,
) -> Tensor:
    """`expert_up` with another cut or form: for benches and tests."""
    hidden, inner, device = up.hidden, up.inner, up.routed.device
    count, choices = require_choices(experts, device)
    require_tensor(weights, "weights", (count, choices), torch.float32, device)
    require_rows(rows, count, hidden, device)
    require(limit > 0, "limit must be > 0", limit)
    require(hidden % (BLOCK * cut.warps) == 0, f"D must be a multiple of {BLOCK} for each warp of {cut}", hidden)
    tiles = (inner // HALF, hidden // BLOCK, WORDS)
    require_tensor(up.routed, "routed", (up.routed.shape[0], *tiles), torch.int32, device)
    require_tensor(up.shared.words, "shared", (inner * hidden // 2,), torch.int32, device)
    if out is None:
        out = torch.empty(count * (choices + 1) + 1, inner, dtype=torch.float32, device=device)
    require_tensor(out, "out", (count * (choices + 1) + 1, inner), torch.float32, device)
    by_lanes = runs_ptx(device) if ptx is None else ptx
    is_dependent = dependent and runs_ptx(device)
    _direct.call(
        _expert_up_kernel,
        (inner // HALF * (1 + count * choices),),
        up.routed,
        up.shared.words,
        up.shared.scales,
        rows.values,
        rows.scales,
        experts,
        weights,
        out,
        count,
        limit,
        0,
        **constants(
            hidden, inner, choices, cut, token_columns or columns(count), is_dependent, rows_are_older, by_lanes
        ),
        **options(cut, is_dependent),
    )
    return out


def constants(
    hidden: int,
    inner: int,
    choices: int,
    cut: Tuning,
    token_columns: int,
    dependent: bool = True,
    rows_are_older: bool = False,
    ptx: bool = True,
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "HIDDEN": hidden,
        "INNER": inner,
        "CHOICES": choices,
        "COLUMNS": token_columns,
        "WARPS": cut.warps,
        "DEPTH": cut.depth,
        "FEW": cut.few,
        "DEPENDENT": dependent,
        "OLDER": rows_are_older,
        "PTX": ptx,
    }


def options(cut: Tuning, dependent: bool = True) -> dict[str, int | bool]:
    """Return the compiler's options."""
    cap = {} if cut.registers is None else {"maxnreg": cut.registers}
    return {"num_warps": cut.warps, **cap, **({"launch_pdl": True} if dependent else {})}
