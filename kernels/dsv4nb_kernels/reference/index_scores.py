"""How much each query wants each compressed entry (model.md 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

KEYS = 128  # keys per product: a row's products have one shape however many keys there are


def padded_keys(count: int) -> int:
    """Return how many rows of a key buffer `index_scores` reads for `count` keys."""
    return -(-count // KEYS) * KEYS


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Sum relu(query · key) over the heads, weighted.

    Args:
        query: [T, Hi, d]; keys: [C, d], C a multiple of 128; weights: [T, Hi].

    Returns:
        [T, C]; what stands in a key's column depends on that key alone.
    """
    factor = weights[:, :, None]
    columns = []
    for block in keys.chunk(keys.shape[0] // KEYS):
        products = torch.bmm(query, block.t().expand(query.shape[0], -1, -1))
        columns.append((products.relu_() * factor).sum(1))
    return torch.cat(columns, 1)
