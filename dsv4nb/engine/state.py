"""CpuState: the caches of one sequence and its position.

Rows are written provisionally from `pos` on; committing n of them moves `pos`. What a rejected row wrote stays
and is never read: the window mask, the visible counts and the next writer of its slot hide it. For the same reason a
forward that fails half way needs no repair: whatever it wrote lies where no committed row is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.blocks import BlockPool, BlockTable, LayerPools, Pools
from dsv4nb.engine.cache import CompressorShape, LayerShape, Part, layer_shape, live_parts
from dsv4nb.engine.rings import DraftRings

Buffer = Tensor | BlockTable  # a ring of rows by position, or entries


class CompressorCache:
    """Source rows and finished entries of one compressor.

    Attributes:
        source: [source_rows, source_width] ring.
        entries: entry w covers positions ratio·w … ratio·w + ratio - 1.
    """

    def __init__(self, shape: CompressorShape, pool: BlockPool) -> None:
        self.shape = shape
        self.source = torch.empty(shape.source_rows, shape.source_width)
        self.entries = BlockTable(pool)

    def reserve(self, pos: int, stop: int) -> None:
        """Make room for the entries that positions `pos` … stop - 1 complete."""
        self.entries.reserve(pos // self.shape.ratio, stop // self.shape.ratio)


class LayerCache:
    """The caches of one layer.

    Attributes:
        window: [window_rows, hd] ring of key/value rows.
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    def __init__(self, shape: LayerShape, pools: LayerPools) -> None:
        self.window = torch.empty(shape.window_rows, shape.window_width)
        self.compressor = self.indexer = None
        if shape.compressor is not None and pools.compressor is not None:
            self.compressor = CompressorCache(shape.compressor, pools.compressor)
        if shape.indexer is not None and pools.indexer is not None:
            self.indexer = CompressorCache(shape.indexer, pools.indexer)


class CpuState:
    """One sequence on the CPU.

    Attributes:
        config: of the model.
        pools: where its entries lie; its own unless they are given.
        pos: committed positions.
        pending: rows of the last forward, provisional until `commit`.
        layers: the caches; none once the state is released.
        rings: what the drafter looks at; None without one.
    """

    def __init__(self, config: ModelConfig, pools: Pools | None = None, rings: DraftRings | None = None) -> None:
        self.config = config
        self.rings = rings
        self.pools = pools or Pools(config)
        self.pos = 0
        self.pending = 0
        self.layers = [LayerCache(layer_shape(config, i), own) for i, own in enumerate(self.pools.layers)]

    @property
    def is_released(self) -> bool:
        return not self.layers

    def release(self) -> None:
        """Give all caches back; idempotent."""
        for cache in self._compressors():
            cache.entries.release()
        self.layers, self.rings, self.pending = [], None, 0

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows from `pos` on.

        Raises:
            MemoryError, RuntimeError: there is no room; what is committed stays.
        """
        for cache in self._compressors():
            cache.reserve(self.pos, self.pos + rows)

    def commit(self, n: int) -> None:
        """Keep the first `n` of the pending rows and drop the others.

        Raises:
            ValueError: there are not that many.
        """
        if not 0 <= n <= self.pending:
            raise ValueError(f"cannot commit {n} rows; the last forward left {self.pending}")
        self.pos += n
        self.pending = 0

    def parts(self) -> Iterator[tuple[Part, Buffer]]:
        """Yield every buffer and which of its rows a later position can see, in a fixed order."""
        if self.rings is not None:
            self.rings.catch_up(self.pos)
        parts = live_parts(self.config, self.pos, has_drafter=self.rings is not None)
        yield from zip(parts, self._buffers(), strict=True)

    def live(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every cached value that a later position can see, by name and in a fixed order."""
        for part, buffer in self.parts():
            yield part.name, read_rows(buffer, part)

    def digest(self) -> str:
        """Return the SHA-256 of the position and all live values: equal states, equal digests."""
        hasher = hashlib.sha256(f"pos {self.pos}\n".encode())
        for name, rows in self.live():
            hasher.update(f"{name} {tuple(rows.shape)}\n".encode())
            hasher.update(rows.contiguous().numpy().tobytes())
        return hasher.hexdigest()

    def close_to(self, other: CpuState, tolerance: float) -> bool:
        """Whether both stand at one position with live values within `tolerance` of each tensor's largest."""
        if self.pos != other.pos:
            return False
        return all(
            name == other_name and _are_close(rows, other_rows, tolerance)
            for (name, rows), (other_name, other_rows) in zip(self.live(), other.live(), strict=True)
        )

    def _compressors(self) -> Iterator[CompressorCache]:
        for layer in self.layers:
            yield from (cache for cache in (layer.compressor, layer.indexer) if cache is not None)

    def _buffers(self) -> Iterator[Buffer]:
        """In the order of `live_parts`."""
        for layer in self.layers:
            yield layer.window
            for cache in (layer.compressor, layer.indexer):
                if cache is not None:
                    yield from (cache.entries, cache.source)
        if self.rings is not None:
            yield from self.rings.rows


def read_rows(buffer: Buffer, part: Part) -> Tensor:
    """Return the rows of `part` in order; of entries, a view where one will do."""
    if isinstance(buffer, BlockTable):
        return buffer.rows(part.first, part.last)
    return buffer[_slots(buffer, part)]


def write_rows(buffer: Buffer, part: Part, rows: Tensor) -> None:
    """Put the rows of `part` where `read_rows` finds them; there is room for them."""
    if isinstance(buffer, BlockTable):
        buffer.put(part.first, rows)
    else:
        buffer[_slots(buffer, part)] = rows


def _slots(ring: Tensor, part: Part) -> Tensor:
    return torch.arange(part.first, part.last) % ring.shape[0]


def _are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not a.numel():
        return True
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
