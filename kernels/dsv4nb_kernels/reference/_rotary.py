"""Rotation of the interleaved pairs at the end of a vector (model.md 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of the last `rd` elements; the elements before them pass.

    Args:
        x: [..., width].
        cos, sin: broadcast to [..., rd]; each angle stands twice, and the sine of an even element is negated.
            Negating `sin` rotates back.
    """
    rd = cos.shape[-1]
    tail = x[..., -rd:]
    crossed = torch.unflatten(tail, -1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat((x[..., :-rd], tail * cos + crossed * sin), -1)
