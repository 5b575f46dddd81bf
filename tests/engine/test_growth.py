"""States that outgrow their caches: they move on unnoticed, or stay as they are where there is no memory.

With the kernels' twins, where the CPU stands for one GPU or two, and on GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine import device_state, extent
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_caches import Caches, Share
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.protocol import Row
from dsv4nb.testing.twin_kernels import twin_kernels

MAX_SEQ = 1024
FEWEST = 128

Fail = Callable[[Callable[[int], bool]], None]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("twins", marks=pytest.mark.twins),
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("pair", marks=pytest.mark.twins),
        pytest.param("two gpus", marks=pytest.mark.gpu2),
    ],
)
def engine(request: pytest.FixtureRequest, toy: Checkpoint) -> Iterator[DeviceEngine]:
    is_gpu = request.param in ("gpu", "two gpus")
    places = (["cuda:0", "cuda:1"] if is_gpu else ["cpu", "cpu"])[: 1 if request.param in ("twins", "gpu") else 2]
    with nullcontext() if is_gpu else twin_kernels():
        engine = DeviceEngine.from_checkpoint(toy, device=places, max_seq=MAX_SEQ, prefill="exact")
        yield engine
        engine.close()


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch, engine: DeviceEngine) -> None:
    monkeypatch.setattr(extent, "FEWEST", FEWEST)
    gc.collect()  # of what other tests forgot
    engine._shelf.clear()


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Let there be no memory for caches of the sizes for which a function says so."""
    make = Caches.on

    def failing(fails: Callable[[int], bool]) -> None:
        def on(config: object, positions: int, shares: Sequence[Share]) -> Caches:
            if fails(positions):
                raise torch.OutOfMemoryError("no memory is left")
            return make(config, positions, shares)  # type: ignore[arg-type]

        monkeypatch.setattr(Caches, "on", on)

    return failing


def greedy(row: Row, slot: int, ahead: Sequence[int]) -> int:
    return int(row.argmax())


def reserved_by(engine: DeviceEngine) -> int:
    """Bytes of all caches."""
    return sum(device.reserved - device.classes["forward"].reserved for device in engine.cache_bytes())


def standing(engine: DeviceEngine, ids: Sequence[int]) -> DeviceState:
    state = engine.new_state()
    engine.prefill(state, ids)
    return state


