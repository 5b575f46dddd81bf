"""Where blocks of drafts are trained: behind tokens that the assistant wrote (dspark.md 8.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4nb.toy.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """M blocks of one batch.

    Attributes:
        row, position: [M] int64, sequence and position of each pending token.
        supervised: [M, B] bool: the assistant wrote what the slot predicts, and everything from the pending token on.
    """

    row: Tensor
    position: Tensor
    supervised: Tensor


def supervised_slots(weight: Tensor, width: int) -> Tensor:
    """Tell for a block at every position which slots have a label: [B, T] -> [B, T, width] bool.

    Args:
        weight: of `Batch`; 1 marks what the assistant wrote.
    """
    said = F.pad((weight == 1).long(), (0, width))
    return said.unfold(1, width + 1, 1).cumprod(-1)[..., 1:].bool()


def all_blocks(weight: Tensor, width: int) -> Blocks:
    """Return the blocks at every position where the first slot has a label."""
    slots = supervised_slots(weight, width)
    row, position = slots[..., 0].nonzero(as_tuple=True)
    return Blocks(row=row, position=position, supervised=slots[row, position])


def draw_blocks(batch: Batch, width: int, count: int, g: torch.Generator) -> Blocks:
    """Draw `count` blocks without replacement; where there are fewer, the rest has no supervised slot."""
    there = all_blocks(batch.weight, width)
    order = torch.randperm(len(there.row), generator=g)[:count]
    filler = (0, count - len(order))
    return Blocks(
        row=F.pad(there.row[order], filler),
        position=F.pad(there.position[order], filler),
        supervised=F.pad(there.supervised[order], (0, 0, *filler)),
    )
