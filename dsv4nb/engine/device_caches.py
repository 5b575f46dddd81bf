"""The caches of one sequence on one GPU, addressed by absolute position, with room for the longest sequence.

Rings are those of `cache`. Entries lie in one piece, entry w in row w, because a captured graph holds addresses. So a
snapshot copies the entries that it needs and shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import ENTRY_BLOCK, CompressorShape, LayerShape, Part, blocks_for, layer_shape, live_parts

ROW_BYTES = 2  # bfloat16: window rows and entries
SOURCE_BYTES = 4  # float32


class EntryCache:
    """Source rows and finished entries of one compressor.

    Attributes:
        source: [source_rows, source_width] float32 ring.
        entries: [E, d] bfloat16, E whole blocks for the longest sequence.
    """

    def __init__(self, shape: CompressorShape, max_seq: int, device: torch.device) -> None:
        self.shape = shape
        self.source = torch.zeros(shape.source_rows, shape.source_width, device=device)
        count = max(blocks_for(max_seq // shape.ratio), 1) * ENTRY_BLOCK
        self.entries = torch.zeros(count, shape.entry_width, dtype=torch.bfloat16, device=device)


class LayerCaches:
    """The caches of one layer.

    Attributes:
        window: [window_rows, hd] bfloat16 ring of key/value rows.
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    def __init__(self, shape: LayerShape, max_seq: int, device: torch.device) -> None:
        self.window = torch.zeros(shape.window_rows, shape.window_width, dtype=torch.bfloat16, device=device)
        self.compressor = None if shape.compressor is None else EntryCache(shape.compressor, max_seq, device)
        self.indexer = None if shape.indexer is None else EntryCache(shape.indexer, max_seq, device)

    def buffers(self) -> Iterator[Tensor]:
        """In the order of `live_parts`."""
        yield self.window
        for cache in (self.compressor, self.indexer):
            if cache is not None:
                yield from (cache.entries, cache.source)


class Caches:
    """All caches of one sequence.

    Attributes:
        layers: one each.
        graphs: what was captured on these addresses, by the runner's key.
    """

    def __init__(self, config: ModelConfig, max_seq: int, device: torch.device) -> None:
        self._config, self.device = config, device
        self.layers = [
            LayerCaches(layer_shape(config, index), max_seq, device) for index in range(config.num_hidden_layers)
        ]
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers())

    def parts(self, pos: int) -> Iterator[tuple[Part, Tensor]]:
        """Yield every buffer and which of its rows a later position can see, in a fixed order."""
        buffers = (buffer for layer in self.layers for buffer in layer.buffers())
        yield from zip(live_parts(self._config, pos), buffers, strict=True)


def read_part(buffer: Tensor, part: Part) -> Tensor:
    """Return a copy of the rows of `part`, in order."""
    if part.is_entries:
        return buffer[part.first : part.last].clone()
    return torch.index_select(buffer, 0, _slots(buffer, part))


def write_part(buffer: Tensor, part: Part, rows: Tensor) -> None:
    """Put the rows of `part` where `read_part` finds them."""
    if part.is_entries:
        buffer[part.first : part.last] = rows
    else:
        buffer.index_copy_(0, _slots(buffer, part), rows)


def _slots(ring: Tensor, part: Part) -> Tensor:
    return torch.arange(part.first, part.last, device=ring.device) % ring.shape[0]


def value_bytes(part: Part) -> int:
    """Bytes of one value of `part`."""
    return SOURCE_BYTES if part.name.endswith(".source") else ROW_BYTES


def blocks_of(config: ModelConfig, pos: int) -> int:
    """Blocks of entries that a sequence of `pos` positions fills, the last of each cache partly."""
    return sum(blocks_for(part.last) for part in live_parts(config, pos) if part.is_entries)


def device_state_bytes(config: ModelConfig, positions: int) -> dict[str, int]:
    """Return what the caches of a sequence of so many positions take, by class: whole rings and whole blocks."""
    total = dict.fromkeys(("window", "compressor", "indexer", "source"), 0)
    for index in range(config.num_hidden_layers):
        shape = layer_shape(config, index)
        total["window"] += ROW_BYTES * shape.window_rows * shape.window_width
        for kind, cache in (("compressor", shape.compressor), ("indexer", shape.indexer)):
            if cache is not None:
                total["source"] += SOURCE_BYTES * cache.source_rows * cache.source_width
                rows = blocks_for(positions // cache.ratio) * ENTRY_BLOCK
                total[kind] += ROW_BYTES * rows * cache.entry_width
    return total


def device_layout(config: ModelConfig) -> str:
    """Return what fixes names, shapes and meaning of dumped rows, in one line."""
    ratios = ",".join(map(str, config.compress_ratios[: config.num_hidden_layers]))
    return (
        f"cache 1, bfloat16 as uint16, float32 source, window {config.sliding_window} x {config.head_dim},"
        f" index {config.index_head_dim}, ratios {ratios}"
    )
