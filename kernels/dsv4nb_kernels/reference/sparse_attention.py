"""Attention of each row to its own list of keys, which are also the values (model.md 3.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOWEST = -3.0e38  # stands for the maximum of no keys: finite, so that nothing minus nothing is no NaN


def sparse_attention(query: Tensor, splits: Sequence[tuple[Tensor, Tensor]], sink: Tensor, *, scale: float) -> Tensor:
    """Return Σ e^z key / (Σ e^z + e^sink) with z = scale · query · key.

    The sums run within each split and then over the splits in order. A hidden key adds exactly nothing, so a
    split of hidden keys changes no bit: rows of different length can share a call.

    Args:
        query: [T, H, hd].
        splits: pairs (keys [T, S, hd], hidden [T, S] bool); hidden keys hold finite values.
        sink: [H]; it takes part in the denominator only.

    Returns:
        [T, H, hd]; zeros for a row with every key hidden.
    """
    logits = [(torch.bmm(query, keys.mT) * scale).masked_fill_(hidden[:, None], -math.inf) for keys, hidden in splits]
    top = logits[0].amax(-1, keepdim=True)
    for part in logits[1:]:
        top = torch.maximum(top, part.amax(-1, keepdim=True))
    top = top.clamp_min_(LOWEST)
    total, mixed = torch.zeros_like(top), torch.zeros_like(query)
    for part, (keys, _) in zip(logits, splits, strict=True):
        raised = part.sub_(top).exp_()
        total += raised.sum(-1, keepdim=True)
        mixed += torch.bmm(raised, keys)
    return mixed / (total + torch.exp(sink[:, None] - top))
