"""e2m1 with one power-of-two scale per block, as a rounding of float32 values (model.md 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels.reference._e8m0 import pow2_at_least, pow2_at_most

LARGEST = 6.0
BLOCK = 32


def round_e2m1(x: Tensor) -> Tensor:
    """Round float32 values in ±6 to 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, ties to the even code."""
    # one mantissa bit: neighbours lie half a binade apart, and below 1 as far as just above it
    step = pow2_at_most(x).clamp_min(1.0) * 0.5
    return (x / step).round() * step


def round_fp4(x: Tensor, block: int = BLOCK) -> Tensor:
    """Round consecutive blocks of the last axis to e2m1 and back; float32 [..., n * block] in and out."""
    blocks = torch.unflatten(x, -1, (-1, block))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_min(LARGEST * 2.0**-126)
    scale = pow2_at_least(peak * (1 / LARGEST))
    return (round_e2m1((blocks / scale).clamp(-LARGEST, LARGEST)) * scale).flatten(-2)
