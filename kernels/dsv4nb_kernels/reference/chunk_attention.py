"""Attention of the rows of a prompt's chunk to their window and to compressed entries (model.md 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels.reference.sparse_attention import sparse_attention


def chunk_attention(
    query: Tensor,
    position: int,
    ring: Tensor,
    seen: int,
    entries: Tensor | None,
    ratio: int,
    places: Tensor | None,
    sink: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attend, without the rotation back: row i stands at `position` + i.

    Args:
        query: [T, H, hd].
        ring: [C, hd], the key of position p in row p mod C; all rows hold finite values.
        seen: how many of the last positions a row sees, its own among them.
        entries: [E, hd], finite, or None; a row at position p sees the first (p + 1) / `ratio`.
        places: [T, N], entries that each row chose; of a row that sees v the first min(v, N) count, and a negative one
            is hidden. None: all that it sees.
        sink: [H]; it takes part in the denominator only.

    Returns:
        [T, H, hd].
    """
    positions = position + torch.arange(query.shape[0], device=query.device)
    before = positions[:, None] - torch.arange(seen - 1, -1, -1, device=query.device)
    splits = [(ring[before % ring.shape[0]], before < 0)]
    if entries is not None:
        visible = (positions + 1) // ratio
        if places is None:
            places = torch.arange(entries.shape[0], device=query.device).expand(query.shape[0], -1)
        order = torch.arange(places.shape[1], device=query.device)
        splits.append((entries[places.clamp_min(0)], (order >= visible[:, None]) | (places < 0)))
    return sparse_attention(query, splits, sink, scale=scale)
