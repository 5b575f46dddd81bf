"""What all layers of one forward on a GPU share: where the rows stand, and room for what the kernels hand on.

Positions live on the device. One small copy brings the first position and the tokens; slots, lists of places, visible
counts and angles follow from them there, so that a captured graph runs at any position.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import whole_blocks, window_rows
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.engine.rope import RotaryTable
from dsv4nb.weights.kernel_shapes import PLACES, filled
from dsv4nb_kernels._rounded_rows import RoundedRows
from dsv4nb_kernels.sparse_attention import Partials

TOKENS_AT = 4  # of `given`: the first place past the position that begins on a 16-byte boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The rotary tables of a model on a device.

    Attributes:
        plain, compressed: [3, max_seq, rd] float32: cosine, sine, and the sine of the way back.
    """

    plain: Tensor
    compressed: Tensor

    @classmethod
    def of(cls, config: ModelConfig, max_seq: int, device: torch.device) -> Turns:
        """Compute the angles of positions 0 … max_seq - 1."""

        def table(*, is_compressed: bool) -> Tensor:
            cos, sin = RotaryTable(config, is_compressed=is_compressed).at(0, max_seq)
            return torch.stack((cos, sin, -sin)).to(device)

        return cls(plain=table(is_compressed=False), compressed=table(is_compressed=True))


