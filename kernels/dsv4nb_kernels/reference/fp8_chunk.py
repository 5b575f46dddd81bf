"""The rows of a chunk times a block-scaled FP8 matrix (model.md 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.fp8_rows import ACTIVATION_BLOCK


def fp8_chunk(x: Tensor, weight: Tensor, *, act_fp8: bool, groups: int = 1) -> Tensor:
    """Return x · weightᵀ with the input rounded as the FP8 product reads it.

    Args:
        x: [T, G · K].
        weight: [N, K], the exact values of the stored matrix; rows g · N/G … of it meet columns g · K … of `x`.
        act_fp8: round `x` to e4m3 in blocks of 128 first.
        groups: G.

    Returns:
        [T, N].
    """
    source = round_fp8(x, ACTIVATION_BLOCK) if act_fp8 else x
    parts = zip(source.chunk(groups, 1), weight.chunk(groups), strict=True)
    return torch.cat([columns @ rows.t() for columns, rows in parts], dim=1)
