"""Snapshots: whole, independent, cheap at any position, refused by name (C-12, A-11)."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import FP32_FULL
from dsv4nb.engine import blocks
from dsv4nb.engine.blocks import BlockTable
from dsv4nb.engine.cache import ENTRY_BLOCK, blocks_for
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.engine.snapshot import CpuSnapshot
from dsv4nb.engine.state import CpuState
from dsv4nb.errors import EngineError

MakeEngine = Callable[..., CpuEngine]

PREFIXES = [1, 3, 127, 128, 129, 511, 512, 700]  # the last ones have full and partly filled blocks
STEPS = 9  # behind a prefix: they complete two entries of ratio 4, and pass every edge that a prefix stands before
POOLS = 3  # of the frozen checkpoint


def ids(count: int, factor: int = 37) -> list[int]:
    return [(factor * i + 11) % 248 + 8 for i in range(count)]


def decode(engine: CpuEngine, state: CpuState, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Consume `tokens` one by one and return all rows of logits."""
    rows = []
    for token in tokens:
        rows.append(engine.forward_rows(state, [token])[0])
        engine.commit(state, 1)
    return np.stack(rows)


def greedy(engine: CpuEngine, state: CpuState, first: int, count: int) -> list[int]:
    """Say `count` ids, of which `first` is the first."""
    said = [first]
    while len(said) < count:
        said.append(int(decode(engine, state, said[-1:])[0].argmax()))
    return said


def destroy(engine: CpuEngine, states: list[CpuState], kept: CpuSnapshot) -> None:
    """Overwrite with NaN all rings of `states`, and every entry that `kept` does not hold, in free blocks too."""
    with torch.inference_mode():
        for state in states:
            for layer in state.layers:
                layer.window.fill_(torch.nan)
                for cache in (layer.compressor, layer.indexer):
                    if cache is not None:
                        cache.source.fill_(torch.nan)
        held = [(part, table) for part, table in kept.parts if isinstance(table, BlockTable)]
        assert len(held) == POOLS
        for part, table in held:
            entries = table.rows(0, part.last).clone()
            table.pool.rows.fill_(torch.nan)
            table.put(0, entries)


@pytest.mark.parametrize("length", PREFIXES)
def test_c12_a_prefix_snapshot_holds_everything(make_engine: MakeEngine, length: int) -> None:
    engine, prompt = make_engine(FP32_FULL), ids(length + 9)
    state, other = engine.new_state(), engine.new_state()
    engine.prefill(state, prompt[:length])
    snapshot, digest = engine.capture(state), state.digest()

    first = engine.prefill(other, ids(333, 41)).logits.argmax()
    assert len(greedy(engine, other, int(first), 5)) == 5
    decode(engine, state, ids(9, 43))
    destroy(engine, [state, other], snapshot)

    restored = engine.restore(snapshot)
    assert (restored.pos, snapshot.pos, restored.digest()) == (length, length, digest)
    cold_engine = make_engine(FP32_FULL)
    cold = cold_engine.new_state()
    cold_engine.prefill(cold, prompt[:length])
    assert cold.digest() == digest
    rows = decode(engine, restored, prompt[length:])
    assert np.array_equal(rows, decode(cold_engine, cold, prompt[length:]))
    pending = int(rows[-1].argmax())
    assert greedy(engine, restored, pending, 5) == greedy(cold_engine, cold, pending, 5)
    assert restored.digest() == cold.digest()


@pytest.mark.parametrize("length", PREFIXES)
def test_c12_branches_of_one_snapshot_do_not_meet(make_engine: MakeEngine, length: int) -> None:
    engine, prompt = make_engine(FP32_FULL), ids(length)
    trunk = engine.new_state()
    engine.prefill(trunk, prompt)
    snapshot = engine.capture(trunk)
    branches = [trunk, engine.restore(snapshot), engine.restore(snapshot)]
    tails = [ids(STEPS, factor) for factor in (5, 7, 9)]
    rows: list[list[npt.NDArray[np.float32]]] = [[], [], []]
    for step in range(STEPS):
        for branch, tail, found in zip(branches, tails, rows, strict=True):
            found.append(decode(engine, branch, tail[step : step + 1])[0])
    for branch, tail, found in zip(branches, tails, rows, strict=True):
        cold_engine = make_engine(FP32_FULL)
        cold = cold_engine.new_state()
        cold_engine.prefill(cold, prompt)
        assert np.array_equal(np.stack(found), decode(cold_engine, cold, tail))
        assert branch.digest() == cold.digest()
    assert engine.restore(snapshot).pos == length


