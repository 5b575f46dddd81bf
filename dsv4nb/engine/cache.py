"""Shapes of the caches of one sequence, pure (model.md 5; dspark.md 3.6, design 1).

Rings are addressed by absolute position: the row of position p lies in slot p mod rows. A ring holds what the
next row can still need plus one chunk of rows that may yet be rejected, so no write displaces a row in use.
Entries are never displaced; they lie in blocks, which sequences of one start share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig

PREFILL_ROWS = 256  # rows of one prefill chunk, the most that one forward writes
ENTRY_BLOCK = 128  # entries per block: one product of index keys, and a multiple of every split of the attention
VALUE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorShape:
    """The cache of one compressor.

    Attributes:
        ratio: positions per entry.
        reach: source positions one entry pools: its own and, at ratio 4, those of the window before.
        source_rows, source_width: the ring of source rows; values, then scores.
        entry_width: of one entry.
    """

    ratio: int
    reach: int
    source_rows: int
    source_width: int
    entry_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The caches of one layer.

    Attributes:
        window_rows, window_width: the ring of key/value rows.
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    window_rows: int
    window_width: int
    compressor: CompressorShape | None
    indexer: CompressorShape | None


def window_rows(config: ModelConfig) -> int:
    """Return the rows of the ring of key/value rows, the same on every layer."""
    return config.sliding_window + PREFILL_ROWS


def layer_shape(config: ModelConfig, layer: int) -> LayerShape:
    """Return the cache shapes of trunk layer `layer`."""
    ratio = config.compress_ratios[layer]
    return LayerShape(
        window_rows=window_rows(config),
        window_width=config.head_dim,
        compressor=_compressor_shape(ratio, config.head_dim) if ratio else None,
        indexer=_compressor_shape(ratio, config.index_head_dim) if ratio == 4 else None,
    )


def _compressor_shape(ratio: int, width: int) -> CompressorShape:
    overlap = 2 if ratio == 4 else 1
    return CompressorShape(
        ratio=ratio,
        reach=overlap * ratio,
        source_rows=overlap * ratio + PREFILL_ROWS,
        source_width=2 * overlap * width,
        entry_width=width,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one buffer that later positions can see.

    Attributes:
        name: layer, cache and buffer: "3.window", "3.compressor.entries", "3.indexer.source".
        first, last: rows first … last - 1; by absolute position in a ring, by number among entries.
        width: values per row.
    """

    name: str
    first: int
    last: int
    width: int

    @property
    def is_entries(self) -> bool:
        return self.name.endswith(".entries")

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.width


def live_parts(config: ModelConfig, pos: int, *, has_drafter: bool = False) -> Iterator[Part]:
    """Yield, in a fixed order, what is needed to go on after `pos` positions.

    Args:
        has_drafter: with the context rows that the drafter looks at.
    """
    first = max(pos - config.sliding_window, 0)
    for index in range(config.num_hidden_layers):
        shape = layer_shape(config, index)
        yield Part(name=f"{index}.window", first=first, last=pos, width=shape.window_width)
        for kind, cache in (("compressor", shape.compressor), ("indexer", shape.indexer)):
            if cache is not None:
                yield from _compressor_parts(f"{index}.{kind}", cache, pos)
    for stage in range(DSPARK_STAGES if has_drafter else 0):
        yield Part(name=f"mtp.{stage}.window", first=first, last=pos, width=config.head_dim)


def _compressor_parts(name: str, shape: CompressorShape, pos: int) -> Iterator[Part]:
    """Entries, and the source rows that a later entry pools."""
    entries = pos // shape.ratio
    yield Part(name=f"{name}.entries", first=0, last=entries, width=shape.entry_width)
    first = max(entries * shape.ratio - (shape.reach - shape.ratio), 0)
    yield Part(name=f"{name}.source", first=first, last=pos, width=shape.source_width)


def tap_width(config: ModelConfig) -> int:
    """Return the values that one position leaves for the drafter's context rows."""
    assert config.dspark is not None
    return len(config.dspark.target_layer_ids) * config.hidden_size


def state_bytes(config: ModelConfig, positions: int, *, has_drafter: bool = False) -> dict[str, int]:
    """Return the bytes of one sequence's caches by class: whole rings, and whole blocks for `positions` positions."""
    total = dict.fromkeys(("window", "compressor", "indexer", "source"), 0)
    for index in range(config.num_hidden_layers):
        shape = layer_shape(config, index)
        total["window"] += VALUE_BYTES * shape.window_rows * shape.window_width
        for kind, cache in (("compressor", shape.compressor), ("indexer", shape.indexer)):
            if cache is not None:
                total["source"] += VALUE_BYTES * cache.source_rows * cache.source_width
                rows = blocks_for(positions // cache.ratio) * ENTRY_BLOCK
                total[kind] += VALUE_BYTES * rows * cache.entry_width
    if has_drafter:
        total["drafter"] = VALUE_BYTES * window_rows(config) * (tap_width(config) + DSPARK_STAGES * config.head_dim)
    return total


def blocks_for(entries: int) -> int:
    """Return how many blocks hold so many entries."""
    return -(-entries // ENTRY_BLOCK)


def whole_blocks(entries: int) -> int:
    """Return the entries of the blocks that hold so many; of one block at least."""
    return max(blocks_for(entries), 1) * ENTRY_BLOCK


def layout(config: ModelConfig, *, has_drafter: bool = False) -> str:
    """Return what fixes names, shapes and meaning of live rows, in one line; ring sizes and blocks do not."""
    ratios = ",".join(map(str, config.compress_ratios[: config.num_hidden_layers]))
    return (
        f"cache 1, float32, window {config.sliding_window} x {config.head_dim}, index {config.index_head_dim},"
        f" ratios {ratios}{f', drafter {DSPARK_STAGES}' if has_drafter else ''}"
    )
