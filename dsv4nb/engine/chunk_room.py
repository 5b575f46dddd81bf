"""What all layers of one chunk of a prompt share on a GPU: where its rows stand, room, and rings that are long enough.

Everything is made once for the longest chunk, and a shorter one takes the beginning of it: chunks of any length follow
each other without new memory. The rings of a sequence hold what the next rows need and no chunk; so a chunk takes those
rows into rings of its own, layer after layer, and leaves there what the rows behind it will need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import CompressorShape, layer_shape, window_rows
from dsv4nb.engine.step import TOKENS_AT, Turns
from dsv4nb_kernels._chunk_plan import Plan, tiles
from dsv4nb_kernels._chunk_rows import ChunkRows

MADE = 4096  # of the room's tensors that are kept: those of some forty lengths


class ChunkRoom:
    """Tensors by name, each a piece of memory for the longest chunk; a name may hold one thing after another.

    Args:
        most: rows of the longest chunk.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.most, self.device = most, device
        self._held: dict[str, Tensor] = {}
        self._made: dict[tuple[object, ...], Any] = {}  # of them, by what was asked for: layers ask for the same

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in list(self._held.values()))

    def tensor(self, name: str, rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor whose size is a multiple of `rows`, with anything in it."""
        key = (name, rows, shape, dtype)
        if (made := self._made.get(key)) is None:
            made = self._made[key] = self._view(name, math.prod(shape) // rows * self.most, shape, dtype)
        return cast("Tensor", made)

    def fixed(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, most: int = 0) -> Tensor:
        """Return a tensor whose size does not depend on the rows; of at most `most` elements, now or later."""
        key = (name, shape, dtype, most, "fixed")
        if (made := self._made.get(key)) is None:
            made = self._made[key] = self._view(name, max(most, math.prod(shape)), shape, dtype)
        return cast("Tensor", made)

    def rounded(self, name: str, rows: int, width: int) -> ChunkRows:
        """Return room for the rows of a product."""
        key = (name, rows, width)
        if (made := self._made.get(key)) is None:
            made = self._made[key] = ChunkRows(
                values=self.tensor(name, rows, rows, width, dtype=torch.float16),
                scales=self.tensor(f"{name} scales", rows, rows),
            )
        return cast("ChunkRows", made)

    def plan(self, rows: int, choices: int, experts: int) -> Plan:
        """Return room for the choices of a chunk."""
        key = ("plan", rows, choices, experts)
        if (made := self._made.get(key)) is None:
            made = self._made[key] = self._plan(rows, choices, experts)
        return cast("Plan", made)

    def _plan(self, rows: int, choices: int, experts: int) -> Plan:
        def ints(name: str, count: int, most: int) -> Tensor:
            return self.fixed(f"plan {name}", count, dtype=torch.int32, most=most)

        here, at_most = tiles(rows, choices, experts), tiles(self.most, choices, experts)
        return Plan(
            order=ints("order", rows * choices, self.most * choices),
            places=ints("places", rows * choices, self.most * choices),
            ends=ints("ends", experts, experts),
            tile_experts=ints("experts", here, at_most),
            tile_places=ints("firsts", here, at_most),
            counts=ints("counts", experts, experts),
        )

    def _view(self, name: str, most: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held, nbytes = self._held.get(name), most * dtype.itemsize
        if held is None or held.nbytes < nbytes:
            held = self._held[name] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            self._made.clear()  # some may lie in what was given up
        if len(self._made) >= MADE:
            self._made.clear()
        return held[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Outputs:
    """Where the sublayers of a chunk leave their outputs: the parts of a sum, one of each rank that shares the weights.

    A rank writes its own part; the others come by a join. Of two ranks there are two such pieces of room, which take
    turns from join to join; see `pair_chunk`.

    Args:
        rank: whose own part it is.
        ranks: S, of which there is a part.
        width: D.

    Attributes:
        piece: that is used next.
    """

    def __init__(self, room: ChunkRoom, width: int, *, rank: int = 0, ranks: int = 1) -> None:
        self._room, self._width, self._rank, self._ranks = room, width, rank, ranks
        self.piece = 0

    def parts(self, rows: int) -> Tensor:
        """Return all parts: [S, T, D] float32, with anything in them."""
        return self._room.tensor(f"y {self.piece}", rows, self._ranks, rows, self._width)

    def own(self, rows: int) -> Tensor:
        """Return this rank's part of them: [1, T, D]."""
        return self.parts(rows)[self._rank : self._rank + 1]

    def pass_on(self) -> None:
        """Let the next sublayer use the other piece of room, if there is one: a join of this one was launched."""
        self.piece = (self.piece + 1) % self._ranks


class Carry:
    """The way of the rows that a chunk needs of its past, from a ring of the sequence, and of those that it leaves.

    Args:
        count: rows before a chunk that it needs; the next one needs as many.
        held: rows of the sequence's ring.
    """

    def __init__(self, count: int, held: int, room: ChunkRoom) -> None:
        self.ring_rows = count + room.most
        self.held, self._room = held, room
        self._back = torch.arange(-count, 0, device=room.device)
        # before and behind the chunk: slots of the sequence's ring, and of the chunk's
        self._slots = [[torch.empty_like(self._back) for _ in range(2)] for _ in range(2)]
        self._positions = torch.empty_like(self._back)

    def refresh(self, position: Tensor, count: Tensor) -> None:
        """Launch what makes the slots anew for a chunk of `count` tokens at `position`, [1] int32 each."""
        for moved, (own, ours) in zip((None, count), self._slots, strict=True):
            torch.add(self._back, position, out=self._positions)
            if moved is not None:
                self._positions.add_(moved)
            # positions before 0 become position 0: the same row is copied to the same place several times
            self._positions.clamp_min_(0)
            torch.remainder(self._positions, self.held, out=own)
            torch.remainder(self._positions, self.ring_rows, out=ours)

    def ring(self, name: str, held: Tensor) -> Tensor:
        """Return the chunk's ring for rows as `held` has them."""
        return self._room.fixed(f"ring {name}", self.ring_rows, held.shape[1], dtype=held.dtype)

    def take(self, held: Tensor, ring: Tensor) -> None:
        """Copy the rows before the chunk into its ring."""
        own, ours = self._slots[0]
        self._copy(held, own, ring, ours)

    def leave(self, ring: Tensor, held: Tensor) -> None:
        """Copy the last rows of the chunk, and of what was before it, to the sequence."""
        own, ours = self._slots[1]
        self._copy(ring, ours, held, own)

    def _copy(self, source: Tensor, places: Tensor, target: Tensor, slots: Tensor) -> None:
        between = self._room.fixed("carried", len(places), source.shape[1], dtype=source.dtype)
        torch.index_select(source, 0, places, out=between)
        target.index_copy_(0, slots, between)


class ChunkInputs:
    """Where the rows of a chunk stand, as `StepInputs` says it of a step.

    A chunk may have more rows than tokens: those behind the last token are computed like the others, and nothing that
    they leave is looked at. So chunks of many lengths are launched alike.

    Attributes:
        given: [4 + most] int32, what the host sends: the first position, the number of tokens, two of nothing, the
            tokens.
        rows: T.
        position, count: [1] int32; tokens, slots: [T] int32, slots of the chunk's ring of key/value rows.
        window: carries key/value rows; sources: source rows, by ratio.
    """

    def __init__(self, config: ModelConfig, room: ChunkRoom, turns: Turns) -> None:
        device, self._room, self._turns = room.device, room, turns
        self.rows = 0
        self._rd = config.qk_rope_head_dim
        self._steps = torch.arange(room.most, dtype=torch.int32, device=device)
        self.given = torch.zeros(TOKENS_AT + room.most, dtype=torch.int32, device=device)
        self.position, self.count = self.given[:1], self.given[1:2]
        self.tokens, self.slots = self.given[TOKENS_AT:], self._steps
        self.window = Carry(config.sliding_window, window_rows(config), room)
        shapes: dict[int, CompressorShape] = {}
        for layer in range(config.num_hidden_layers):
            if (shape := layer_shape(config, layer).compressor) is not None:
                shapes[shape.ratio] = shape
        self.sources = {ratio: Carry(shape.reach, shape.source_rows, room) for ratio, shape in sorted(shapes.items())}

    def refresh(self, rows: int) -> None:
        """Launch what makes everything of `given` for a chunk of `rows` rows."""
        room = self._room
        self.rows = rows
        self.tokens = self.given[TOKENS_AT : TOKENS_AT + rows]
        positions = room.tensor("positions", rows, rows, dtype=torch.int32)
        torch.add(self._steps[:rows], self.position, out=positions)
        self.slots = room.tensor("slots", rows, rows, dtype=torch.int32)
        torch.remainder(positions, self.window.ring_rows, out=self.slots)
        torch.index_select(self._turns.plain, 1, positions, out=self._turn("plain"))
        torch.index_select(self._turns.compressed, 1, positions, out=self._turn("compressed"))
        firsts = room.tensor("firsts", rows, rows, dtype=torch.int32)
        for ratio, carry in self.sources.items():
            torch.div(positions, ratio, rounding_mode="floor", out=firsts)
            firsts.mul_(ratio)
            torch.index_select(self._turns.compressed, 1, firsts, out=self._turn(str(ratio)))
            torch.add(positions, 1, out=self.visible(ratio)).floor_divide_(ratio)
            carry.refresh(self.position, self.count)
        self.window.refresh(self.position, self.count)

    def turn(self, *, is_compressed: bool) -> Tensor:
        """Return the angles of the rows: [3, T, rd]."""
        return self._turn("compressed" if is_compressed else "plain")

    def entry_turn(self, ratio: int) -> Tensor:
        """Return the angles of the entry that each row would end: [3, T, rd]."""
        return self._turn(str(ratio))

    def visible(self, ratio: int) -> Tensor:
        """Return how many entries each row may see: [T] int32."""
        return self._room.tensor(f"visible {ratio}", self.rows, self.rows, dtype=torch.int32)

    def last(self, rows: int) -> Tensor:
        """Return the numbers of the last `rows` rows that are tokens: [rows] int64; of fewer tokens the first is there
        several times."""
        numbers = self._room.tensor("last", rows, rows, dtype=torch.int64)
        return torch.add(self._steps[:rows], self.count, out=numbers).sub_(rows).clamp_min_(0)

    def last_slots(self, rows: int) -> Tensor:
        """Return the slots of the same rows in a sequence's ring of key/value rows: [rows] int64."""
        slots = self._room.tensor("last slots", rows, rows, dtype=torch.int64)
        return torch.add(self.last(rows), self.position, out=slots).remainder_(self.window.held)

    def _turn(self, name: str) -> Tensor:
        return self._room.tensor(f"turn {name}", self.rows, 3, self.rows, self._rd)


class Sent:
    """Host buffers of chunks on their way: two, and what tells that a chunk is done."""

    def __init__(self, given: Tensor) -> None:
        self.is_cuda = given.device.type == "cuda"
        self._buffers = [torch.zeros(given.shape, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(2)]
        self._before: torch.cuda.Event | None = None

    def send(self, given: Tensor, tokens: Sequence[int], pos: int, rows: int) -> None:
        """Start the copy of a position and its tokens on the current stream; rows behind them hold token 0."""
        self._buffers.reverse()
        buffer = self._buffers[0][: TOKENS_AT + rows]
        head = [pos, len(tokens), 0, 0]
        buffer.copy_(torch.tensor([*head, *tokens, *[0] * (rows - len(tokens))], dtype=torch.int32))
        given[: len(buffer)].copy_(buffer, non_blocking=True)

    def wait(self, *, all_of_it: bool) -> None:
        """Wait until the chunk before the one that was launched last is done; or that one too."""
        if not self.is_cuda:
            return
        done = torch.cuda.Event()
        done.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = done
        if all_of_it:
            done.synchronize()
