"""Two GPUs that draft: the first one alone, from what it has of both, and nothing else depends on it.

Once with the kernels' twins, where the CPU stands for both GPUs, and once on two GPUs.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.pair_forward import PairForward
from dsv4nb.engine.protocol import Proposal, Row
from dsv4nb.handle import Model
from dsv4nb_kernels import peer_join

pytestmark = pytest.mark.twins

MAX_SEQ = 384
ASKED = "What is the capital of France?"
GPUS = pytest.param("gpu", marks=pytest.mark.gpu2)


@pytest.fixture(scope="module")
def pair(toy: Checkpoint, pair_places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(toy, device=pair_places, max_seq=MAX_SEQ, prefill="exact")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(pair: DeviceEngine) -> Iterator[DeviceEngine]:
    """The same pair without its drafter."""
    first, second = pair.ranks
    ranks = [replace(first, draft=None), second]
    engine = DeviceEngine(ranks, pair.config, pair.contract, max_seq=MAX_SEQ, prefill="exact")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def one(toy: Checkpoint, pair_places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(toy, device=pair_places[0], max_seq=MAX_SEQ, prefill="exact")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt(facts: list[int]) -> list[int]:
    return facts


def greedy(row: Row, slot: int, ahead: Sequence[int]) -> int:
    return int(row.argmax())


def same(one: Proposal, other: Proposal) -> bool:
    return (one.ids, one.conf_logits) == (other.ids, other.conf_logits) and all(
        np.array_equal(a, b) for a, b in zip(one.rows, other.rows, strict=True)
    )


def forward_of(engine: DeviceEngine) -> PairForward:
    assert isinstance(engine._forward, PairForward)
    return engine._forward


def wait_for(state: DeviceState) -> None:
    for device in {caches.device for caches in state.caches.copies if caches.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def standing(engine: DeviceEngine, ids: Sequence[int]) -> DeviceState:
    state = engine.new_state()
    engine.prefill(state, ids)
    return state


def ending(engine: DeviceEngine, states: Sequence[DeviceState]) -> None:
    for state in states:
        engine.release(state)


@pytest.mark.parametrize("pos", [5, 63, 64, 65, 200])
def test_drafts_are_those_of_one_gpu_that_has_the_same_taps(
    pair: DeviceEngine, one: DeviceEngine, prompt: list[int], pos: int
) -> None:
    assert pair.block_size == one.block_size == 5 and pair.draft_fault == ""
    state, pending = standing(pair, prompt[:pos]), prompt[pos]
    wanted = pair.draft(state, pending, greedy)
    moved = one.restore(one.load(pair.dump(pair.capture(state)), pos))
    assert same(one.draft(moved, pending, greedy), wanted)
    ours, theirs = state.caches.draft, moved.caches.draft
    assert ours is not None and theirs is not None
    with torch.inference_mode():
        theirs.taps.copy_(ours.taps)
        for ring in theirs.rings():
            ring.view(torch.uint8).fill_(255)  # NaN in every format
    wait_for(moved)
    moved.context = 0  # all of its context rows are to be made
    assert moved.digest() == state.digest()
    assert same(one.draft(moved, pending, greedy), wanted)
    ending(pair, [state])
    ending(one, [moved])


def test_the_second_gpu_holds_nothing_of_the_drafter(pair: DeviceEngine, plain: DeviceEngine) -> None:
    first, second = pair.ranks
    assert first.draft is not None and second.draft is None
    state, other = pair.new_state(), plain.new_state()
    ours, mirror = state.caches.copies
    assert ours.draft is not None and mirror.draft is None
    assert mirror.nbytes == other.caches.nbytes == other.caches.mirrors[0].nbytes
    assert ours.nbytes - mirror.nbytes == sum(buffer.nbytes for buffer in ours.draft.buffers())
    assert ours.nbytes - mirror.nbytes == pair.state_bytes(MAX_SEQ)["drafter"]
    ending(pair, [state])
    ending(plain, [other])


def test_caches_are_counted_where_they_are(pair: DeviceEngine, prompt: list[int]) -> None:
    drafter = pair.state_bytes(70)["drafter"]
    gc.collect()
    before = pair.cache_bytes()
    assert "drafter" in before[0].classes and "drafter" not in before[1].classes
    state = standing(pair, prompt[:70])
    first, second = pair.cache_bytes()
    filled = sum(pair.state_bytes(70).values())
    assert first.used - before[0].used == filled
    assert second.used - before[1].used == filled - drafter
    ending(pair, [state])


def test_the_halves_meet_as_often_on_both(
    pair: DeviceEngine, plain: DeviceEngine, pair_places: list[str], prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last layer too where a drafter looks, with a head and without; else one GPU would wait in vain."""
    pushed: Counter[int] = Counter()
    push = peer_join.launch

    def counting(y: torch.Tensor, link: Any, **options: Any) -> Any:
        pushed[link.theirs.words.data_ptr()] += 1
        return push(y, link, **options)

    monkeypatch.setattr(peer_join, "launch", counting)

    def joins(engine: DeviceEngine, call: Callable[[], object]) -> list[int]:
        forward = forward_of(engine)

        def done() -> list[int]:
            forward.settle()
            if pair_places[0] == "cpu":  # a twin brings what the other one takes, and leaves nothing
                return [pushed[link.theirs.words.data_ptr()] for link in forward._links]
            return [int(link.mine.counts[0, 0]) for link in forward._links]

        before = done()
        call()
        return [after - ago for after, ago in zip(done(), before, strict=True)]

    def fill(engine: DeviceEngine, state: DeviceState, tokens: Sequence[int]) -> None:
        with engine._running():
            forward_of(engine).fill(state.caches, tokens, 0)

    outputs = 2 * pair.config.num_hidden_layers
    for engine, without_head in ((pair, outputs), (plain, outputs - 1)):
        state = engine.new_state()
        for tokens in (prompt[:1], prompt[:5], prompt[:8]):
            for _ in range(2):  # launched, then replayed
                assert joins(engine, partial(fill, engine, state, tokens)) == [without_head] * 2
                assert joins(engine, partial(engine.forward_rows, state, tokens)) == [outputs] * 2
        engine.commit(state, 8)
        if engine is pair:
            assert joins(pair, partial(pair.draft, state, 7, greedy)) == [0, 0]
        engine.release(state)


