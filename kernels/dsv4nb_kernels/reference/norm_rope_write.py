"""Normalise, rotate and round query heads and key/value rows; write the latter (model.md 3.3, 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._norm import inverse_rms, rms_norm
from dsv4nb_kernels.reference._rotary import rotate_tail

KV_BLOCK = 64


def norm_rope_heads(query: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> Tensor:
    """Divide each head by its rms, without a weight, and rotate it.

    Args:
        query: [R, H, hd]; cos, sin: [R, rd].
    """
    return rotate_tail(query * inverse_rms(query, eps), cos[:, None], sin[:, None])


def norm_rope_rows(rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float, kv_fp8: bool) -> Tensor:
    """Make window rows: norm, rotation, contract rounding; [R, hd], weight [hd], angles [R, rd] -> [R, hd]."""
    return rope_entries(rms_norm(rows, weight, eps), cos, sin, kv_fp8=kv_fp8)


def rope_entries(rows: Tensor, cos: Tensor, sin: Tensor, *, kv_fp8: bool) -> Tensor:
    """Rotate normalised rows and round them as the cache holds them.

    Args:
        rows: [R, hd]; cos, sin: [R, rd].
        kv_fp8: pass everything outside the rotated tail through e4m3, blocks of 64.
    """
    rows = rotate_tail(rows, cos, sin)
    if not kv_fp8:
        return rows
    plain = rows.shape[-1] - cos.shape[-1]
    return torch.cat((round_fp8(rows[:, :plain], KV_BLOCK), rows[:, plain:]), -1)


def write_rows(ring: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [T, n] into `ring` [C, n] at `slots` [T], in place."""
    ring.index_copy_(0, slots, rows)
