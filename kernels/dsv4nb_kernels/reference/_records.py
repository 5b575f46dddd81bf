"""Key/value rows as records (`_kv_records`): the layout, and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb_kernels.reference._e8m0 import pow2_at_least
from dsv4nb_kernels.reference._fp8 import LARGEST, SMALLEST_PEAK

KV_BLOCK = 64
ALIGNMENT = 16


def pack_records(rows: Tensor, tail: int) -> Tensor:
    """Round rows to e4m3 but for the last `tail` elements, and lay them out as records.

    Args:
        rows: [T, hd] float32 with values of bfloat16.

    Returns:
        [T, R] uint8.
    """
    plain = rows.shape[1] - tail
    blocks = rows[:, :plain].unflatten(1, (-1, KV_BLOCK))
    scales = pow2_at_least(blocks.abs().amax(2, keepdim=True).clamp_min(SMALLEST_PEAK) * (1 / LARGEST))
    rounded = (blocks / scales).to(torch.float8_e4m3fn).float() + 0.0  # no zero is negative
    codes = rounded.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    parts = (
        codes,
        _whole(rows[:, plain:].bfloat16()).view(torch.uint8),
        (scales[:, :, 0].contiguous().view(torch.int32) >> 23).to(torch.uint8),
    )
    record = torch.cat(parts, 1)
    return torch.nn.functional.pad(record, (0, -record.shape[1] % ALIGNMENT))


def unpack_records(records: Tensor, width: int, tail: int) -> Tensor:
    """Return the rows that records [..., R] stand for: [..., width] bfloat16."""
    plain = width - tail
    codes, tails, scales = records[..., : width + tail + plain // KV_BLOCK].split(
        (plain, 2 * tail, plain // KV_BLOCK), -1
    )
    values = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, KV_BLOCK))
    powers = (scales.to(torch.int32) << 23).view(torch.float32)
    rounded = (values * powers[..., None]).flatten(-2).bfloat16()
    return torch.cat((rounded, _whole(tails).view(torch.bfloat16)), -1)


def _whole(rows: Tensor) -> Tensor:
    """A copy whose elements are neighbours, which of no rows need not be so."""
    return rows.clone(memory_format=torch.contiguous_format)
