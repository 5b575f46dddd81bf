"""The two GPUs' parts of a product become one sum (model.md: row-parallel partial sums are added in float32)."""

from __future__ import annotations

from torch import Tensor


def peer_join(first: Tensor, second: Tensor) -> Tensor:
    """Add up each GPU's parts from left to right, then the two sums: twice [S, T, D] -> [T, D]."""
    return _added(first) + _added(second)


def _added(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
