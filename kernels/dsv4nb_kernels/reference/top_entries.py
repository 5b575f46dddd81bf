"""The best visible entries of each row (model.md 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ABSENT = -1


def top_entries(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Choose the k highest scores among the first `visible` of each row, ties to the lowest index.

    Args:
        scores: [T, C]; columns from `visible` on may hold anything.
        visible: [T] int64, 0 <= visible <= C.

    Returns:
        [T, min(k, C)] int64, ascending; -1 fills the end of a row with fewer visible entries.
    """
    width = scores.shape[1]
    hidden = torch.arange(width) >= visible[:, None]
    order = scores.masked_fill(hidden, -math.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
    order = order.masked_fill(order >= visible[:, None], width).sort(dim=1).values
    return order.masked_fill(order == width, ABSENT)
