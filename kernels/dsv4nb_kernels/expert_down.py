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

from dsv4nb_kernels import _direct
from dsv4nb_kernels._expert_choices import require_choices
from dsv4nb_kernels._expert_down_lanes import sum_by_lanes, sum_plainly
from dsv4nb_kernels._expert_rows import INNER_SCALE, round_inner
from dsv4nb_kernels._expert_weights import DownWeights
from dsv4nb_kernels._fp4 import BLOCK, TILE, WORDS, single, sum_warps_plainly
from dsv4nb_kernels._launch import ROWS_MAX, columns, require, require_tensor, runs_ptx
from dsv4nb_kernels._reduce import store_lanes, sum_chains

SPILLED_BYTES_MAX = {90: 16, 100: 16, 120: 16}  # by compute capability
CHUNK = 128  # columns of I that a warp takes of each expert at a time


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
        acc = sum_by_lanes(
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
        acc = sum_plainly(
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
    if rounded is not None:
        require_tensor(rounded, "rounded", inner.shape, torch.float16, inner.device)
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
    _direct.call(
        _expert_down_kernel,
        (down.hidden // TILE,),
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
