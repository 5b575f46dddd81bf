"""Rows times a block-scaled FP8 matrix (model.md 4.1)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._tiles import tiled_product

ACTIVATION_BLOCK = 128


def fp8_rows(x: Tensor, weight: Tensor, *, act_fp8: bool) -> Tensor:
    """Return x · weightᵀ with the input rounded as the FP8 product reads it.

    Args:
        x: [R, K], R a multiple of 8.
        weight: [N, K] float32, the exact values of the stored matrix.
        act_fp8: round `x` to e4m3 in blocks of 128 first.

    Returns:
        [R, N].
    """
    return tiled_product(round_fp8(x, ACTIVATION_BLOCK) if act_fp8 else x, weight)
