"""The chosen experts' gate and up projections and their clamped SwiGLU. Twin: `reference.expert_up`, act_fp8=True.

Traffic    reads the codes and scales of every chosen expert once, however many rows chose it, and the shared expert's;
           writes T·(K+1)·I float32: bandwidth-bound
Grid       I/8 programs for the shared expert, then I/8 for each of the T·K choices. A choice whose expert an earlier
           one names too has nothing to do. A program owns 8 gate rows and the same 8 up rows; its warps split D
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

from dsv4nb_kernels._expert_rows import ExpertRows, require_rows
from dsv4nb_kernels._expert_weights import HALF, UpWeights
from dsv4nb_kernels._fp4 import (
    BLOCK,
    WORDS,
    add_fp4_unit,
    add_fp4_unit_plainly,
    add_fp8_unit,
    add_fp8_unit_plainly,
    held_back,
    single,
    sum_warps_plainly,
)
from dsv4nb_kernels._lanes import KEEP, STREAM, after_loads, load_lanes
from dsv4nb_kernels._launch import ROWS_MAX, columns, require, require_tensor, runs_ptx
from dsv4nb_kernels._reduce import no_chains, sum_chains, sum_warps

CHOICES_MAX = 64  # T·K
SPILLED_BYTES_MAX = {90: 64, 100: 64, 120: 224}  # by compute capability


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a product is cut; a function of the matrix alone, because the cut along D fixes the order of the sum.

    Attributes:
        warps: warps that share a tile; D must be a multiple of 256 for each.
        registers: cap per thread, None for the assembler's choice.
    """

    warps: int = 4
    registers: int | None = None

    def __str__(self) -> str:
        return f"{self.warps} warps" + ("" if self.registers is None else f" r{self.registers}")


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
def _routed_by_lanes(p_w, p_x, o_g, o_t, zero, BLOCKS: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr):
    """A lane's chains over its warp's blocks, every WARPS-th of D. `p_w`, `p_x`: the lane's first 16 bytes of each."""
    acc = no_chains(32 * WARPS, COLUMNS)
    p_s = p_w + (2048 - o_g * 48 - o_t * 16)  # 16 g behind the codes
    w = load_lanes(p_w, 4, 512, STREAM)
    s = load_lanes(p_s, 1, 16, STREAM)
    if COLUMNS == 1:
        x = load_lanes(p_x, BLOCKS, 512 * WARPS, KEEP)
    for i in tl.static_range(BLOCKS):
        if COLUMNS > 1:
            x = load_lanes(p_x + i * (512 * COLUMNS * WARPS), COLUMNS, 512, KEEP)
        if i + 1 < BLOCKS:
            w_next = load_lanes(p_w + (i + 1) * (2176 * WARPS), 4, 512, STREAM)
            s_next = load_lanes(p_s + (i + 1) * (2176 * WARPS), 1, 16, STREAM)
        p_w = after_loads(p_w)
        for u in tl.static_range(8):
            acc = add_fp4_unit(acc, w, s, x[4 * i if COLUMNS == 1 else 0 :], o_t, u, COLUMNS)
        if i + 1 < BLOCKS:
            p_w = held_back(p_w, acc[2 * COLUMNS - 1], zero)
            p_s = held_back(p_s, acc[2 * COLUMNS - 1], zero)
            p_x = held_back(p_x, acc[2 * COLUMNS - 1], zero)
            w = w_next
            s = s_next
    return acc