def test_a11_a_snapshot_between_two_pieces_of_a_prompt_and_after_a_reply(make_engine: MakeEngine) -> None:
    engine, prompt = make_engine(FP32_FULL), ids(200)
    state = engine.new_state()
    engine.prefill(state, prompt[:192])
    anchor = engine.capture(state)
    row = engine.prefill(state, prompt[192:]).logits
    said = greedy(engine, state, int(row.argmax()), 50)
    again = engine.restore(anchor)
    assert again.pos == 192
    assert np.array_equal(engine.prefill(again, prompt[192:]).logits, row)
    assert greedy(engine, again, int(row.argmax()), 50) == said


def test_pending_rows_are_in_no_snapshot_and_stay_pending(make_engine: MakeEngine) -> None:
    engine, prompt = make_engine(FP32_FULL), ids(140)
    state = engine.new_state()
    engine.prefill(state, prompt[:125])
    digest = state.digest()
    engine.forward_rows(state, prompt[125:131])  # completes entries 31 and, of ratio 128, 0
    snapshot = engine.capture(state)
    engine.commit(state, 6)
    restored = engine.restore(snapshot)
    assert (restored.pos, restored.pending, restored.digest()) == (125, 0, digest)
    engine.forward_rows(restored, ids(8, 41))
    cold = engine.new_state()
    engine.prefill(cold, prompt[:131])
    assert state.digest() == cold.digest()


def test_a_snapshot_outlives_its_state_and_the_other_way_round(make_engine: MakeEngine) -> None:
    engine, prompt = make_engine(), ids(600)
    state = engine.new_state()
    engine.prefill(state, prompt)
    digest, first = state.digest(), engine.capture(state)
    engine.release(state)
    restored = engine.restore(first)
    first.release()
    assert restored.digest() == digest
    second = engine.capture(restored)
    del restored
    gc.collect()
    filler = engine.new_state()
    engine.prefill(filler, ids(900, 41))
    assert engine.restore(second).digest() == digest


# cost


def test_capturing_costs_the_same_at_any_position(make_engine: MakeEngine, checkpoint: Checkpoint) -> None:
    engine, config = make_engine(max_seq=4096), checkpoint.config
    state, sizes = engine.new_state(), {}
    block = 4 * ENTRY_BLOCK * (2 * config.head_dim + config.index_head_dim)  # one of every pool
    for pos in (300, 3000):
        engine.prefill(state, ids(3000)[state.pos : pos])
        held = engine.blocks_in_use
        snapshot = engine.capture(state)
        assert engine.blocks_in_use == held
        sizes[pos] = snapshot.nbytes
        rings = sum(rows.nbytes for _, rows in snapshot.parts if isinstance(rows, Tensor))
        assert 0 <= snapshot.nbytes - rings <= block
        snapshot.release()
    # both stand at the end of a window of four and within one of 128, whose source rows are the whole difference
    assert sizes[3000] - sizes[300] == (3000 % 128 - 300 % 128) * 4 * 2 * config.head_dim


def test_where_all_blocks_are_full_a_snapshot_is_its_rings(make_engine: MakeEngine, checkpoint: Checkpoint) -> None:
    engine, config = make_engine(), checkpoint.config
    state = engine.new_state()
    state.reserve(128 * ENTRY_BLOCK)
    state.pos = 128 * ENTRY_BLOCK
    windows = 3 * config.sliding_window * config.head_dim
    sources = 4 * 4 * (config.head_dim + config.index_head_dim)  # four rows of the window before
    assert engine.capture(state).nbytes == 4 * (windows + sources)


