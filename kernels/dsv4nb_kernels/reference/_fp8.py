"""e4m3 with one power-of-two scale per block, as a rounding of float32 values (model.md 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels.reference._e8m0 import pow2_at_least

LARGEST = 448.0
SMALLEST_PEAK = 1e-4  # blocks that are all but zero keep a finite scale


def round_fp8(x: Tensor, block: int) -> Tensor:
    """Round consecutive blocks of the last axis to e4m3 and back.

    Args:
        x: [..., n * block] float32.

    Returns:
        The same shape; each block is e4m3 times the smallest power of two that keeps it within ±448.
    """
    blocks = torch.unflatten(x, -1, (-1, block))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_PEAK)
    scale = pow2_at_least(peak * (1 / LARGEST))
    return ((blocks / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).flatten(-2)