class Windows:
    """What the compressors of one ratio do with the rows of a step.

    Args:
        max_seq: positions of the longest sequence.
        picked: entries that an indexer picks for a row; None where a row reads all that it sees.

    Attributes:
        visible: [T] int32, entries that each row may see.
        turn: [3, T, rd], angles of the entry that each row would end.
        entries: of the extent, in whole blocks; most: of the longest sequence.
        places: [T, N] int32, all entries that a row sees, -1 beyond them up to the extent's end; None where an indexer
            picks some of them.
    """

    def __init__(self, ratio: int, rows: int, max_seq: int, turn: Tensor, *, picked: int | None) -> None:
        device = turn.device
        self._ratio, self._picked = ratio, picked
        self.entries = self.most = whole_blocks(max_seq // ratio)
        self._first = torch.empty(rows, dtype=torch.int32, device=device)
        self.visible = torch.empty(rows, dtype=torch.int32, device=device)
        self.turn = torch.empty(3, rows, turn.shape[2], device=device)
        most = max_seq // ratio if picked is None else min(max_seq // ratio, picked)
        self._numbers = torch.arange(_columns(most), dtype=torch.int32, device=device)
        self._hidden = torch.empty(rows, len(self._numbers), dtype=torch.bool, device=device)
        self._places = torch.empty(rows, len(self._numbers), dtype=torch.int32, device=device)
        self.places = self._places if most == max_seq // ratio else None

    def at(self, extent: int) -> Windows:
        """Return the same for a shorter extent, in the same memory."""
        shorter = copy(self)
        shorter.entries = whole_blocks(extent // self._ratio)
        if self._picked is None or extent // self._ratio <= self._picked:
            rows, count = len(self._places), _columns(extent // self._ratio)
            shorter._numbers = self._numbers[:count]
            shorter._hidden = self._hidden.view(-1)[: rows * count].view(rows, count)
            shorter.places = self._places.view(-1)[: rows * count].view(rows, count)
        return shorter

    def refresh(self, positions: Tensor, turn: Tensor) -> None:
        """Launch what makes them anew for other positions."""
        torch.div(positions, self._ratio, rounding_mode="floor", out=self._first)
        self._first.mul_(self._ratio)
        torch.index_select(turn, 1, self._first, out=self.turn)
        torch.add(positions, 1, out=self.visible)
        self.visible.floor_divide_(self._ratio)
        if self.places is not None:
            torch.ge(self._numbers, self.visible[:, None], out=self._hidden)
            self.places.copy_(self._numbers).masked_fill_(self._hidden, -1)


def _columns(entries: int) -> int:
    """Return the places of a list of so many entries: whole splits, one at least."""
    return filled(max(entries, 1), PLACES)


class Inputs(Protocol):
    """Where the rows of a step stand and what they see, as a layer asks for it; see `StepInputs`."""

    given: Tensor
    position: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    window: Tensor
    windows: dict[int, Windows]

    def turn(self, *, is_compressed: bool) -> Tensor: ...

    def refresh(self) -> None: ...


class StepInputs:
    """Where the T rows of a step stand.

    Attributes:
        given: [4 + T] int32, what the host sends: the first position, three of nothing, the tokens.
        position: [1]; tokens: [T]; positions: [T]; slots: [T] of the ring of key/value rows; all int32.
        window: [T, W] int32, slots that each row sees, oldest first; -1 before position 0.
        windows: by ratio.
    """

    def __init__(self, config: ModelConfig, rows: int, max_seq: int, turns: Turns) -> None:
        device, width = turns.plain.device, config.sliding_window
        self._turns, self._ring = turns, window_rows(config)
        self._steps = torch.arange(rows, dtype=torch.int32, device=device)
        self._back = torch.arange(1 - width, 1, dtype=torch.int32, device=device)
        self._hidden = torch.empty(rows, width, dtype=torch.bool, device=device)
        self.given = torch.zeros(TOKENS_AT + rows, dtype=torch.int32, device=device)
        self.position, self.tokens = self.given[:1], self.given[TOKENS_AT:]
        self.positions = torch.empty(rows, dtype=torch.int32, device=device)
        self.slots = torch.empty(rows, dtype=torch.int32, device=device)
        self.window = torch.empty(rows, width, dtype=torch.int32, device=device)
        self._plain, self._compressed = (torch.empty(3, rows, config.qk_rope_head_dim, device=device) for _ in range(2))
        ratios = sorted(set(config.compress_ratios[: config.num_hidden_layers]) - {0})
        self.windows = {
            ratio: Windows(ratio, rows, max_seq, turns.compressed, picked=config.index_topk if ratio == 4 else None)
            for ratio in ratios
        }

    def at(self, extent: int) -> StepInputs:
        """Return the inputs of the same rows in the same memory, for forwards of a shorter extent."""
        shorter = copy(self)
        shorter.windows = {ratio: windows.at(extent) for ratio, windows in self.windows.items()}
        return shorter

    def turn(self, *, is_compressed: bool) -> Tensor:
        """Return the angles of the rows: [3, T, rd]."""
        return self._compressed if is_compressed else self._plain

    def refresh(self) -> None:
        """Launch what makes everything of `given`."""
        torch.add(self._steps, self.position, out=self.positions)
        torch.remainder(self.positions, self._ring, out=self.slots)
        torch.add(self.positions[:, None], self._back, out=self.window)
        torch.lt(self.window, 0, out=self._hidden)
        self.window.remainder_(self._ring).masked_fill_(self._hidden, -1)
        torch.index_select(self._turns.plain, 1, self.positions, out=self._plain)
        torch.index_select(self._turns.compressed, 1, self.positions, out=self._compressed)
        for windows in self.windows.values():
            windows.refresh(self.positions, self._turns.compressed)


class Room:
    """Tensors by name and shape, allocated when first asked for; layers run one after another and share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[object, ...], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them; any thread may ask."""
        return sum(held.nbytes for held in list(self._held.values()))

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor of that name, with anything in it."""
        key = (name, shape, dtype)
        if key not in self._held:
            self._held[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._held[key]

    def part(self, name: str, most: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor at the beginning of a piece of `most` elements, which widths and extents share."""
        return self.tensor(name, most, dtype=dtype)[: math.prod(shape)].view(shape)

    def rounded(self, name: str, rows: int, width: int) -> RoundedRows:
        """Return room for rows that a product reads."""
        empty = RoundedRows.empty(rows, width, torch.device("meta"))
        return RoundedRows(
            codes=self.tensor(f"{name}.codes", *empty.codes.shape, dtype=empty.codes.dtype),
            scales=self.tensor(f"{name}.scales", *empty.scales.shape, dtype=empty.scales.dtype),
        )

    def partials(self, rows: int, splits: int, heads: int, width: int, *, most: int) -> Partials:
        """Return room between the two kernels of the attention, of rows that have up to `most` splits elsewhere."""
        count = MAX_ROWS * most * heads
        return Partials(
            mixed=self.part("mixed", count * width, rows, splits, heads, width),
            tops=self.part("tops", count, rows, splits, heads),
            totals=self.part("totals", count, rows, splits, heads),
        )
