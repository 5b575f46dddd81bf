"""Logits of a slice of the vocabulary, their best, and what a panel shows of them (model.md 3.8, 4.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4nb_kernels.reference.bf16_rows import bf16_rows


class Panel(NamedTuple):
    """The best of each row and the log of its sum of exponentials: [R, k], [R, k] int64, [R]."""

    values: Tensor
    ids: Tensor
    log_sums: Tensor


def best(logits: Tensor, first_id: int = 0) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row [R, N] and its id, of equals the lowest; a NaN is the largest.

    Returns:
        values [R] and ids [R] int64.
    """
    values = logits.amax(1)
    is_best = (logits == values[:, None]) | logits.isnan()
    return values, is_best.to(torch.int8).argmax(1) + first_id


def head_argmax(x: Tensor, weight: Tensor, first_id: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits [R, N] of rows [R, K], R a multiple of 8, and as `best` their best.

    Args:
        weight: [N, K], the slice's rows.
        first_id: of the slice's first row.
    """
    logits = bf16_rows(x, weight)
    return (logits, *best(logits, first_id))


def panel(logits: Tensor, k: int, first_id: int = 0) -> Panel:
    """Return the k best of each row [R, N], the best first, of equals the lowest id first."""
    ranked = logits.sort(dim=1, descending=True, stable=True)
    return Panel(ranked.values[:, :k], ranked.indices[:, :k] + first_id, logits.logsumexp(1))
