"""What all layers share about the rows of one forward.

Rows stand in tiles of eight by absolute position: position p is always in slot p mod 8 of its tile. So a row meets
the same products in a prompt, alone and in a verify batch, and its bits cannot depend on the company. Places of a
tile that no row fills hold token 0; they are computed along, and neither cached nor attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import CompressorShape, window_rows
from dsv4nb.engine.ops import TILE
from dsv4nb.engine.rope import RotaryTable, Turn


class Places(Protocol):
    """Rows of one forward in tiles of eight; what experts and projections need to know of them.

    Attributes:
        places: live rows and filling, a multiple of 8.
        live: slice of the live rows among the places.
        tokens: [places] int64.
    """

    @property
    def places(self) -> int: ...
    @property
    def live(self) -> slice: ...
    @property
    def tokens(self) -> Tensor: ...


class Rotary:
    """The two tables of a model."""

    def __init__(self, config: ModelConfig) -> None:
        self._tables = tuple(RotaryTable(config, is_compressed=flag) for flag in (False, True))

    def table(self, *, is_compressed: bool) -> RotaryTable:
        """The table of layers with or without a compressor."""
        return self._tables[is_compressed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """What one kind of compressor does with a batch.

    Attributes:
        phase: [T] place of each row within its window.
        slots: [T] where its source row is written.
        first, last: the batch completes entries first … last - 1.
        pooled: [n, reach] slots of the source rows of those entries.
        missing: [n, reach] bool, source rows before position 0; None when there are none.
        turn: angles of the entries.
        visible: [T] entries that each row may see.
    """

    phase: Tensor
    slots: Tensor
    first: int
    last: int
    pooled: Tensor
    missing: Tensor | None
    turn: Turn
    visible: Tensor


class Batch:
    """`tokens` at positions `pos` …, T of them.

    Attributes:
        pos, stop: first position, and the one after the last.
        places: live rows and filling, a multiple of 8.
        live: slice of the live rows among the places.
        tokens: [places] int64.
        positions: [T] int64.
        window_seen: [T, W] slots of the key/value rows that each row sees, oldest first.
        window_hidden: [T, W] bool, rows before position 0; the slot of position 0 stands in for them.
        window_slots: [T] where each row's own key/value row is written.
    """

    def __init__(self, tokens: Sequence[int], pos: int, config: ModelConfig, rotary: Rotary) -> None:
        count, lead = len(tokens), pos % TILE
        self.pos, self.stop = pos, pos + count
        self.places = -(-(lead + count) // TILE) * TILE
        self.live = slice(lead, lead + count)
        self.tokens = torch.zeros(self.places, dtype=torch.int64)
        self.tokens[self.live] = torch.tensor(tokens, dtype=torch.int64)
        self.positions = torch.arange(pos, self.stop)

        seen = self.positions[:, None] + torch.arange(1 - config.sliding_window, 1)
        ring = window_rows(config)
        self.window_seen = seen.clamp_min(0) % ring
        self.window_hidden = seen < 0
        self.window_slots = self.positions % ring

        self._rotary = rotary
        first = pos - lead
        self._turns = tuple(rotary.table(is_compressed=flag).at(first, first + self.places) for flag in (False, True))
        self._poolings: dict[int, Pooling] = {}

    def turn(self, *, is_compressed: bool) -> Turn:
        """Angles of all places."""
        return self._turns[is_compressed]

    def pooling(self, shape: CompressorShape) -> Pooling:
        """What compressors of this ratio do; the ratio fixes their reach."""
        if shape.ratio not in self._poolings:
            self._poolings[shape.ratio] = self._pool(shape)
        return self._poolings[shape.ratio]

    def _pool(self, shape: CompressorShape) -> Pooling:
        ratio = shape.ratio
        first, last = self.pos // ratio, self.stop // ratio
        source = torch.arange(first, last)[:, None] * ratio + torch.arange(ratio - shape.reach, ratio)
        has_missing = first == 0 and shape.reach > ratio
        return Pooling(
            phase=self.positions % ratio,
            slots=self.positions % shape.source_rows,
            first=first,
            last=last,
            pooled=source.clamp_min(0) % shape.source_rows,
            missing=source < 0 if has_missing else None,
            turn=self._rotary.table(is_compressed=True).at(first * ratio, last * ratio, ratio),
            visible=(self.positions + 1) // ratio,
        )
