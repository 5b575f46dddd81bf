"""The caches of one sequence on one GPU, addressed by absolute position, with room for the longest sequence.

Rings are those of `cache`. Entries lie in one piece, entry w in row w, because a captured graph holds addresses. So a
snapshot copies the entries that it needs and shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.engine.cache import (
    ENTRY_BLOCK,
    CompressorShape,
    LayerShape,
    Part,
    blocks_for,
    layer_shape,
    live_parts,
    tap_width,
    window_rows,
)

ROW_BYTES = 2  # bfloat16: window rows and entries
SOURCE_BYTES = 4  # float32
BLOCK_ROWS = 8  # rows of a drafter's stage behind its ring


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


class DraftCaches:
    """What the drafter looks at.

    Attributes:
        taps: [C, K·D] bfloat16 ring of what the tapped layers left.
        stages: one each; their windows hold the context rows, and `BLOCK_ROWS` rows behind the ring for what no
            position owns: a block, and rows that are made to no purpose.
    """

    def __init__(self, config: ModelConfig, max_seq: int, device: torch.device) -> None:
        length = window_rows(config)
        self.taps = torch.zeros(length, tap_width(config), dtype=torch.bfloat16, device=device)
        shape = LayerShape(window_rows=length + BLOCK_ROWS, window_width=config.head_dim, compressor=None, indexer=None)
        self.stages = [LayerCaches(shape, max_seq, device) for _ in range(DSPARK_STAGES)]
        self._length = length

    def rings(self) -> Iterator[Tensor]:
        """Yield the context rows of each stage: [C, hd]."""
        for stage in self.stages:
            yield stage.window[: self._length]

    def buffers(self) -> Iterator[Tensor]:
        """Yield everything there is."""
        yield self.taps
        for stage in self.stages:
            yield from stage.buffers()


class Caches:
    """All caches of one sequence.

    Attributes:
        layers: one each.
        draft: what a drafter needs; None without one.
        graphs: what was captured on these addresses, by the runner's key.
        mirrors: the same on the other GPUs that share the weights, which compute and write the same bits.
    """

    def __init__(self, config: ModelConfig, max_seq: int, device: torch.device, *, has_drafter: bool = False) -> None:
        self._config, self.device = config, device
        self.layers = [
            LayerCaches(layer_shape(config, index), max_seq, device) for index in range(config.num_hidden_layers)
        ]
        self.draft = DraftCaches(config, max_seq, device) if has_drafter else None
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self.mirrors: tuple[Caches, ...] = ()

    @classmethod
    def on(cls, config: ModelConfig, max_seq: int, devices: Sequence[torch.device], *, has_drafter: bool) -> Caches:
        """Return those on the first of `devices`, with mirrors on the others."""
        first, *mirrors = (cls(config, max_seq, device, has_drafter=has_drafter) for device in devices)
        first.mirrors = tuple(mirrors)
        return first

    @property
    def copies(self) -> tuple[Caches, ...]:
        """Those of every GPU, the first one's first."""
        return (self, *self.mirrors)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for owner in self._owners() for buffer in owner.buffers())

    def parts(self, pos: int) -> Iterator[tuple[Part, Tensor]]:
        """Yield every buffer and which of its rows a later position can see, in a fixed order; no taps."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers()]
        if self.draft is not None:
            buffers += self.draft.rings()
        yield from zip(live_parts(self._config, pos, has_drafter=self.draft is not None), buffers, strict=True)

    def _owners(self) -> Iterator[LayerCaches | DraftCaches]:
        yield from self.layers
        if self.draft is not None:
            yield self.draft


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


def device_state_bytes(config: ModelConfig, positions: int, *, has_drafter: bool = False) -> dict[str, int]:
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
    if has_drafter:
        length = window_rows(config)
        rows = DSPARK_STAGES * (length + BLOCK_ROWS)
        total["drafter"] = ROW_BYTES * (length * tap_width(config) + rows * config.head_dim)
    return total


def device_layout(config: ModelConfig, *, has_drafter: bool = False) -> str:
    """Return what fixes names, shapes and meaning of dumped rows, in one line."""
    ratios = ",".join(map(str, config.compress_ratios[: config.num_hidden_layers]))
    return (
        f"cache 1, bfloat16 as uint16, float32 source, window {config.sliding_window} x {config.head_dim},"
        f" index {config.index_head_dim}, ratios {ratios}{f', drafter {DSPARK_STAGES}' if has_drafter else ''}"
    )
