"""Router, chosen experts and the shared expert (model.md 3.6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine import ops
from dsv4nb.engine.batch import Places
from dsv4nb.engine.taps import Watch
from dsv4nb.weights.store import ExpertWeights

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Which row stands where in the experts' tiles.

    Attributes:
        rows: [n·8] place of the batch that each place of the tiles shows.
        weights: [n·8] its routing weight; 1 for the shared expert, 0 in filling.
        spans: each expert's tiles, ascending; the shared expert is last.
        places: [places, K + 1] where a row's contributions stand, in the order they are added.
    """

    rows: Ints
    weights: npt.NDArray[np.float32]
    spans: tuple[ops.Span, ...]
    places: Ints


def plan_tiles(
    experts: Ints, weights: npt.NDArray[np.float32], *, lead: int, places: int, n_experts: int
) -> ExpertPlan:
    """Lay the rows of each expert into tiles of eight.

    A row keeps its slot: it stands in slot p mod 8 of one of the expert's tiles, so that its products do not
    depend on who else chose the expert.

    Args:
        experts: [T, K] chosen by each live row, ascending; weights: [T, K].
        lead: place of the first live row; places: of the batch.
        n_experts: routed experts; the shared one is expert `n_experts` and shows every place.
    """
    count, k = experts.shape
    row = np.repeat(np.arange(lead, lead + count), k)
    key = experts.ravel() * ops.TILE + row % ops.TILE
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    rank = np.arange(ordered.size) - np.searchsorted(ordered, ordered)  # among the rows with this expert and slot
    tiles = np.bincount(key, minlength=n_experts * ops.TILE).reshape(n_experts, ops.TILE).max(1)
    ends = np.cumsum(tiles)
    n_routed = int(ends[-1])

    place = np.empty_like(key)
    place[order] = ((ends - tiles)[ordered // ops.TILE] + rank) * ops.TILE + ordered % ops.TILE
    rows = np.full(n_routed * ops.TILE + places, lead)
    rows[place] = row
    rows[n_routed * ops.TILE :] = np.arange(places)
    shares = np.zeros(rows.size, np.float32)
    shares[place] = weights.ravel()
    shares[n_routed * ops.TILE :] = 1.0
    contributions = np.zeros((places, k + 1), np.int64)
    contributions[lead : lead + count, :k] = place.reshape(count, k)
    contributions[:, k] = n_routed * ops.TILE + np.arange(places)
    spans = [(int(e), int(ends[e] - tiles[e]), int(ends[e])) for e in np.flatnonzero(tiles)]
    spans.append((n_experts, n_routed, n_routed + places // ops.TILE))
    return ExpertPlan(rows=rows, weights=shares, spans=tuple(spans), places=contributions)


def mix_experts(
    batch: Places,
    x: Tensor,
    weights: ExpertWeights,
    config: ModelConfig,
    contract: Contract,
    watch: Watch | None = None,
) -> Tensor:
    """Run the mixture sublayer: [places, D] -> [places, D]."""
    chosen, shares = ops.route(
        ops.bf16_rows(x, weights.gate),
        bias=weights.bias,
        table=None if weights.table is None else weights.table[batch.tokens],
        k=config.num_experts_per_tok,
        factor=config.routed_scaling_factor,
    )
    chosen, shares = chosen[batch.live], shares[batch.live]
    if watch is not None:
        watch.routes(chosen, shares)
    plan = plan_tiles(
        chosen.numpy(),
        shares.numpy(),
        lead=batch.live.start,
        places=batch.places,
        n_experts=config.n_routed_experts,
    )
    act_fp8 = contract.act_fp8 and weights.is_fp8
    inner = ops.expert_up(
        x,
        torch.from_numpy(plan.rows),
        torch.from_numpy(plan.weights),
        weights.up,
        plan.spans,
        limit=config.swiglu_limit,
        act_fp8=act_fp8,
    )
    return ops.expert_down(inner, torch.from_numpy(plan.places), weights.down, plan.spans, act_fp8=act_fp8)
