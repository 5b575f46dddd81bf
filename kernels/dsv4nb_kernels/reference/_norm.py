"""Root-mean-square normalisation (model.md 3.0, 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) over the last axis, which is kept with length 1."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight · x / rms(x) over the last axis."""
    return weight * (x * inverse_rms(x, eps))