def test_a_fork_copies_at_most_one_block_per_pool(make_engine: MakeEngine) -> None:
    engine, prompt = make_engine(max_seq=4096), ids(1100)
    state = engine.new_state()
    engine.prefill(state, prompt)
    held = engine.blocks_in_use
    assert held == 2 * blocks_for(1100 // 4) + 1
    snapshot = engine.capture(state)
    forks = [engine.restore(snapshot) for _ in range(3)]
    assert engine.blocks_in_use == held
    for count, fork in enumerate(forks, 1):
        decode(engine, fork, ids(50, count))
        assert held < engine.blocks_in_use <= held + count * POOLS
    for layer, other in zip(state.layers, forks[0].layers, strict=True):
        for cache, its in ((layer.compressor, other.compressor), (layer.indexer, other.indexer)):
            if cache is not None and its is not None:
                full = state.pos // cache.shape.ratio // ENTRY_BLOCK
                assert cache.entries.blocks[:full] == its.entries.blocks[:full]


def test_finished_blocks_are_never_written_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, ids(520))
    snapshot = engine.capture(state)
    before = engine.dump(snapshot)
    decode(engine, state, ids(40, 41))
    decode(engine, engine.restore(snapshot), ids(40, 43))
    engine.prefill(engine.new_state(), ids(900, 47))
    after = engine.dump(snapshot)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


# memory


ACTIONS = ("prefill", *["verify"] * 3, *["capture"] * 2, *["restore"] * 2, "release", "drop")


@dataclass
class Walk:
    """Sequences and snapshots with the ids that are in them, driven at random."""

    engine: CpuEngine
    rng: random.Random
    states: list[tuple[CpuState, list[int]]] = field(default_factory=list)
    snapshots: list[tuple[CpuSnapshot, list[int]]] = field(default_factory=list)

    def step(self) -> None:
        if not self.states:
            self.states.append((self.engine.new_state(), []))
        at = self.rng.randrange(len(self.states))
        state, ledger = self.states[at]
        action = self.rng.choice(ACTIONS)
        if action == "prefill":
            tokens = self.draw(self.rng.choice([1, 2, 7, 60, 130, 300]))
            self.engine.prefill(state, tokens)
            ledger += tokens
        elif action == "verify":
            tokens = self.draw(self.rng.randint(1, MAX_ROWS))
            self.engine.forward_rows(state, tokens)
            kept = self.rng.randint(0, len(tokens))
            self.engine.commit(state, kept)
            ledger += tokens[:kept]
        elif action == "capture":
            self.snapshots.append((self.engine.capture(state), list(ledger)))
        elif action == "restore" and self.snapshots:
            snapshot, tokens = self.rng.choice(self.snapshots)
            self.states.append((self.engine.restore(snapshot), list(tokens)))
        elif action == "release" and len(self.states) > 2:
            self.engine.release(state)
            del self.states[at]
        elif action == "drop" and len(self.snapshots) > 2:
            snapshot, _ = self.snapshots.pop(self.rng.randrange(len(self.snapshots)))
            if self.rng.random() < 0.5:
                snapshot.release()

    def draw(self, count: int) -> list[int]:
        return [self.rng.randrange(8, 256) for _ in range(count)]


@pytest.mark.parametrize("seed", range(2))  # the walks of tests/contracts go on from here
def test_random_walks_equal_cold_runs_and_leak_nothing(make_engine: MakeEngine, seed: int) -> None:
    walk = Walk(make_engine(FP32_FULL, max_seq=20_000), random.Random(seed))
    for _ in range(60):
        walk.step()
    assert len(walk.states) > 1 and walk.snapshots
    walk.states += [(walk.engine.restore(snapshot), tokens) for snapshot, tokens in walk.snapshots]
    cold_engine = make_engine(FP32_FULL, max_seq=20_000)
    for state, ledger in walk.states:
        cold = cold_engine.new_state()
        if ledger:
            cold_engine.prefill(cold, ledger)
        assert state.pos == len(ledger)
        assert state.digest() == cold.digest()
        assert np.array_equal(decode(walk.engine, state, ids(3)), decode(cold_engine, cold, ids(3)))
    for state, _ in walk.states[::2]:
        walk.engine.release(state)
    for snapshot, _ in walk.snapshots[::2]:
        snapshot.release()
    del state, snapshot, cold
    walk.states.clear()
    walk.snapshots.clear()
    gc.collect()
    assert walk.engine.blocks_in_use == cold_engine.blocks_in_use == 0


