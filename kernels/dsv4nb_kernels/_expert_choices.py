"""The choices of a step, [T, K] ids of experts, and who named whom."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels._fp4 import single
from dsv4nb_kernels._launch import ROWS_MAX, require, require_tensor

CHOICES_MAX = 64  # T·K


@triton.jit
def choices_naming(experts_ptr, i_expert, T, CHOICES: tl.constexpr, COLUMNS: tl.constexpr, CACHE: tl.constexpr):
    """The first and the last of the T·K choices that name the expert, and how many do."""
    o_choice = tl.arange(0, 32)
    b_named = tl.load(experts_ptr + o_choice, mask=o_choice < T * CHOICES, other=-1, cache_modifier=CACHE)
    m_named = b_named == i_expert
    b_first = tl.where(m_named, o_choice, 64)
    b_last = tl.where(m_named, o_choice, -1)
    b_count = m_named.to(tl.int32)
    if COLUMNS * CHOICES > 32:
        o_choice += 32
        b_named = tl.load(experts_ptr + o_choice, mask=o_choice < T * CHOICES, other=-1, cache_modifier=CACHE)
        m_named = b_named == i_expert
        b_first = tl.minimum(b_first, tl.where(m_named, o_choice, 64))
        b_last = tl.maximum(b_last, tl.where(m_named, o_choice, -1))
        b_count += m_named.to(tl.int32)
    return tl.min(b_first, axis=0), tl.max(b_last, axis=0), tl.sum(b_count, axis=0)


@triton.jit
def shares_of(experts_ptr, weights_ptr, i_expert, o_row, m_row, CHOICES: tl.constexpr):
    """The weights of the expert among each row's choices, and where it stands there: 2K registers."""
    shares = ()
    chosen = ()
    for j in tl.static_range(CHOICES):
        b_named = tl.load(experts_ptr + o_row * CHOICES + j, mask=m_row, other=-1)
        b_share = tl.load(weights_ptr + o_row * CHOICES + j, mask=m_row, other=0.0)
        shares = shares + single(b_share)
        chosen = chosen + single(b_named == i_expert)
    return shares, chosen


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