@triton.jit
def _shared_by_lanes(
    p_w,
    p_s,
    p_x,
    o_t,
    zero,
    UP: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OLDER: tl.constexpr,
):
    """The same for the shared expert, half a block at a time. `p_s`: the gate's scales; the up's lie UP further."""
    # a program that starts early may share a processor with older ones: its rows must not come from their L1
    CACHE: tl.constexpr = ".cg" if OLDER else KEEP
    acc = no_chains(32 * WARPS, COLUMNS)
    w = load_lanes(p_w, 4, 512, STREAM)
    if DEPENDENT and not OLDER:
        gdc_wait()
        gdc_launch_dependents()
    if COLUMNS == 1:
        x = load_lanes(p_x, BLOCKS, 512 * WARPS, CACHE)
    for i in tl.static_range(2 * BLOCKS):
        if COLUMNS > 1:
            x = load_lanes(p_x + (i // 2 * WARPS * 2 + i % 2) * (256 * COLUMNS), COLUMNS // 2, 512, CACHE)
        if i + 1 < 2 * BLOCKS:
            w_next = load_lanes(p_w + ((i + 1) // 2 * WARPS * 2 + (i + 1) % 2) * 2048, 4, 512, STREAM)
        p_w = after_loads(p_w)
        b_gate = tl.load(p_s + (i // 2 * WARPS * 2 + i % 2)).to(tl.int32, bitcast=True)
        b_up = tl.load(p_s + (UP + i // 2 * WARPS * 2 + i % 2)).to(tl.int32, bitcast=True)
        for u in tl.static_range(4):
            x_half = x[i // 2 * 4 if COLUMNS == 1 else 0 :]
            acc = add_fp8_unit(acc, w, b_gate, b_up, x_half, o_t, i % 2 * 4 + u, COLUMNS)
        if i + 1 < 2 * BLOCKS:
            p_w = held_back(p_w, acc[2 * COLUMNS - 1], zero)
            p_x = held_back(p_x, acc[2 * COLUMNS - 1], zero)
            w = w_next
    if DEPENDENT and OLDER:  # before the lines are written: an earlier layer may still read its own there
        gdc_wait()
        gdc_launch_dependents()
    return acc


@triton.jit
def _routed_plainly(p_w, p_even, p_odd, o_g, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """The same without PTX. `p_w`: uint8 pointers to the warp's first block; STRIDE: from unit to unit of a row."""
    acc = no_chains(32 * WARPS, 8)
    for i in range(BLOCKS):
        p_codes = p_w + i * (WARPS * 2176) + o_g * 64
        p_scales = p_w + i * (WARPS * 2176) + 2048 + o_g * 16
        for u in tl.static_range(8):
            o_x = (i * WARPS * 8 + u) * STRIDE
            acc = add_fp4_unit_plainly(acc, p_codes, p_scales, p_even + o_x, p_odd + o_x, u)
    return acc


@triton.jit
def _shared_plainly(
    p_w, p_s, p_even, p_odd, o_g, UP: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr
):
    acc = no_chains(32 * WARPS, 8)
    for i in range(BLOCKS):
        p_codes = p_w + i * (WARPS * 4096) + o_g * 64
        for u in tl.static_range(8):
            o_x = (i * WARPS * 8 + u) * STRIDE
            p_scale = p_s + i * (WARPS * 2) + u // 4
            s_gate = tl.load(p_scale)
            s_up = tl.load(p_scale + UP)
            acc = add_fp8_unit_plainly(acc, p_codes, s_gate, s_up, p_even + o_x, p_odd + o_x, u)
    return acc


@triton.jit
def _first_choice(experts_ptr, i_expert, T, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):
    """The first of the T·K choices that names the expert."""
    o_choice = tl.arange(0, 32)
    b_named = tl.load(experts_ptr + o_choice, mask=o_choice < T * CHOICES, other=-1)
    i_first = tl.min(tl.where(b_named == i_expert, o_choice, 64), axis=0)
    if COLUMNS * CHOICES > 32:
        b_named = tl.load(experts_ptr + 32 + o_choice, mask=o_choice + 32 < T * CHOICES, other=-1)
        i_first = tl.minimum(i_first, tl.min(tl.where(b_named == i_expert, o_choice + 32, 64), axis=0))
    return i_first


@triton.jit
def _swiglu(b_gate, b_up, limit):
    b_gate = tl.minimum(b_gate, limit)
    b_exp = tl.exp(-tl.abs(b_gate))  # never overflows
    b_silu = tl.where(b_gate < 0.0, b_gate * b_exp, b_gate) / (1.0 + b_exp)
    return b_silu * tl.minimum(tl.maximum(b_up, -limit), limit)


@triton.jit
def _shares(experts_ptr, weights_ptr, i_expert, o_row, m_row, CHOICES: tl.constexpr):
    """The weights of the expert among each row's choices, and where it stands there: 2K registers."""
    shares = ()
    chosen = ()
    for j in tl.static_range(CHOICES):
        b_named = tl.load(experts_ptr + o_row * CHOICES + j, mask=m_row, other=-1)
        b_share = tl.load(weights_ptr + o_row * CHOICES + j, mask=m_row, other=0.0)
        shares = shares + single(b_share)
        chosen = chosen + single(b_named == i_expert)
    return shares, chosen


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
        shares_even, chosen_even = _shares(experts_ptr, weights_ptr, i_expert, o_even, m_even, CHOICES)
        if COLUMNS > 1:
            shares_odd, chosen_odd = _shares(experts_ptr, weights_ptr, i_expert, o_even + 1, m_odd, CHOICES)
    if PTX:
        acc = sum_warps(sum_chains(acc, COLUMNS), o_thread, o_warp, WARPS, WARPS)
    else:
        acc = sum_warps_plainly(sum_chains(acc, 8), WARPS)
    UP: tl.constexpr = len(acc) // 2
    b_even = _swiglu(acc[0] * s_even, acc[UP] * s_even, limit)
    p_even = out_ptr + (o_even * (CHOICES + 1) * INNER + i_tile * 8 + o_thread % 32 // 4)
    p_odd = p_even + (CHOICES + 1) * INNER
    if ROUTED:
        for j in tl.static_range(CHOICES):
            tl.store(p_even + j * INNER, b_even * shares_even[j], mask=m_even & chosen_even[j])
    else:
        tl.store(p_even + CHOICES * INNER, b_even, mask=m_even)
    if COLUMNS > 1:
        b_odd = _swiglu(acc[1] * s_odd, acc[UP + 1] * s_odd, limit)
        if ROUTED:
            for j in tl.static_range(CHOICES):
                tl.store(p_odd + j * INNER, b_odd * shares_odd[j], mask=m_odd & chosen_odd[j])
        else:
            tl.store(p_odd + CHOICES * INNER, b_odd, mask=m_odd)


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
            acc = _shared_by_lanes(p_w, p_s, p_x, o_t, zero, UP, BLOCKS, WARPS, COLUMNS, DEPENDENT, OLDER)
        else:
            if DEPENDENT:
                gdc_wait()
                gdc_launch_dependents()
            p_w = shared_ptr.to(tl.pointer_type(tl.uint8)) + o_w
            acc = _shared_plainly(p_w, p_s, p_even, p_odd, o_g, UP, COLUMNS * 32, BLOCKS, WARPS)
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
        if _first_choice(experts_ptr, i_expert, T, CHOICES, COLUMNS) == i_choice:
            o_matrix = (i_expert.to(tl.int64) * TILES + i_tile) * (HIDDEN // 256 * 2176)
            if PTX:
                p_w = routed_ptr.to(tl.int64) + o_matrix + (o_warp * 2176 + o_lane * 16)
                acc = _routed_by_lanes(p_w, p_x, o_g, o_t, zero, BLOCKS, WARPS, COLUMNS)
            else:
                p_w = routed_ptr.to(tl.pointer_type(tl.uint8)) + o_matrix + o_warp * 2176
                acc = _routed_plainly(p_w, p_even, p_odd, o_g, COLUMNS * 32, BLOCKS, WARPS)
            _store_inner(
                acc, x_scales_ptr, experts_ptr, weights_ptr, out_ptr, T, limit, i_tile, i_expert,
                INNER, CHOICES, COLUMNS, WARPS, True, PTX,
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
    _expert_up_kernel[(inner // HALF * (1 + count * choices),)](
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


def require_choices(experts: Tensor, device: torch.device) -> tuple[int, int]:
    """Refuse a table of choices that no kernel reads; return T and K.

    Raises:
        ValueError: `experts` has another shape, dtype or place, or holds more than 64 choices.
    """
    require(experts.ndim == 2, "experts must be [T, K]", tuple(experts.shape))
    count, choices = experts.shape
    require(1 <= count <= ROWS_MAX, f"experts must have 1 to {ROWS_MAX} rows", count)
    require(0 < count * choices <= CHOICES_MAX, f"experts must hold 1 to {CHOICES_MAX} choices", (count, choices))
    require_tensor(experts, "experts", (count, choices), torch.int32, device)
    return count, choices


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
        "DEPENDENT": dependent,
        "OLDER": rows_are_older,
        "PTX": ptx,
    }


def options(cut: Tuning, dependent: bool = True) -> dict[str, int | bool]:
    """Return the compiler's options."""
    cap = {} if cut.registers is None else {"maxnreg": cut.registers}
    return {"num_warps": cut.warps, **cap, **({"launch_pdl": True} if dependent else {})}
