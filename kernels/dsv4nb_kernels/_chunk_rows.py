"""The rows of a chunk as its products read them: under one scale for a row, in the order of the instructions.

The weights of the decode kernels are packed so that a lane's bytes are an operand: of each 32 columns, lane t holds 8t
to 8t + 7. Rows that follow the same order in memory meet them in whatever place they have, without a shuffle.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, require, require_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """Activations of a chunk.

    Attributes:
        values: [T, W] float16; place 16i + 8h + 2t + e of 32 holds column 8t + 4i + 2h + e.
        scales: [T] float32, what to multiply each row with.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> ChunkRows:
        """Return room for `rows` rows of `width` columns."""
        return cls(
            values=torch.empty(rows, width, dtype=torch.float16, device=device),
            scales=torch.empty(rows, dtype=torch.float32, device=device),
        )


def column_order(width: int) -> Tensor:
    """Return which column stands in each place of `ChunkRows.values`, [width] int64; its argsort is the inverse."""
    o = torch.arange(width)
    return o // 32 * 32 + o // 2 % 4 * 8 + o // 16 % 2 * 4 + o // 8 % 2 * 2 + o % 2


@triton.jit
def column_in(o_place):
    """Which column stands in a place of `ChunkRows.values`."""
    o = o_place % 32
    return o_place - o + o // 2 % 4 * 8 + o // 16 * 4 + o // 8 % 2 * 2 + o % 2


@triton.jit
def place_of(o_column):
    """Inverse of `column_in`."""
    o = o_column % 32
    return o_column - o + o // 4 % 2 * 16 + o // 2 % 2 * 8 + o // 8 * 2 + o % 2


@triton.jit
def to_places(b_values, BLOCKS: tl.constexpr):
    """[BLOCKS, 128] columns in the order of `ChunkRows.values`, in registers."""
    b_columns = tl.reshape(b_values, [BLOCKS * 4, 4, 2, 2, 2])  # t, i, h, e
    return tl.reshape(tl.permute(b_columns, (0, 2, 3, 1, 4)), [BLOCKS, 128])


def require_chunk(rows: ChunkRows, count: int, width: int, device: torch.device) -> None:
    """Refuse rows that are not [count, width] on `device`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(1 <= count <= CHUNK_ROWS_MAX, f"rows must be 1 to {CHUNK_ROWS_MAX}", count)
    require_tensor(rows.values, "values", (count, width), torch.float16, device)
    require_tensor(rows.scales, "scales", (count,), torch.float32, device)
