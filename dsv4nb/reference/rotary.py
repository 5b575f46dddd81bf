"""The two rotary tables and the interleaved rotation (model.md 3.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig


def frequencies(config: ModelConfig, *, compressed: bool, device: torch.device | None = None) -> Tensor:
    """Return the angle per position of each pair, [rd / 2] float32.

    Args:
        compressed: True for layers with ratio 4 or 128: the larger base, with YaRN at every length.
    """
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    freq = 1.0 / base ** (2 * pair / width)
    if not compressed:
        return freq

    def pair_turning(turns: float) -> float:
        length = config.original_max_position_embeddings
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(config.beta_fast)), 0)
    high = min(math.ceil(pair_turning(config.beta_slow)), width - 1)
    slowed = ((pair - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return freq / config.rope_factor * slowed + freq * (1 - slowed)


def rotate(x: Tensor, positions: Tensor, freq: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the trailing pairs of `x` by position.

    Args:
        x: [B, T, d] or [B, T, heads, d].
        positions: [T], or [B, T] where the rows of a batch have their own.
        freq: [rd / 2]; pairs are neighbours (2i, 2i + 1) of the last rd values.
    """
    angle = positions.float()[..., None] * freq
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    if x.ndim == 4:
        cos, sin = cos[..., None, :], sin[..., None, :]
    head, tail = x[..., : -2 * freq.numel()], x[..., -2 * freq.numel() :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([head, turned], -1)
