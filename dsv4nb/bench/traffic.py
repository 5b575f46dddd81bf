"""Bytes of weights that a forward reads, from where the tensors lie and how many experts the rows visit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dsv4nb.checkpoint.names import parse_name
from dsv4nb.weights.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank reads of the trunk, as it is stored.

    Attributes:
        dense: bytes of every forward, however many rows it has.
        per_row: bytes of the lines that a row looks up: its embedding, its line of each hash-routed layer's table.
        per_expert: bytes of one routed expert, of all layers together.
    """

    dense: int
    per_row: int
    per_expert: int

    @classmethod
    def of(cls, placement: Placement, rank: int) -> Traffic:
        """Add up what `rank` holds."""
        dense = per_row = routed = 0
        experts = set()
        for name, stored in placement.entries.items():
            part, where = placement.parts(name)[rank], parse_name(name)
            if part is None:
                continue
            nbytes = stored.nbytes * prod(part.shape) // prod(stored.shape)
            if where.expert is not None:
                experts.add(where.expert)
                routed += nbytes
            elif name == "embed.weight" or where.part.endswith("tid2eid"):
                per_row += nbytes // part.shape[0]
            else:
                dense += nbytes
        return cls(dense=dense, per_row=per_row, per_expert=routed // max(len(experts), 1))

    def read(self, rows: int, experts: float) -> int:
        """Return the bytes of a forward of `rows` rows that visit `experts` different ones on a layer, on average."""
        return round(self.dense + self.per_row * rows + self.per_expert * experts)