def refuse(*_: Any) -> Tensor:
    raise MemoryError("no room")


# as arrays


@pytest.mark.parametrize("length", [0, *PREFIXES])
def test_dumped_arrays_make_the_same_state_in_another_engine(make_engine: MakeEngine, length: int) -> None:
    engine, other = make_engine(FP32_FULL), make_engine(FP32_FULL)
    state = engine.new_state()
    if length:
        engine.prefill(state, ids(length))
    arrays = engine.dump(engine.capture(state))
    assert list(arrays) == [name for name, _ in state.live()]
    snapshot = other.load(arrays, length)
    for array in arrays.values():
        assert array.flags.owndata and array.dtype == np.float32
        array.fill(np.nan)
    restored = other.restore(snapshot)
    assert restored.digest() == state.digest()
    assert np.array_equal(decode(other, restored, ids(9, 41)), decode(engine, state, ids(9, 41)))
    assert engine.layout() == other.layout()
    other.release(restored)
    snapshot.release()
    assert other.blocks_in_use == 0


def test_arrays_may_be_read_only_and_in_another_order_of_axes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, ids(300))
    arrays = {name: np.asfortranarray(array) for name, array in engine.dump(engine.capture(state)).items()}
    for array in arrays.values():
        array.flags.writeable = False
    assert engine.restore(engine.load(arrays, 300)).digest() == state.digest()


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "missing": (lambda a: a.pop("1.indexer.source"), "1.indexer.source", "without 1.indexer.source; this layout has 9"),
    "unknown": (lambda a: a.update({"7.window": 0}), "7.window", "with 7.window; this layout has none"),
    "short": (
        lambda a: a.update({"2.window": a["2.window"][:-1]}),
        "2.window",
        r"2.window at position 300 is float32 \[64, 128\]; found float32 \[63, 128\]",
    ),
    "axes": (
        lambda a: a.update({"2.window": a["2.window"].reshape(128, 64)}),
        "2.window",
        r"is float32 \[64, 128\]; found float32 \[128, 64\]",
    ),
    "precision": (
        lambda a: a.update({"1.compressor.entries": a["1.compressor.entries"].astype(np.float64)}),
        "1.compressor.entries",
        r"is float32 \[75, 128\]; found float64 \[75, 128\]",
    ),
    "byte order": (
        lambda a: a.update({"0.window": a["0.window"].astype(">f4")}),
        "0.window",
        r"is float32 \[64, 128\]; found >f4 \[64, 128\]",
    ),
    "no array": (lambda a: a.update({"0.window": None}), "0.window", r"is float32 \[64, 128\]; found NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays_are_refused_by_name_before_anything_is_allocated(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, ids(300))
    arrays = engine.dump(engine.capture(state))
    spoil, name, message = WRONG[case]
    spoil(arrays)
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(blocks, "new_rows", refuse)
    held = engine.blocks_in_use
    with pytest.raises(EngineError, match=message) as caught:
        engine.load(arrays, 300)
    assert (caught.value.param, engine.blocks_in_use) == (name, held)


@pytest.mark.parametrize("pos", [-1, 1025, 300.0, "300"])
def test_a_wrong_position_is_refused(make_engine: MakeEngine, pos: Any) -> None:
    with pytest.raises(EngineError, match=f"pos {pos} is no position from 0 to max_seq 1024"):
        make_engine().load({}, pos)


@pytest.mark.parametrize("pos", [299, 301, 304])
def test_arrays_of_another_position_are_refused(make_engine: MakeEngine, pos: int) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, ids(300))
    arrays = engine.dump(engine.capture(state))
    with pytest.raises(EngineError, match=f"at position {pos} is"):
        engine.load(arrays, pos)


def test_when_loading_fails_nothing_is_kept(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, ids(300))
    snapshot = engine.capture(state)
    arrays, held = engine.dump(snapshot), engine.blocks_in_use
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "new_rows", refuse)
        with pytest.raises(MemoryError):
            engine.load(arrays, 300)
    gc.collect()
    assert engine.blocks_in_use == held
    assert engine.restore(engine.load(arrays, 300)).digest() == state.digest()
