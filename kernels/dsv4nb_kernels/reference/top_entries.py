"""The best visible entries of each row (model.md 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ABSENT = -1
KEYS, GROUP = 128, 8  # of so many entries each, one behind the other, the groups that share a peak


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


def peaks(scores: Tensor, visible: Tensor) -> Tensor:
    """Return the largest visible scores of groups: of each 128 entries those of entries g, g + 16, ..., eight a group.

    Args:
        scores: [T, C], C a multiple of 128; visible: [T].

    Returns:
        [T, C / 8]; -inf for groups without a visible entry.
    """
    rows, width = scores.shape
    hidden = torch.arange(width, device=scores.device) >= visible[:, None]
    groups = scores.masked_fill(hidden, -math.inf).view(rows, width // KEYS, GROUP, KEYS // GROUP)
    return groups.amax(2).view(rows, -1)