def test_drafting_changes_nothing_that_the_model_says(
    pair: DeviceEngine, plain: DeviceEngine, prompt: list[int]
) -> None:
    ours, theirs = standing(pair, prompt[:100]), standing(plain, prompt[:100])
    for first in (100, 103, 108):
        rows = prompt[first : first + 6]
        drafts = [pair.draft(ours, rows[0], greedy) for _ in range(2)]
        assert same(*drafts)
        assert np.array_equal(pair.forward_rows(ours, rows), plain.forward_rows(theirs, rows))
        assert same(pair.draft(ours, rows[0], greedy), drafts[0])  # beside rows that are not committed yet
        kept = 5 if first == 103 else 3
        pair.commit(ours, kept)
        plain.commit(theirs, kept)
    held, wanted = pair.dump(pair.capture(ours)), plain.dump(plain.capture(theirs))
    assert {name for name in held if name not in wanted} == {f"mtp.{stage}.window" for stage in range(3)}
    assert all(np.array_equal(held[name], rows) for name, rows in wanted.items())
    ending(pair, [ours])
    ending(plain, [theirs])


def test_rounds_of_any_accept_count_leave_what_single_steps_leave(pair: DeviceEngine) -> None:
    """Rejected rows leave no trace on either GPU, and a state that was captured in a round goes on alike."""
    state, single, rng = standing(pair, [9, 10, 11]), standing(pair, [9, 10, 11]), random.Random(5)
    for number in range(45):
        width = rng.randint(1, 6)
        kept = rng.randint(0, width)
        tokens = [rng.randrange(8, 1250) for _ in range(width)]
        if number % 4 == 0:
            pair.draft(state, tokens[0], greedy)
        pair.forward_rows(state, tokens)
        if number % 10 == 5:  # in the middle of a round
            fork = pair.restore(pair.capture(state))
            pair.forward_rows(fork, tokens)
            pair.release(state)
            state = fork
        pair.commit(state, kept)
        if kept:
            pair.prefill(single, tokens[:kept])
        if number % 10 == 9:
            assert state.digest() == single.digest(), number
    assert state.pos > 64 and state.digest() == single.digest()
    assert same(pair.draft(state, 7, greedy), pair.draft(single, 7, greedy))
    ending(pair, [state, single])


