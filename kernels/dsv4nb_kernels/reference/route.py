"""Which experts a row visits, and with what weight (model.md 3.6)."""

from __future__ import annotations

import torch
from torch import Tensor

LINEAR_ABOVE = 20.0  # softplus(z) is z there to the last bit, and exp(z) would overflow further up


def affinity(logits: Tensor) -> Tensor:
    """Return sqrt(softplus(logits))."""
    soft = torch.log1p(torch.exp(logits.clamp_max(LINEAR_ABOVE)))
    return torch.where(logits > LINEAR_ABOVE, logits, soft).sqrt_()


def route(logits: Tensor, *, bias: Tensor | None, table: Tensor | None, k: int, factor: float) -> tuple[Tensor, Tensor]:
    """Choose k experts per row by biased affinity or from a table, and share `factor` among them.

    Args:
        logits: [R, E].
        bias: [E]; shifts the choice and never the weights. -inf keeps an expert from being chosen.
        table: [R, k] int64, the rows' lines of the token-id table; exactly one of `bias` and `table` is given.

    Returns:
        experts [R, k] int64, ascending, and weights [R, k]. Equal affinities: the lowest id is chosen first.
    """
    affinities = affinity(logits)
    if table is None:
        assert bias is not None
        table = (affinities + bias).sort(dim=1, descending=True, stable=True).indices[:, :k]
    experts = table.sort(dim=1).values
    weights = affinities.gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True) * factor