def test_h02_a_state_that_grew_is_one_that_never_did(
    engine: DeviceEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = standing(engine, facts[:120])
    monkeypatch.setattr(extent, "FEWEST", MAX_SEQ)
    whole = standing(engine, facts[:120])
    sizes, pos = [grown.caches.positions], 120
    assert whole.caches.positions == MAX_SEQ
    while pos < 270:
        drafts = []
        for fewest, state in ((FEWEST, grown), (MAX_SEQ, whole)):
            monkeypatch.setattr(extent, "FEWEST", fewest)
            drafts.append(engine.draft(state, facts[pos], greedy))
        assert drafts[0].ids == drafts[1].ids and drafts[0].conf_logits == drafts[1].conf_logits
        rows = []
        for fewest, state in ((FEWEST, grown), (MAX_SEQ, whole)):
            monkeypatch.setattr(extent, "FEWEST", fewest)
            rows.append(engine.forward_rows(state, facts[pos : pos + 6]))
            engine.commit(state, 5)
        assert np.array_equal(*rows)
        sizes.append(grown.caches.positions)
        pos += 5
    assert sorted(set(sizes)) == [128, 256, 512] and sizes == sorted(sizes)
    assert grown.digest() == whole.digest()
    for copies in zip(*(caches._buffers() for caches in grown.caches.copies), strict=False):
        assert len({tuple(copy.shape) for copy in copies}) == 1
    for state in (grown, whole):
        engine.release(state)


def test_h02_without_memory_a_state_stays_as_it_was(engine: DeviceEngine, facts: list[int], fail: Fail) -> None:
    state, other = standing(engine, facts[:125]), standing(engine, facts[:20])
    before, caches = state.digest(), state.caches
    engine.forward_rows(state, facts[125:127])
    fail(lambda positions: positions > 128)
    with pytest.raises(MemoryError, match="no memory is left"):
        engine.forward_rows(state, facts[125:131])
    assert (state.pos, state.pending, state.caches is caches, state.digest()) == (125, 0, True, before)
    with pytest.raises(MemoryError, match="no memory is left"):
        engine.prefill(state, facts[125:200])
    assert (state.pos, state.pending, state.caches is caches, state.digest()) == (125, 0, True, before)
    engine.prefill(other, facts[20:40])
    engine.forward_rows(state, facts[125:128])  # what it has room for still goes
    engine.commit(state, 3)
    fail(lambda positions: False)
    engine.forward_rows(state, facts[128:131])
    engine.commit(state, 3)
    assert state.digest() == standing(engine, facts[:131]).digest()


def test_caches_that_nobody_holds_make_room(engine: DeviceEngine, facts: list[int], fail: Fail) -> None:
    shelf = engine._shelf
    state = standing(engine, facts[:100])
    engine.release(standing(engine, facts[:200]))
    assert +shelf.made == {128: 2, 256: 1}
    fail(lambda positions: shelf.made[256] > 0)  # as long as those are there
    engine.prefill(state, facts[100:300])
    assert (state.pos, state.caches.positions) == (300, 512)
    assert +shelf.made == {128: 1, 512: 1}
    assert state.digest() == standing(engine, facts[:300]).digest()


def test_a_state_takes_what_its_extent_does_and_leaves_it_for_the_next(
    engine: DeviceEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [standing(engine, facts[:length]) for length in (300, 140, 20)]  # the first caches go from one to the next
    taken = [sum(caches.nbytes for caches in state.caches.copies) for state in states]
    assert [state.caches.positions for state in states] == [512, 256, 128]
    held = {id(state.caches) for state in states}
    assert reserved_by(engine) == sum(taken)
    for state in states:
        engine.release(state)
    states = [standing(engine, facts[:length]) for length in (310, 250, 30)]
    assert {id(state.caches) for state in states} == held
    assert reserved_by(engine) == sum(taken)
    monkeypatch.setattr(device_state, "KEPT_BYTES", taken[0])
    for state in states:
        engine.release(state)
    assert +engine._shelf.made == {128: 1}  # what came back last is kept


def test_a_restored_state_has_the_room_of_its_position(engine: DeviceEngine, facts: list[int]) -> None:
    state = standing(engine, facts[:256])
    again = engine.restore(engine.capture(state))
    assert (state.caches.positions, again.caches.positions) == (256, 256)
    for one in (state, again):
        engine.forward_rows(one, facts[256:260])
        engine.commit(one, 4)
    assert again.caches.positions == 512 and again.digest() == state.digest()


@pytest.mark.parametrize("engine", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
def test_a25_a_chat_that_grows_gives_what_launches_without_graphs_give(
    engine: DeviceEngine, toy: Checkpoint, facts: list[int]
) -> None:
    eager = DeviceEngine(engine.ranks, toy.config, toy.contract, max_seq=MAX_SEQ, graphs=False, prefill="exact")
    ours, theirs = standing(engine, facts[:120]), standing(eager, facts[:120])
    for pos in range(120, 270):
        rows = [one.forward_rows(state, facts[pos : pos + 1]) for one, state in ((engine, ours), (eager, theirs))]
        for one, state in ((engine, ours), (eager, theirs)):
            one.commit(state, 1)
        assert np.array_equal(*rows), pos
    assert ours.caches.positions == 512 and ours.digest() == theirs.digest()
    eager.close()


@pytest.mark.parametrize(
    "engine",
    [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("two gpus", marks=pytest.mark.gpu2)],
    indirect=True,
)
def test_a24_chats_after_the_first_capture_nothing(engine: DeviceEngine, facts: list[int]) -> None:
    def chat() -> list[int]:
        state = standing(engine, facts[:100])
        for pos in range(100, 280, 6):
            engine.forward_rows(state, facts[pos : pos + 6])
            engine.commit(state, 6)
        found = [state.caches.positions, len(state.caches.graphs)]
        engine.release(state)
        return found

    chat()
    graphs = [side.graphs for side in getattr(engine._forward, "_sides", [engine._forward])]
    before = [each.captured for each in graphs]
    assert all(before)
    for _ in range(20):
        assert chat()[0] == 512
    assert [each.captured for each in graphs] == before
