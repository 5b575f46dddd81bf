"""GPUs that run one after the other: the bits of one, whatever layers each of them has.

Once with the kernels' twins, where the CPU stands for all GPUs, and once on two GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.config import SamplerConfig
from dsv4nb.engine import extent, gpus
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.errors import EngineError, RequestError
from dsv4nb.testing.twin_kernels import twin_kernels

pytestmark = pytest.mark.twins

MAX_SEQ = 384

At = Callable[[int], DeviceState]


@pytest.fixture(
    scope="module",
    params=[["cpu"] * 2, ["cpu"] * 3, pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.gpu2)],
    ids=["two twins", "three twins", "gpus"],
)
def places(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The devices of a pipeline."""
    with nullcontext() if "cuda:0" in request.param else twin_kernels():
        yield request.param


@pytest.fixture(scope="module")
def line(toy: Checkpoint, places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(toy, device=places, placement="pipeline", max_seq=MAX_SEQ)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def one(toy: Checkpoint, places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(toy, device=places[0], max_seq=MAX_SEQ)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt(facts: list[int]) -> list[int]:
    return facts


@pytest.fixture(scope="module")
def at(line: DeviceEngine, prompt: list[int], states_behind: Callable[..., At]) -> At:
    return states_behind(line, prompt)


def test_every_gpu_holds_its_layers_and_the_caches_of_them(line: DeviceEngine, places: list[str]) -> None:
    spans = [weights.span for weights in line.ranks]
    assert (len(spans), spans[0].start, spans[-1].stop) == (len(places), 0, line.config.num_hidden_layers)
    assert all(before.stop == behind.start for before, behind in pairwise(spans)) and all(spans)
    for weights, place in zip(line.ranks, places, strict=True):
        assert str(weights.device) == place
        caches = line.new_state().caches
        for number in weights.span:
            assert {str(buffer.device) for buffer in caches.layers[number].buffers()} == {place}
    first, last = line.ranks[0], line.ranks[-1]
    assert first.embed.shape[0] == last.head.n == line.vocab_size
    assert first.head.n == 0 and first.draft is None and last.draft is not None
    assert caches.draft is not None and str(caches.draft.taps.device) == places[-1]
    assert line.placement == "pipeline"


@pytest.mark.parametrize("length", [1, 9, 141, 340])
def test_logits_and_caches_have_the_bits_of_one_gpu(
    line: DeviceEngine, one: DeviceEngine, prompt: list[int], length: int
) -> None:
    ours, theirs = line.new_state(), one.new_state()
    found, wanted = (engine.prefill(state, prompt[:length]).logits for engine, state in ((line, ours), (one, theirs)))
    assert np.array_equal(found, wanted)
    assert ours.digest() == theirs.digest()
    for rows in (1, 5, MAX_ROWS):
        tokens = prompt[length : length + rows]
        assert np.array_equal(line.forward_rows(ours, tokens), one.forward_rows(theirs, tokens))
        for engine, state in ((line, ours), (one, theirs)):
            engine.commit(state, rows)
    assert ours.digest() == theirs.digest()


@pytest.mark.parametrize("start", [0, 61, 126, 316])
def test_m28_rows_are_the_same_bits_alone_and_together(
    line: DeviceEngine, at: At, prompt: list[int], start: int
) -> None:
    together, alone = at(start), at(start)
    tokens, single = prompt[start : start + MAX_ROWS], []
    for token in tokens:
        single.append(line.forward_rows(alone, [token])[0])
        line.commit(alone, 1)
    for rows in range(1, MAX_ROWS + 1):
        assert np.array_equal(line.forward_rows(together, tokens[:rows]), np.stack(single[:rows])), rows
    line.commit(together, MAX_ROWS)
    assert together.digest() == alone.digest()


@pytest.mark.parametrize("start", [2, 124, 318])
def test_rejected_rows_leave_no_trace_anywhere(line: DeviceEngine, at: At, prompt: list[int], start: int) -> None:
    plain, rejecting = at(start + 3), at(start)
    for kept in (0, 1, 2):
        wrong = prompt[start : start + kept] + [11, 12, 13, 14, 15, 16, 17, 18][: MAX_ROWS - kept]
        line.forward_rows(rejecting, wrong)
        line.commit(rejecting, kept)
        start += kept
    assert rejecting.digest() == plain.digest()
    following = prompt[start : start + 5]
    assert np.array_equal(line.forward_rows(rejecting, following), line.forward_rows(plain, following))


@pytest.mark.parametrize("pos", [1, 64, 131])
def test_drafts_are_those_of_one_gpu(line: DeviceEngine, one: DeviceEngine, prompt: list[int], pos: int) -> None:
    assert line.block_size == one.block_size == 5
    assert line.draft_fault == ""
    proposals = []
    for engine in (line, one):
        state = engine.new_state()
        engine.prefill(state, prompt[:pos])
        engine.forward_rows(state, prompt[pos : pos + 6])
        engine.commit(state, 4)
        proposals.append(engine.draft(state, prompt[pos + 4], lambda row, slot, ahead: int(row.argmax())))
    ours, theirs = proposals
    assert (ours.ids, ours.conf_logits) == (theirs.ids, theirs.conf_logits)
    assert np.array_equal(np.stack(ours.rows), np.stack(theirs.rows))


@pytest.mark.parametrize("pos", [1, 64, 131])
def test_snapshots_go_back_to_their_gpus_and_over_to_one(
    line: DeviceEngine, one: DeviceEngine, at: At, prompt: list[int], pos: int
) -> None:
    state = at(pos)
    snapshot = line.capture(state)
    wanted = line.prefill(state, prompt[pos : pos + 20]).logits
    arrays = line.dump(snapshot)
    for source in (snapshot, line.load(arrays, pos)):
        again = line.restore(source)
        assert np.array_equal(line.prefill(again, prompt[pos : pos + 20]).logits, wanted)
        assert again.digest() == state.digest()
    assert line.layout() == one.layout()
    moved = one.restore(one.load(arrays, pos))
    assert np.array_equal(one.prefill(moved, prompt[pos : pos + 20]).logits, wanted)


def test_a_state_grows_on_every_gpu(
    line: DeviceEngine, one: DeviceEngine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = one.new_state()
    one.prefill(theirs, prompt[:300])
    monkeypatch.setattr(extent, "FEWEST", 128)
    gc.collect()
    line._shelf.clear()
    ours, sizes = line.new_state(), set[int]()
    for first, last in pairwise((0, 100, 127, 130, 255, 260, 300)):
        line.prefill(ours, prompt[first:last])
        sizes.add(ours.caches.positions)
    assert sizes == {128, 256, MAX_SEQ}
    assert ours.digest() == theirs.digest()
    assert np.array_equal(line.forward_rows(ours, prompt[300:304]), one.forward_rows(theirs, prompt[300:304]))
    line.release(ours)
    line._shelf.clear()


@pytest.mark.parametrize("config", [SamplerConfig(temperature=0.0), SamplerConfig(temperature=1.0, seed=7)], ids=str)
def test_choices_on_the_last_gpu_are_those_of_one(
    line: DeviceEngine, one: DeviceEngine, prompt: list[int], config: SamplerConfig
) -> None:
    found = []
    for engine in (line, one):
        state = engine.new_state()
        engine.prefill(state, prompt[:70])
        drawn = engine.draw_rows(state, prompt[70:75], config)
        found.append((drawn.ids, drawn.probs, np.stack(list(drawn.rows))))
    (ids, probs, rows), wanted = found
    assert len(ids or ()) == 5
    assert (ids, probs) == wanted[:2]
    assert np.array_equal(rows, wanted[2])


def test_caches_are_counted_where_they_are_and_come_back(
    line: DeviceEngine, one: DeviceEngine, places: list[str], prompt: list[int]
) -> None:
    gc.collect()
    before = line.cache_bytes()
    states = [line.new_state() for _ in range(3)]
    for state in states:
        line.prefill(state, prompt[:20])
    snapshot = line.capture(states[0])
    counted = line.cache_bytes()
    assert [each.device for each in counted] == places
    taken = [now.used - then.used for now, then in zip(counted, before, strict=True)]
    assert all(taken)
    assert sum(taken) == 3 * sum(one.state_bytes(20).values()) + snapshot.nbytes
    assert ["drafter" in each.classes for each in counted] == [False] * (len(places) - 1) + [True]
    snapshot.release()
    for state in states:
        line.release(state)
    again = [line.new_state() for _ in range(3)]
    assert sum(each.used for each in line.cache_bytes()) < sum(each.used for each in counted)
    assert all(state.pos == 0 for state in again)


def test_what_a_pipeline_cannot_be_is_refused(toy: Checkpoint) -> None:
    with pytest.raises(RequestError, match=r"num_hidden_layers is 6: a pipeline of 7 ranks .* at most 6 ranks"):
        DeviceEngine.from_checkpoint(toy, device=["cpu"] * 7, placement="pipeline")
    with pytest.raises(EngineError, match=r"3 GPUs; two share every layer at most\. placement='pipeline' runs layers"):
        DeviceEngine.from_checkpoint(toy, device=["cpu"] * 3)


@pytest.mark.parametrize(
    ("asked", "fault", "told"),
    [
        ("pipeline", "", "GPUs 0 and 1, one after the other"),
        (None, "GPU 0 does not reach the memory of GPU 1", "GPUs 0 and 1, one after the other (GPU 0 does not reach"),
    ],
)
def test_a_model_is_loaded_on_several_and_its_card_says_why(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, fault: str, told: str
) -> None:
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        assert (options["device"], options["placement"]) == (["cuda:0", "cuda:1"], "pipeline")
        return load(*args, **options | {"device": ["cpu", "cpu"]})

    monkeypatch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
    monkeypatch.setattr(gpus, "unreached", lambda ids: fault)
    monkeypatch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
    question = "What is the capital of France?"
    with twin_kernels(), dsv4nb.load("toy", devices=(0, 1), placement=asked, max_seq=MAX_SEQ, warmup=False) as model:
        assert model.info.device.startswith(told)
        assert model.info.drafter == "DSpark, 5 drafts a round"
        found = model.generate(question, temperature=0.0, max_new=24)
        assert found.text == model.generate(question, temperature=0.0, max_new=24, spec=False).text
        assert sum(played.accepts for played in found.rounds) > 0


@pytest.mark.gpu2
def test_a_model_on_gpus_one_after_the_other_answers_as_on_one() -> None:
    replies = []
    for options in ({"devices": 0}, {"devices": (0, 1), "placement": "pipeline"}):
        with dsv4nb.load("toy", max_seq=MAX_SEQ, prefill="exact", **options) as model:  # type: ignore[arg-type]
            asked = {"temperature": 1.0, "seed": 3, "max_new": 48}
            replies.append(model.generate("What is the capital of France?", **asked).ids)  # type: ignore[arg-type]
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    "places", [pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.gpu2)], indirect=True, ids=["gpus"]
)
def test_graphs_of_all_replay_what_was_launched(
    toy: Checkpoint, line: DeviceEngine, places: list[str], prompt: list[int]
) -> None:
    eager = DeviceEngine(line.ranks, toy.config, toy.contract, max_seq=MAX_SEQ, graphs=False)
    ours, theirs = line.new_state(), eager.new_state()
    for engine, state in ((line, ours), (eager, theirs)):
        engine.prefill(state, prompt[:141])
    assert ours.digest() == theirs.digest()
    for rows in (1, 5, 8):
        tokens = prompt[141 : 141 + rows]
        first, second = line.forward_rows(ours, tokens), line.forward_rows(ours, tokens)
        assert np.array_equal(first, second)
        assert np.array_equal(second, eager.forward_rows(theirs, tokens))
    for device in places:
        torch.cuda.synchronize(device)
