"""Shapes of the caches, what of them is live, and what they take."""

from dataclasses import replace
from typing import Any

import pytest

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine.cache import (
    ENTRY_BLOCK,
    PREFILL_ROWS,
    blocks_for,
    layer_shape,
    layout,
    live_parts,
    state_bytes,
)
from dsv4nb.engine.state import CpuState


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


def test_entries_fill_whole_blocks() -> None:
    assert [blocks_for(n) for n in (0, 1, 128, 129, 256, 257, 1000)] == [0, 1, 1, 2, 2, 3, 8]


@pytest.mark.parametrize(
    ("pos", "window", "picked", "source", "pooled", "pooled_source"),
    [
        (0, (0, 0), 0, (0, 0), 0, (0, 0)),
        (3, (0, 3), 0, (0, 3), 0, (0, 3)),
        (4, (0, 4), 1, (0, 4), 0, (0, 4)),
        (130, (66, 130), 32, (124, 130), 1, (128, 130)),
        (256, (192, 256), 64, (252, 256), 2, (256, 256)),
    ],
)
def test_live_parts_are_what_a_later_position_needs(
    checkpoint: Checkpoint,
    pos: int,
    window: tuple[int, int],
    picked: int,
    source: tuple[int, int],
    pooled: int,
    pooled_source: tuple[int, int],
) -> None:
    """Window 64; an entry of ratio 4 also pools the four positions before its own."""
    assert {part.name: (part.first, part.last) for part in live_parts(checkpoint.config, pos)} == {
        "0.window": window,
        "1.window": window,
        "1.compressor.entries": (0, picked),
        "1.compressor.source": source,
        "1.indexer.entries": (0, picked),
        "1.indexer.source": source,
        "2.window": window,
        "2.compressor.entries": (0, pooled),
        "2.compressor.source": pooled_source,
    }


@pytest.mark.parametrize("positions", [0, 3, 4, 511, 512, 516, 20_000])
def test_h08_state_bytes_are_what_a_state_allocates(checkpoint: Checkpoint, positions: int) -> None:
    state = CpuState(checkpoint.config)
    state.reserve(positions)
    found = {"window": 0, "compressor": 0, "indexer": 0, "source": 0}
    for layer in state.layers:
        found["window"] += layer.window.nbytes
        for kind, cache in (("compressor", layer.compressor), ("indexer", layer.indexer)):
            if cache is not None:
                found["source"] += cache.source.nbytes
                found[kind] += len(cache.entries.blocks) * ENTRY_BLOCK * cache.entries.pool.rows[:1].nbytes
    assert state_bytes(checkpoint.config, positions) == found
    assert state.pools.in_use == sum(
        len(cache.entries.blocks)
        for layer in state.layers
        for cache in (layer.compressor, layer.indexer)
        if cache is not None
    )


def test_h08_growth_per_token_is_the_published_sum(checkpoint: Checkpoint) -> None:
    """Of a ratio-4 layer with its indexer, and a ratio-128 layer."""
    config = checkpoint.config
    block = 128 * ENTRY_BLOCK  # positions after which every cache has filled whole blocks
    before, after = (sum(state_bytes(config, positions).values()) for positions in (0, block))
    head, index = config.head_dim, config.index_head_dim
    assert (after - before) / block == 4 * (head / 4 + index / 4 + head / 128)


def test_the_layout_changes_with_what_decides_about_live_rows(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert layout(config) == "cache 1, float32, window 64 x 128, index 128, ratios 0,4,128"
    changes: list[dict[str, Any]] = [
        {"sliding_window": 32},
        {"head_dim": 64},
        {"index_head_dim": 64},
        {"compress_ratios": (0, 128, 4)},
        {"num_hidden_layers": 2},
    ]
    others = {layout(replace(config, **change)) for change in changes}
    assert len(others) == 5 and layout(config) not in others
