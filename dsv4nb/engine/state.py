"""DecodeState: the caches of one sequence and its position.

Rows are written provisionally from `pos` on; committing n of them moves `pos`. What a rejected row wrote stays
and is never read: the window mask, the visible counts and the next writer of its slot hide it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import CompressorShape, LayerShape, entry_capacity, layer_shape


class CompressorCache:
    """Source rows and finished entries of one compressor.

    Attributes:
        source: [source_rows, source_width] ring.
        entries: [capacity, entry_width]; entry w covers positions ratio·w … ratio·w + ratio - 1.
    """

    def __init__(self, shape: CompressorShape) -> None:
        self.shape = shape
        self.source = torch.empty(shape.source_rows, shape.source_width)
        self.entries = torch.empty(entry_capacity(shape, 0), shape.entry_width)

    def reserve(self, pos: int, stop: int) -> None:
        """Make room for the entries of positions before `stop`, keeping those before `pos`."""
        capacity = entry_capacity(self.shape, stop)
        if capacity > self.entries.shape[0]:
            grown = torch.empty(capacity, self.shape.entry_width)
            kept = pos // self.shape.ratio
            grown[:kept] = self.entries[:kept]
            self.entries = grown

    def live(self, pos: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what positions before `pos` left: entries, and source rows that a later entry pools."""
        ratio = self.shape.ratio
        yield "entries", self.entries[: pos // ratio]
        first = max(pos // ratio * ratio - (self.shape.reach - ratio), 0)
        yield "source", ring_rows(self.source, first, pos)


class LayerCache:
    """The caches of one layer.

    Attributes:
        window: [window_rows, hd] ring of key/value rows.
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    def __init__(self, shape: LayerShape) -> None:
        self.window = torch.empty(shape.window_rows, shape.window_width)
        self.compressor = CompressorCache(shape.compressor) if shape.compressor else None
        self.indexer = CompressorCache(shape.indexer) if shape.indexer else None


class CpuState:
    """One sequence on the CPU.

    Attributes:
        pos: committed positions.
        pending: rows of the last forward, provisional until `commit`.
        layers: the caches.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.pos = 0
        self.pending = 0
        self.layers = [LayerCache(layer_shape(config, layer)) for layer in range(config.num_hidden_layers)]
        self._window = config.sliding_window

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows from `pos` on."""
        for layer in self.layers:
            for cache in (layer.compressor, layer.indexer):
                if cache is not None:
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

    def live(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every cached value that a later position can see, by name and in a fixed order."""
        for index, layer in enumerate(self.layers):
            yield f"{index}.window", ring_rows(layer.window, max(self.pos - self._window, 0), self.pos)
            for kind, cache in (("compressor", layer.compressor), ("indexer", layer.indexer)):
                if cache is not None:
                    for part, rows in cache.live(self.pos):
                        yield f"{index}.{kind}.{part}", rows

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


def ring_rows(ring: Tensor, first: int, last: int) -> Tensor:
    """Return the rows of positions first … last - 1, in order."""
    return ring[torch.arange(first, last) % ring.shape[0]]


def _are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not a.numel():
        return True
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
