"""The kernels that each extent has of its own: those that are compiled for a number of splits or of entries."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4nb.engine.device_caches import LayerCaches
from dsv4nb.engine.rank_layer import Step, choose, index_heads, mix_keys, score, shares_of
from dsv4nb.weights.rank_store import RankLayer
from dsv4nb_kernels.index_scores import KEYS
from dsv4nb_kernels.sparse_attention import Keys


def compile_extent(step: Step, layers: Iterable[tuple[RankLayer, LayerCaches]]) -> None:
    """Launch them once, of rows that see no entry: no forward of the extent compiles anything after it.

    Args:
        step: of the extent. It comes to stand at position 0, and nothing else is left of this.
        layers: with caches of any size, of which no entry is read.
    """
    step.inputs.given.zero_()
    step.inputs.refresh()
    done = set[int]()
    for weights, caches in layers:
        if caches.compressor is None or (ratio := caches.compressor.shape.ratio) in done:
            continue
        done.add(ratio)
        windows = step.inputs.windows[ratio]
        if windows.places is None:
            indexer, sources = weights.attention.indexer, weights.attention.sources
            assert caches.indexer is not None and indexer is not None and sources is not None
            shares = shares_of(step.product("source", sources), indexer)
            score(step, windows, index_heads(step), caches.indexer.entries[:KEYS], shares)
            choose(step, windows)
        else:
            mix_keys(step, weights.attention, caches, Keys(cache=caches.compressor.entries, places=windows.places))
