"""Rows times a matrix whose input is not rounded: compressors, router, index weights, head (model.md 4.1)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb_kernels.reference._tiles import tiled_product


def bf16_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ: [R, K] and [N, K] -> [R, N], R a multiple of 8, float32 throughout."""
    return tiled_product(x, weight)
