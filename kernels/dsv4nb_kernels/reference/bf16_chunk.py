"""The rows of a prompt's chunk times a matrix whose input is not rounded (model.md 4.1)."""

from __future__ import annotations

from torch import Tensor


def bf16_chunk(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ: [T, K] and [N, K] -> [T, N]."""
    return x @ weight.t()
