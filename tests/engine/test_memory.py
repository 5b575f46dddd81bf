"""What the caches take, against the tensors themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine.blocks import BlockTable
from dsv4nb.engine.cache import ENTRY_BLOCK
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.memory import Counted, DeviceBytes
from dsv4nb.engine.snapshot import CpuSnapshot
from dsv4nb.engine.state import CpuState

MakeEngine = Callable[..., CpuEngine]


@pytest.fixture
def drafting(dspark_checkpoint: Checkpoint) -> Iterator[CpuEngine]:
    engine = CpuEngine.from_checkpoint(dspark_checkpoint, max_seq=1024)
    yield engine
    engine.close()


def count(engine: CpuEngine) -> DeviceBytes:
    gc.collect()
    assert isinstance(engine, Counted)
    (device,) = engine.cache_bytes()
    return device


def used(engine: CpuEngine) -> dict[str, int]:
    return {name: part.used for name, part in count(engine).classes.items()}


@pytest.mark.parametrize("length", [1, 3, 4, 127, 128, 300, 513])
def test_a_state_takes_what_the_engine_says_it_does(drafting: CpuEngine, prompt: list[int], length: int) -> None:
    assert count(drafting).used == count(drafting).reserved == 0
    state = drafting.new_state()
    drafting.prefill(state, (2 * prompt)[:length])
    assert used(drafting) == drafting.state_bytes(length)
    drafting.release(state)
    assert count(drafting).used == 0


def test_without_a_drafter_there_is_no_such_class(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, prompt[:200])
    assert used(engine) == engine.state_bytes(200)


def test_snapshots_add_their_own_rows_and_share_the_blocks(drafting: CpuEngine, prompt: list[int]) -> None:
    state = drafting.new_state()
    drafting.prefill(state, prompt[:300])
    alone = used(drafting)
    first = drafting.capture(state)
    drafting.prefill(state, prompt[300:310])
    second = drafting.capture(state)
    restored = drafting.restore(first)
    assert isinstance(first, CpuSnapshot) and isinstance(second, CpuSnapshot) and isinstance(restored, CpuState)

    rings: dict[str, int] = dict.fromkeys(alone, 0)
    blocks: dict[int, set[int]] = {}
    names = {
        id(pool): name
        for layer in drafting._pools.layers
        for name in ("compressor", "indexer")
        if (pool := getattr(layer, name))
    }
    for held in (first, second):
        for part, rows in held.parts:
            if isinstance(rows, Tensor):
                rings["drafter" if part.name.startswith("mtp") else part.name.split(".")[-1]] += rows.numel() * 4
    for one in (state, restored):
        assert isinstance(one, CpuState)
        for name in ("window", "source", "drafter"):
            rings[name] += drafting.state_bytes(0)[name]
    tables = [rows for held in (first, second) for _, rows in held.parts if isinstance(rows, BlockTable)]
    for one in (state, restored):
        assert isinstance(one, CpuState)
        tables += [cache.entries for layer in one.layers for cache in (layer.compressor, layer.indexer) if cache]
    for table in tables:
        blocks.setdefault(id(table.pool), set()).update(table.blocks)
    for pool in drafting._pools:
        rings[names[id(pool)]] += len(blocks[id(pool)]) * ENTRY_BLOCK * pool.width * 4
    told = count(drafting)
    assert {name: part.used for name, part in told.classes.items()} == rings
    assert told.used == sum(rings.values()) <= told.reserved
    for name in ("compressor", "indexer"):
        pools = [pool for pool in drafting._pools if names[id(pool)] == name]
        assert told.classes[name].reserved == sum(pool.rows.numel() * pool.rows.element_size() for pool in pools)

    for snapshot in (first, second):
        snapshot.release()
    drafting.release(restored)
    drafting.release(state)
    assert count(drafting).used == 0


def test_what_is_forgotten_counts_no_more(drafting: CpuEngine, prompt: list[int]) -> None:
    state = drafting.new_state()
    drafting.prefill(state, prompt[:20])
    snapshot = drafting.load(drafting.dump(drafting.capture(state)), 20)
    assert snapshot.pos == 20
    del state, snapshot
    assert count(drafting).used == 0
    assert torch.is_grad_enabled()
