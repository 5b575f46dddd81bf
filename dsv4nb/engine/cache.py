"""Shapes of the caches of one sequence, pure (model.md 5; dspark.md 3.6, design 1).

Rings are addressed by absolute position: the row of position p lies in slot p mod rows. A ring holds what the
next row can still need plus one chunk of rows that may yet be rejected, so no write displaces a row in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4nb.checkpoint.config import ModelConfig

PREFILL_ROWS = 256  # rows of one prefill chunk, the most that one forward writes
ENTRY_BLOCK = 128  # entry buffers grow by doubling from this many rows


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


def entry_capacity(shape: CompressorShape, positions: int) -> int:
    """Return the rows of an entry buffer for `positions` positions: a doubling of `ENTRY_BLOCK`."""
    capacity = ENTRY_BLOCK
    while capacity < positions // shape.ratio:
        capacity *= 2
    return capacity
