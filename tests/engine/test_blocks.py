"""Blocks of entries: sharing, copying before a write, growing, giving back."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine import blocks
from dsv4nb.engine.blocks import BlockPool, BlockTable, Pools
from dsv4nb.engine.cache import ENTRY_BLOCK, blocks_for
from dsv4nb.errors import EngineError

WIDTH = 3


def entries(first: int, count: int, mark: float = 0.0) -> Tensor:
    """Entries that say which they are and who wrote them."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None] + torch.tensor([0.0, 0.25, mark])


def filled(pool: BlockPool, count: int, mark: float = 0.0) -> BlockTable:
    table = BlockTable(pool)
    table.reserve(0, count)
    table.put(0, entries(0, count, mark))
    return table


def fork(table: BlockTable, count: int) -> BlockTable:
    other = BlockTable(table.pool)
    other.adopt(table, count)
    return other


def extend(table: BlockTable, kept: int, count: int, mark: float) -> None:
    table.reserve(kept, kept + count)
    table.put(kept, entries(kept, count, mark))


def no_memory(count: int, width: int) -> Tensor:
    raise MemoryError(f"{count} rows")


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 300])
def test_entries_come_back_by_range_by_number_and_by_block(count: int) -> None:
    pool = BlockPool(WIDTH)
    gap, other, _ = (filled(pool, 10, mark) for mark in (7.0, 8.0, 9.0))
    gap.release()  # so that blocks do not follow each other
    table = filled(pool, count)
    assert len(table.blocks) == blocks_for(count) and not set(table.blocks) & set(other.blocks)
    for first in range(0, count + 1, 31):
        for last in range(first, count + 1, 43):
            assert torch.equal(table.rows(first, last), entries(first, last - first))
    whole = list(table.whole(count))
    assert len(whole) == min(blocks_for(count), 2)  # one view for blocks that follow each other
    assert all(not part.shape[0] % ENTRY_BLOCK and part.data_ptr() >= pool.rows.data_ptr() for part in whole)
    assert torch.equal(torch.cat([pool.rows[:0], *whole])[:count], entries(0, count))
    if count:
        numbers = torch.tensor([[count - 1, 0], [count // 2, count // 3]])
        assert torch.equal(table.pick(numbers)[..., 0], numbers.float())


def test_a_range_in_one_block_is_no_copy() -> None:
    table = filled(BlockPool(WIDTH), 200)
    assert table.rows(128, 200).data_ptr() == table.pool.rows[128:].data_ptr()


def test_a_fork_copies_the_last_block_when_one_of_the_two_writes_and_no_other() -> None:
    pool = BlockPool(WIDTH)
    trunk = filled(pool, 300)
    branch = fork(trunk, 290)
    assert pool.in_use == 3 and branch.blocks == trunk.blocks
    extend(branch, 290, 20, 1.0)
    assert pool.in_use == 4 and branch.blocks[:2] == trunk.blocks[:2]
    extend(trunk, 300, 5, 2.0)  # the only holder of its last block by now: no copy
    assert pool.in_use == 4
    assert torch.equal(trunk.rows(0, 305), torch.cat((entries(0, 300), entries(300, 5, 2.0))))
    assert torch.equal(branch.rows(0, 310), torch.cat((entries(0, 290), entries(290, 20, 1.0))))


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    pool = BlockPool(WIDTH)
    trunk = filled(pool, 300)
    branch = fork(trunk, 256)
    assert branch.blocks == trunk.blocks[:2]
    extend(branch, 256, 1, 1.0)
    assert pool.in_use == 4 and branch.blocks[:2] == trunk.blocks[:2]


def test_entries_may_be_written_again_as_long_as_they_are_not_kept() -> None:
    table = filled(BlockPool(WIDTH), 130)
    extend(table, 120, 9, 5.0)
    assert len(table.blocks) == 2
    assert torch.equal(table.rows(0, 129), torch.cat((entries(0, 120), entries(120, 9, 5.0))))


def test_blocks_given_back_are_used_again() -> None:
    pool = BlockPool(WIDTH)
    table, branch = filled(pool, 300), filled(pool, 10)
    size = pool.rows.shape[0]
    for _ in range(2):
        table.release()
    assert table.is_released and pool.in_use == 1
    filled(pool, 300)
    assert pool.rows.shape[0] == size and not branch.is_released


def test_a_forgotten_table_gives_its_blocks_back() -> None:
    pool = BlockPool(WIDTH)
    table = filled(pool, 300)
    kept = fork(table, 140)
    del table
    gc.collect()
    assert pool.in_use == 2
    assert torch.equal(kept.rows(0, 140), entries(0, 140))


def test_a_released_table_cannot_be_shared() -> None:
    table = filled(BlockPool(WIDTH), 10)
    table.release()
    with pytest.raises(EngineError, match="were released"):
        fork(table, 10)


def test_h02_growing_moves_what_is_there() -> None:
    pool = BlockPool(WIDTH)
    tables = [filled(pool, 10, float(mark)) for mark in range(40)]
    assert pool.in_use == 40
    assert pool.rows.shape[0] < 1.5 * 41 * ENTRY_BLOCK
    for mark, table in enumerate(tables):
        assert torch.equal(table.rows(0, 10), entries(0, 10, float(mark)))


@pytest.mark.parametrize("stop", [129, 300])
def test_h02_a_pool_that_cannot_grow_is_as_before(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    pool = BlockPool(WIDTH)
    table = filled(pool, 128)
    branch = fork(table, 100)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "new_rows", no_memory)
        for one, kept, last in ((table, 128, stop), (branch, 100, 101)):
            with pytest.raises(MemoryError, match="rows"):
                one.reserve(kept, last)
        assert (pool.in_use, pool.rows.shape[0]) == (1, ENTRY_BLOCK)
        assert torch.equal(table.rows(0, 128), entries(0, 128))
        branch.release()
        table.reserve(100, 128)  # what fits still works
    extend(table, 128, stop - 128, 1.0)
    assert torch.equal(table.rows(0, 128), entries(0, 128)) and pool.in_use == blocks_for(stop)


Tables = list[tuple[BlockTable, list[float]]]  # with the mark of each entry


def step_of(rng: random.Random, tables: Tables, mark: float) -> None:
    """Write, after taking a few entries back; fork at any count; release or forget."""
    at = rng.randrange(len(tables))
    table, marks = tables[at]
    action = rng.random()
    if action < 0.6:
        del marks[rng.randint(max(len(marks) - 5, 0), len(marks)) :]
        count = rng.choice([1, 2, 3, 60, 128, 200])
        table.reserve(len(marks), len(marks) + count)
        table.put(len(marks), torch.full((count, WIDTH), mark))
        marks += [mark] * count
    elif action < 0.8:
        count = rng.randint(0, len(marks))
        tables.append((fork(table, count), marks[:count]))
    elif len(tables) > 1:
        if action < 0.9:
            table.release()
        del tables[at]


@pytest.mark.parametrize("seed", range(8))
def test_random_tables_never_meet(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(WIDTH)
    tables: Tables = [(BlockTable(pool), [])]
    for step in range(150):
        step_of(rng, tables, float(step))
        for table, expected in tables[-6:]:
            assert table.rows(0, len(expected))[:, 1].tolist() == expected
            assert table.pick(torch.arange(len(expected)))[:, 1].tolist() == expected
        del table
    held = {block for table, _ in tables for block in table.blocks}
    assert pool.in_use == len(held) > 1
    tables.clear()
    gc.collect()
    assert pool.in_use == 0


def test_tables_may_be_given_up_on_other_threads() -> None:
    pool = BlockPool(WIDTH)
    trunk = filled(pool, 100)
    given: list[BlockTable] = []
    lock, is_over = threading.Lock(), threading.Event()

    def give_up() -> None:
        while not is_over.is_set() or given:
            with lock:
                mine, given[:] = list(given), []
            for index, table in enumerate(mine):
                if index % 2:
                    table.release()
            assert pool.in_use >= 1

    thread = threading.Thread(target=give_up)
    thread.start()
    for step in range(150):
        branch = fork(trunk, 100)
        extend(branch, 100, 3, float(step))
        with lock:
            given.append(branch)
        del branch
    is_over.set()
    thread.join()
    gc.collect()
    assert pool.in_use == 1
    assert torch.equal(trunk.rows(0, 100), entries(0, 100))


def test_a_model_has_a_pool_per_layer_and_kind(checkpoint: Checkpoint) -> None:
    """Layers of ratio 0, 4 and 128."""
    config = checkpoint.config
    pools = Pools(config)
    has = [(layer.compressor is not None, layer.indexer is not None) for layer in pools.layers]
    assert has == [(False, False), (True, True), (True, False)]
    assert [pool.width for pool in pools] == [config.head_dim, config.index_head_dim, config.head_dim]
    tables = [BlockTable(pool) for pool in pools]
    for table in tables:
        table.reserve(0, 130)
    assert pools.in_use == 6
    for table in tables:
        table.release()
    assert pools.in_use == 0
