"""Which rows of a chunk go to which expert: sorted on the device, so that a graph can hold what follows.

The choices of a chunk are put in the order of their experts, and cut into tiles of 64 that have one expert each. How
many tiles there are only the device knows; a launch has programs for as many as there can be, and those beyond have no
work.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._fp4 import BLOCK, TILE, WORDS
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, power_of_two, require, require_tensor

ROWS = 64  # of a tile
CHOICES_MAX = 8  # K
EXPERTS_MAX = 1024
READ = 1024  # choices that a program reads at a time
WARPS = 4
LIMITS = Limits(registers=77, shared_bytes=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices [T, K] of a chunk, sorted.

    Attributes:
        order: [T·K] int32: which choice, row · K + j, stands in each place; choices of one expert keep their order.
        places: [T·K] int32: where each choice stands; inverse of `order`.
        ends: [E] int32: the place after the last of each expert.
        tile_experts: [tiles(T, K, E)] int32: the expert of each tile, -1 of those beyond the last.
        tile_places: [tiles(T, K, E)] int32: the first place of each tile.
        counts: [E] int32: how many choices name each expert.
    """

    order: Tensor
    places: Tensor
    ends: Tensor
    tile_experts: Tensor
    tile_places: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rows: int, choices: int, experts: int, device: torch.device) -> Plan:
        """Return room for the choices of `rows` rows among `experts` experts."""

        def ints(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        return cls(
            order=ints(rows * choices),
            places=ints(rows * choices),
            ends=ints(experts),
            tile_experts=ints(tiles(rows, choices, experts)),
            tile_places=ints(tiles(rows, choices, experts)),
            counts=ints(experts),
        )


def tiles(rows: int, choices: int, experts: int) -> int:
    """Return how many tiles there are at most."""
    return rows * choices // ROWS + min(experts, rows * choices)


@triton.jit
def _count_kernel(experts_ptr, counts_ptr, total, READ: tl.constexpr):
    i_expert = tl.program_id(0)
    o_choice = tl.arange(0, READ)
    b_count = tl.zeros([READ], tl.int32)
    for first in range(0, total, READ):
        b_named = tl.load(experts_ptr + first + o_choice, mask=first + o_choice < total, other=-1)
        b_count += (b_named == i_expert).to(tl.int32)
    tl.store(counts_ptr + i_expert, tl.sum(b_count, axis=0))


@triton.jit
def _place_kernel(
    experts_ptr,  # [T·K] int32
    counts_ptr,  # [E] int32
    order_ptr,  # [T·K] int32
    places_ptr,  # [T·K] int32
    ends_ptr,  # [E] int32
    tile_experts_ptr,  # [M] int32
    tile_places_ptr,  # [M] int32
    total,  # int, T·K
    E,  # int
    M,  # int
    READ: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    i_expert = tl.program_id(0)
    o_expert = tl.arange(0, EXPERTS)
    b_counts = tl.load(counts_ptr + o_expert, mask=o_expert < E, other=0)
    b_before = tl.where(o_expert < i_expert, b_counts, 0)
    first_place = tl.sum(b_before, axis=0)
    first_tile = tl.sum((b_before + ROWS - 1) // ROWS, axis=0)
    count = tl.load(counts_ptr + i_expert)
    tl.store(ends_ptr + i_expert, first_place + count)

    o_read = tl.arange(0, READ)
    last_tile = first_tile + (count + ROWS - 1) // ROWS
    stop = tl.where(i_expert == E - 1, M, last_tile)  # the last program also marks the tiles that are none
    for tile in range(first_tile, stop, READ):
        o_tile = tile + o_read
        b_expert = tl.where(o_tile < last_tile, i_expert, -1)
        tl.store(tile_experts_ptr + o_tile, b_expert, mask=o_tile < stop)
        tl.store(tile_places_ptr + o_tile, first_place + (o_tile - first_tile) * ROWS, mask=o_tile < stop)

    place = first_place
    for first in range(0, total, READ):
        o_choice = first + o_read
        m_named = tl.load(experts_ptr + o_choice, mask=o_choice < total, other=-1) == i_expert
        b_rank = tl.cumsum(m_named.to(tl.int32), axis=0)
        b_place = place + b_rank - 1
        tl.store(order_ptr + b_place, o_choice, mask=m_named)
        tl.store(places_ptr + o_choice, b_place, mask=m_named)
        place += tl.sum(m_named.to(tl.int32), axis=0)


def plan_chunk(experts: Tensor, experts_total: int, *, out: Plan | None = None) -> Plan:
    """Sort the choices of a chunk by expert.

    Args:
        experts: [T, K] int32, from 0 to E - 1, no row naming one twice; T from 1 to 4096, K from 1 to 8.
        experts_total: E, at most 1024.
        out: destination, for graph capture; allocated when None.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(experts.ndim == 2, "experts must be [T, K]", tuple(experts.shape))
    rows, choices = experts.shape
    require(1 <= rows <= CHUNK_ROWS_MAX, f"experts must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require(1 <= choices <= CHOICES_MAX, f"experts must hold 1 to {CHOICES_MAX} choices a row", choices)
    require(1 <= experts_total <= EXPERTS_MAX, f"experts_total must be 1 to {EXPERTS_MAX}", experts_total)
    require_tensor(experts, "experts", (rows, choices), torch.int32)
    if out is None:
        out = Plan.empty(rows, choices, experts_total, experts.device)
    require_plan(out, rows, choices, experts_total, experts.device)
    total = rows * choices
    _direct.call(_count_kernel, (experts_total,), experts, out.counts, total, READ=READ, num_warps=WARPS)
    _direct.call(
        _place_kernel, (experts_total,),
        experts, out.counts, out.order, out.places, out.ends, out.tile_experts, out.tile_places,
        total, experts_total, out.tile_experts.shape[0],
        READ=READ, ROWS=ROWS, EXPERTS=power_of_two(experts_total), num_warps=WARPS,
    )  # fmt: skip
    return out


def require_plan(plan: Plan, rows: int, choices: int, experts: int, device: torch.device) -> None:
    """Refuse a plan of another chunk's shape.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    most = tiles(rows, choices, experts)
    sizes = {"order": rows * choices, "places": rows * choices, "ends": experts, "counts": experts}
    for name, size in {**sizes, "tile_experts": most, "tile_places": most}.items():
        require_tensor(getattr(plan, name), f"plan.{name}", (size,), torch.int32, device)


def row_peaks(routed: Tensor) -> Tensor:
    """Return the largest stored scale byte of each packed row, [E, N] uint8: what the chunk's products need besides.

    They multiply float16, so a row's scales become powers of two below its largest: 2^-24 of it and more are exact.

    Args:
        routed: [E, N/16, K/256, 544] int32, `UpWeights.routed` or `DownWeights.routed`.

    Raises:
        ValueError: `routed` has another shape or dtype.
    """
    require(routed.ndim == 4 and routed.shape[3] == WORDS, f"routed must be [E, N/16, K/256, {WORDS}]", routed.shape)
    require_tensor(routed, "routed", routed.shape, torch.int32)
    experts, tiles_, blocks, _ = routed.shape
    peaks = torch.empty(experts, tiles_ * TILE, dtype=torch.uint8, device=routed.device)
    for expert in range(experts):  # at most an expert's scales are copied
        stored = routed[expert, ..., WORDS - BLOCK // 8 :].contiguous().view(torch.uint8)
        rows = stored.view(tiles_, blocks, 8, 2, 2, 4).amax(dim=(1, 3, 5))
        peaks[expert] = rows.transpose(1, 2).reshape(-1)
    return peaks


def require_peaks(peaks: Tensor, experts: int, n: int, device: torch.device) -> None:
    """Refuse what `row_peaks` did not make of such weights.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require_tensor(peaks, "peaks", (experts, n), torch.uint8, device)
