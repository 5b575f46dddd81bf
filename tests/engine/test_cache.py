"""Shapes of the caches."""

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine.cache import ENTRY_BLOCK, PREFILL_ROWS, entry_capacity, layer_shape


def test_rings_hold_what_is_needed_and_one_chunk(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    plain, picked, pooled = (layer_shape(config, layer) for layer in range(3))
    assert plain.compressor is None and plain.indexer is None and pooled.indexer is None
    assert plain.window_rows == config.sliding_window + PREFILL_ROWS
    assert picked.compressor is not None and picked.indexer is not None and pooled.compressor is not None
    assert (picked.compressor.reach, pooled.compressor.reach) == (8, 128)
    assert picked.compressor.source_rows == 8 + PREFILL_ROWS
    assert picked.compressor.source_width == 4 * config.head_dim
    assert pooled.compressor.source_width == 2 * config.head_dim
    assert picked.indexer.source_width == 4 * config.index_head_dim


def test_entry_buffers_double(checkpoint: Checkpoint) -> None:
    shape = layer_shape(checkpoint.config, 1).compressor
    assert shape is not None
    capacities = [entry_capacity(shape, 4 * n) for n in (0, 128, 129, 256, 257, 1000)]
    assert capacities == [ENTRY_BLOCK * n for n in (1, 1, 2, 2, 4, 8)]
