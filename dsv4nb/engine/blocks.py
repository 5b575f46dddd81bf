"""Compressed entries in reference-counted blocks, so that sequences of one start share them.

A finished entry never changes. So a block of `ENTRY_BLOCK` entries below the committed count is written no more, and
any number of sequences and snapshots can hold it. Only the last, partly filled block of a sequence can be shared
and still be due for writing; whoever writes first copies it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import ENTRY_BLOCK, LayerShape, blocks_for, layer_shape
from dsv4nb.errors import EngineError


class BlockPool:
    """The blocks of one layer's compressor or indexer.

    It grows by half its size, at least by one block, and never shrinks; blocks given back are used again. When it
    cannot grow everything in it stays as it was.

    Attributes:
        rows: [blocks · ENTRY_BLOCK, width]; another tensor after it has grown.
        returned: what tables gave back and no pool has counted yet; a table may be forgotten on any thread.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = new_rows(0, width)
        self.returned: deque[list[int]] = deque()
        self._holders: list[int] = []  # by block
        self._free: list[int] = []
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """Blocks that something holds."""
        with self._lock:
            self._collect()
            return len(self._holders) - len(self._free)

    def take(self) -> int:
        """Return a block of the caller's own, with anything in it.

        Raises:
            MemoryError, RuntimeError: there is no room.
        """
        with self._lock:
            self._collect()
            if not self._free:
                self._grow()
            block = self._free.pop()
            self._holders[block] = 1
            return block

    def share(self, table: BlockTable, count: int) -> list[int]:
        """Count one more holder of the first `count` blocks of `table` and return them.

        Raises:
            EngineError: the table was released; other threads may do that at any time.
        """
        with self._lock:
            if table.is_released:
                raise EngineError("these entries were released; keep the state or the snapshot until it is restored")
            blocks = table.blocks[:count]
            for block in blocks:
                self._holders[block] += 1
            return blocks

    def has_one_holder(self, block: int) -> bool:
        """Whether `block` may be written by who asks, being one of its holders."""
        with self._lock:
            self._collect()
            return self._holders[block] == 1

    def copy(self, block: int, rows: int) -> int:
        """Give up a share of `block` for a block of the caller's own that begins with the same `rows` entries."""
        own = self.take()
        kept, start = block * ENTRY_BLOCK, own * ENTRY_BLOCK
        self.rows[start : start + rows] = self.rows[kept : kept + rows]
        self.returned.append([block])
        return own

    def _grow(self) -> None:
        blocks = len(self._holders)
        more = max(blocks // 2, 1)
        rows = new_rows((blocks + more) * ENTRY_BLOCK, self.width)
        rows[: blocks * ENTRY_BLOCK] = self.rows
        self.rows = rows
        self._holders += [0] * more
        self._free += reversed(range(blocks, blocks + more))

    def _collect(self) -> None:
        while self.returned:
            for block in self.returned.popleft():
                self._holders[block] -= 1
                if not self._holders[block]:
                    self._free.append(block)


class BlockTable:
    """The entries of one sequence, or of one snapshot, in a pool.

    Its blocks go back when it is released or forgotten.

    Attributes:
        blocks: entry w is row w mod ENTRY_BLOCK of block w div ENTRY_BLOCK of these.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self._row_of: Tensor | None = None  # [entries] row of the pool, made when asked for
        self._give_back = weakref.finalize(self, pool.returned.append, self.blocks)
        self._give_back.atexit = False

    @property
    def is_released(self) -> bool:
        return not self._give_back.alive

    def release(self) -> None:
        """Give the blocks back; idempotent, from any thread. The table is not used any more."""
        self._give_back()

    def adopt(self, other: BlockTable, count: int) -> None:
        """Share the first `count` entries of `other`; this table is empty.

        Raises:
            EngineError: `other` was released.
        """
        assert not self.blocks, self.blocks
        self.blocks += self.pool.share(other, blocks_for(count))

    def reserve(self, kept: int, stop: int) -> None:
        """Make room to write entries `kept` … stop - 1; those before `kept` stay.

        Raises:
            MemoryError, RuntimeError: there is no room; the entries before `kept` stay, here and in other tables.
        """
        if kept >= stop:
            return
        for index in range(kept // ENTRY_BLOCK, blocks_for(stop)):
            if index == len(self.blocks):
                self.blocks.append(self.pool.take())
            elif not self.pool.has_one_holder(self.blocks[index]):
                self.blocks[index] = self.pool.copy(self.blocks[index], max(kept - index * ENTRY_BLOCK, 0))
            else:
                continue
            self._row_of = None

    def put(self, first: int, entries: Tensor) -> None:
        """Write entries [n, width] from number `first` on, where there is room for them."""
        done = 0
        for rows in self._spans(first, first + entries.shape[0]):
            rows.copy_(entries[done : done + rows.shape[0]])
            done += rows.shape[0]

    def rows(self, first: int, last: int) -> Tensor:
        """Return entries `first` … last - 1; a view where one will do, valid until the pool grows."""
        spans = list(self._spans(first, last))
        return spans[0] if len(spans) == 1 else torch.cat([self.pool.rows[:0], *spans])

    def whole(self, count: int) -> Iterator[Tensor]:
        """Yield views [n·ENTRY_BLOCK, width] until they hold `count` entries; the rest of the last holds anything."""
        return self._spans(0, blocks_for(count) * ENTRY_BLOCK)

    def pick(self, numbers: Tensor) -> Tensor:
        """Return the entries of these numbers: int64 of any shape -> [..., width]."""
        if self._row_of is None:
            starts = torch.tensor(self.blocks, dtype=torch.int64) * ENTRY_BLOCK
            self._row_of = (starts[:, None] + torch.arange(ENTRY_BLOCK)).flatten()
        return self.pool.rows[self._row_of[numbers]]

    def _spans(self, first: int, last: int) -> Iterator[Tensor]:
        """Yield entries `first` … last - 1 as views, one for blocks that follow each other in the pool."""
        while first < last:
            block, within = divmod(first, ENTRY_BLOCK)
            start = self.blocks[block] * ENTRY_BLOCK + within
            stop = block + 1
            while stop * ENTRY_BLOCK < last and self.blocks[stop] == self.blocks[stop - 1] + 1:
                stop += 1
            count = min(last, stop * ENTRY_BLOCK) - first
            yield self.pool.rows[start : start + count]
            first += count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPools:
    """The pools of one layer; None where it has no such cache."""

    compressor: BlockPool | None
    indexer: BlockPool | None


class Pools:
    """The pools of a model's layers, for all sequences of an engine."""

    def __init__(self, config: ModelConfig) -> None:
        self.layers = [_layer_pools(layer_shape(config, index)) for index in range(config.num_hidden_layers)]

    @property
    def in_use(self) -> int:
        """Blocks that some sequence or snapshot holds."""
        return sum(pool.in_use for pool in self)

    def __iter__(self) -> Iterator[BlockPool]:
        for layer in self.layers:
            yield from (pool for pool in (layer.compressor, layer.indexer) if pool is not None)


def _layer_pools(shape: LayerShape) -> LayerPools:
    return LayerPools(
        compressor=None if shape.compressor is None else BlockPool(shape.compressor.entry_width),
        indexer=None if shape.indexer is None else BlockPool(shape.indexer.entry_width),
    )


def new_rows(count: int, width: int) -> Tensor:
    """Allocate rows that hold anything; the one place where entries get memory."""
    return torch.empty(count, width)
