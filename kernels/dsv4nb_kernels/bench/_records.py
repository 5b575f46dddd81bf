"""Records of random key/value rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels._kv_records import record_bytes
from dsv4nb_kernels.reference._records import pack_records

_TOGETHER = 1 << 16  # rows that are made at a time: 128 MB of numbers


def random_records(
    count: int, width: int, tail: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Return [count, R] uint8, of normal values."""
    generator = generator or torch.Generator(device).manual_seed(count)
    records = torch.empty(count, record_bytes(width, tail), dtype=torch.uint8, device=device)
    for part in records.split(_TOGETHER):
        rows = torch.randn(len(part), width, generator=generator, device=device)
        part.copy_(pack_records(rows.bfloat16().float(), tail))
    return records
