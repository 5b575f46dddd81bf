"""The chosen experts' gate and up projections and their clamped SwiGLU (model.md 3.6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._tiles import TILE
from dsv4nb_kernels.reference.fp8_rows import ACTIVATION_BLOCK

Span = tuple[int, int, int]  # expert, first tile, tile after the last


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) · clamp(up, ±limit): [..., 2I], gate first, -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp_max(limit)
    return gate / (1.0 + torch.exp(-gate)) * up.clamp(-limit, limit)


def expert_up(
    x: Tensor, rows: Tensor, weights: Tensor, up: Tensor, spans: Sequence[Span], *, limit: float, act_fp8: bool
) -> Tensor:
    """Run each expert's upper half on the tiles of rows that belong to it.

    Args:
        x: [R, D].
        rows: [n·8] int64, which row of `x` stands in each place of the n tiles.
        weights: [n·8], the routing weight of that row for that tile's expert; applied before the down projection.
        up: [E, 2I, D], gate rows first.
        spans: the tiles of each expert, in order and without gaps.
        act_fp8: round `x` to e4m3 in blocks of 128 first.

    Returns:
        [n, 8, I].
    """
    source = round_fp8(x, ACTIVATION_BLOCK) if act_fp8 else x
    tiles = torch.unflatten(source[rows], 0, (-1, TILE))
    gate_up = tiles.new_empty(tiles.shape[0], TILE, up.shape[1])
    for expert, first, last in spans:
        torch.bmm(tiles[first:last], up[expert].t().expand(last - first, -1, -1), out=gate_up[first:last])
    return clamped_swiglu(gate_up, limit) * weights.view(-1, TILE, 1)
