"""Commit, digest and comparison of one sequence's caches."""

import gc
from collections.abc import Callable

import pytest
import torch

from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.state import CpuState

MakeEngine = Callable[..., CpuEngine]


@pytest.fixture
def engine(make_engine: MakeEngine) -> CpuEngine:
    return make_engine()


def buffers(state: CpuState) -> list[torch.Tensor]:
    found = []
    for layer in state.layers:
        found.append(layer.window)
        for cache in (layer.compressor, layer.indexer):
            if cache is not None:
                found += [cache.source, cache.entries.pool.rows]
    return found


def test_the_digest_sees_every_live_value_and_nothing_else(engine: CpuEngine, prompt: list[int]) -> None:
    state = engine.new_state()
    engine.prefill(state, prompt[:301])
    digest = state.digest()
    live = {name: rows.shape[0] for name, rows in state.live()}
    assert live == {
        "0.window": 64,
        "1.window": 64,
        "1.compressor.entries": 75,
        "1.compressor.source": 5,  # the window before and one row of the unfinished one
        "1.indexer.entries": 75,
        "1.indexer.source": 5,
        "2.window": 64,
        "2.compressor.entries": 2,
        "2.compressor.source": 45,
    }
    with torch.inference_mode():
        for buffer in buffers(state):
            seen = 0
            for row in range(buffer.shape[0]):
                kept = buffer[row, 0].clone()
                buffer[row, 0] = 12345.0
                seen += state.digest() != digest
                buffer[row, 0] = kept
            assert seen in live.values()
    assert state.digest() == digest


def test_positions_alone_change_the_digest(engine: CpuEngine) -> None:
    a, b = engine.new_state(), engine.new_state()
    assert a.digest() == b.digest()
    b.pos = 1
    b.layers[0].window.zero_()
    assert a.digest() != b.digest()


def test_commit_takes_no_more_than_there_is(engine: CpuEngine, prompt: list[int]) -> None:
    state = engine.new_state()
    engine.forward_rows(state, prompt[:3])
    for n in (-1, 4):
        with pytest.raises(ValueError, match="cannot commit"):
            state.commit(n)
    state.commit(2)
    assert (state.pos, state.pending) == (2, 0)


def test_a_released_state_holds_nothing(engine: CpuEngine, prompt: list[int]) -> None:
    state = engine.new_state()
    engine.prefill(state, prompt[:130])
    assert state.pools.in_use == 3
    for _ in range(2):
        state.release()
        assert (state.is_released, state.layers, state.pools.in_use) == (True, [], 0)


def test_a_forgotten_state_gives_its_blocks_back(engine: CpuEngine, prompt: list[int]) -> None:
    state = engine.new_state()
    engine.prefill(state, prompt[:130])
    del state
    gc.collect()
    assert engine.blocks_in_use == 0


def test_close_to_compares_within_a_tolerance(engine: CpuEngine, prompt: list[int]) -> None:
    a, b = engine.new_state(), engine.new_state()
    for state in (a, b):
        engine.prefill(state, prompt[:130])
    assert a.close_to(b, 0.0)
    compressor = b.layers[2].compressor
    assert compressor is not None
    with torch.inference_mode():
        compressor.entries.rows(0, 1)[:] *= 1 + 1e-4
    assert a.close_to(b, 1e-3)
    assert not a.close_to(b, 1e-5)
    engine.prefill(b, prompt[:1])
    assert not a.close_to(b, 1e9)