@pytest.mark.parametrize("pos", [5, 64, 131])
def test_snapshots_go_on_with_the_same_drafts(pair: DeviceEngine, prompt: list[int], pos: int) -> None:
    state = standing(pair, prompt[:pos])
    snapshot = pair.capture(state)
    wanted = pair.draft(state, prompt[pos], greedy)
    rows = pair.forward_rows(state, [prompt[pos], *wanted.ids])
    pair.commit(state, 2)
    after = pair.draft(state, prompt[pos + 2], greedy)
    for source in (snapshot, pair.load(pair.dump(snapshot), pos)):
        again = pair.restore(source)
        assert same(pair.draft(again, prompt[pos], greedy), wanted)
        assert np.array_equal(pair.forward_rows(again, [prompt[pos], *wanted.ids]), rows)
        pair.commit(again, 2)
        assert same(pair.draft(again, prompt[pos + 2], greedy), after)
        assert again.digest() == state.digest()
        pair.release(again)
    ending(pair, [state])


@pytest.mark.parametrize("pair_places", [GPUS], indirect=True)
def test_graphs_replay_what_was_launched(toy: Checkpoint, pair: DeviceEngine, prompt: list[int]) -> None:
    eager = DeviceEngine(pair.ranks, toy.config, toy.contract, max_seq=MAX_SEQ, graphs=False, prefill="exact")
    ours, theirs = standing(pair, prompt[:141]), standing(eager, prompt[:141])
    wanted = eager.draft(theirs, 7, greedy)
    assert all(same(pair.draft(ours, 7, greedy), wanted) for _ in range(3))
    assert ours.digest() == theirs.digest()


@pytest.fixture(scope="module")
def model(pair_places: list[str]) -> Iterator[Model]:
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        assert options.pop("device") == ["cuda:0", "cuda:1"]
        return load(*args, device=pair_places, **options)

    with pytest.MonkeyPatch.context() as patch:
        if pair_places[0] == "cpu":
            patch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
        patch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
        with dsv4nb.load("toy", devices=(0, 1), max_seq=MAX_SEQ, drafter=True, warmup=False) as model:
            yield model


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *({"temperature": 1.0, "seed": seed} for seed in (1, 2))])
def test_speculation_gives_the_plain_text(model: Model, options: dict[str, Any]) -> None:
    assert model.info.drafter == "DSpark, 5 drafts a round"
    plain = model.generate(ASKED, max_new=40, spec=False, **options)
    for depth in (None, 3):
        reply = model.generate(ASKED, max_new=40, spec_depth=depth, **options)
        assert (reply.ids, reply.text) == (plain.ids, plain.text) and not plain.rounds
        assert sum(played.accepts for played in reply.rounds) > 0


def test_a_chat_that_speculates_forks_and_goes_on_as_a_plain_one(model: Model) -> None:
    texts = []
    for spec in (True, False):
        model.cache.clear()
        chat = model.chat(temperature=0.0, max_new=30, spec=spec)
        replies = [chat.send(ASKED)]
        fork = chat.fork()
        replies += [chat.send("What is 47 + 38?"), fork.send("Hello!"), chat.regenerate()]
        texts.append([reply.text for reply in replies])
        assert replies[1].done.n_cached > 0 and bool(replies[1].rounds) == spec
    assert texts[0] == texts[1]
