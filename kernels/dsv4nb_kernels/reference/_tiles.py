"""Products over tiles of eight rows, so that a row's bits do not depend on how many rows there are.

A library product may sum in another order when its shape changes. Here every product has the shape
[8, K] x [K, N]; more rows are more products of that shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 8


def tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ.

    Args:
        x: [R, K] with R a multiple of 8; rows may be strided.
        weight: [N, K].
    """
    tiles = torch.unflatten(x, 0, (-1, TILE))
    return torch.bmm(tiles, weight.t().expand(tiles.shape[0], -1, -1)).flatten(0, 1)
