"""The Walsh-Hadamard rotation of index rows (model.md 3.5)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def hadamard_matrix(width: int) -> Tensor:
    """Return the orthogonal [width, width] matrix in Sylvester order; `width` is a power of two."""
    index = torch.arange(width)
    common = index[:, None] & index
    ones = torch.zeros_like(common)
    for bit in range(width.bit_length()):
        ones += (common >> bit) & 1
    return torch.where(ones % 2 == 0, 1.0, -1.0).mul(width**-0.5)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last axis: [R, Hi, d] -> [R, Hi, d]; every row is a product of the same shape."""
    matrix = hadamard_matrix(x.shape[-1])
    return torch.bmm(x, matrix.expand(x.shape[0], -1, -1))
