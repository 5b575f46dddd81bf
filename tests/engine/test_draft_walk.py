"""Drafts that are chosen on the device: those of the host's choices, one small copy for a block.

On one GPU, on a pair and on a pipeline; once with the kernels' twins, which any machine runs, and once on GPUs; once
through all kernels in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dsv4nb
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.config import SamplerConfig
from dsv4nb.engine import device as device_module
from dsv4nb.engine import draft_walk
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.draft_walk import DraftWalk
from dsv4nb.engine.lent_rows import LentRows
from dsv4nb.engine.logprobs import margin_of, probability_of
from dsv4nb.engine.pipeline_forward import LastDrafter
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.protocol import ChooseDraft, Proposal
from dsv4nb.errors import DrafterFault, EngineError
from dsv4nb.testing.placements import PLACEMENTS
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb.weights.rank_store import RankDraft

pytestmark = pytest.mark.twins

CONFIGS = (
    GREEDY,
    SamplerConfig(),
    SamplerConfig(temperature=8.0, seed=2**64 - 5),
    SamplerConfig(temperature=2.5, top_p=0.8, seed=4),
    SamplerConfig(temperature=4.0, top_k=20, seed=2**63),
    SamplerConfig(temperature=6.0, min_p=0.05, seed=6),
    SamplerConfig(temperature=5.0, top_k=40, top_p=0.9, min_p=0.01, seed=7),
)
ON_GPUS = [
    pytest.param("one gpu", marks=pytest.mark.gpu),
    pytest.param("pair of gpus", marks=pytest.mark.gpu2),
    pytest.param("pipeline of gpus", marks=pytest.mark.gpu2),
]
ONE = ["one", ON_GPUS[0]]
POS = 70


@pytest.fixture(scope="module", params=["one", "pair", "pipeline", *ON_GPUS])
def engine(request: pytest.FixtureRequest) -> Iterator[DeviceEngine]:
    devices, kind = PLACEMENTS[request.param]
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    with nullcontext() if "gpu" in request.param else twin_kernels():
        engine = DeviceEngine.from_checkpoint(toy, device=devices, placement=kind, max_seq=128)
        yield engine
        engine.close()


@pytest.fixture
def state(engine: DeviceEngine, facts: list[int]) -> Iterator[DeviceState]:
    state = engine.new_state()
    engine.prefill(state, facts[:POS])
    yield state
    engine.release(state)


def on_device(config: SamplerConfig, pos: int = POS) -> PlainChoice:
    return PlainChoice(config=config, first=pos + 1)


def on_host(config: SamplerConfig, pos: int = POS) -> ChooseDraft:
    """Nobody can tell what this one chooses by."""
    plain = on_device(config, pos)
    return lambda row, slot, ahead: plain(row, slot, ahead)


def walk_of(engine: DeviceEngine) -> DraftWalk:
    drafter = engine._open().drafter
    assert drafter is not None
    return (drafter._drafter if isinstance(drafter, LastDrafter) else drafter)._walk


def rows_of(proposal: Proposal) -> np.ndarray:
    return np.stack(list(proposal.rows))


def test_m27_drafts_are_those_of_the_hosts_choices(
    engine: DeviceEngine, state: DeviceState, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(PlainChoice, "__call__", _noting(PlainChoice.__call__, chosen))
    found_ids = set()
    for config in CONFIGS:
        found = engine.draft(state, facts[POS], on_device(config))
        assert not chosen
        wanted = engine.draft(state, facts[POS], on_host(config))
        assert len(chosen) == 5
        chosen.clear()
        assert (found.ids, found.conf_logits) == (wanted.ids, wanted.conf_logits), config
        assert np.array_equal(rows_of(found), rows_of(wanted))
        assert found.margins == tuple(margin_of(row) for row in wanted.rows)
        likely = [probability_of(row, token) for row, token in zip(wanted.rows, wanted.ids, strict=True)]
        assert found.probs == pytest.approx(likely, rel=1e-4, abs=1e-9)
        assert wanted.margins == wanted.probs == ()
        found_ids.add(found.ids)
    assert len(found_ids) > 4  # the settings tell


def _noting(call: Callable[..., int], chosen: list[int]) -> Callable[..., int]:
    def noting(self: PlainChoice, row: np.ndarray, slot: int, ahead: Sequence[int]) -> int:
        chosen.append(slot)
        return call(self, row, slot, ahead)

    return noting


def test_drafts_follow_the_position_and_the_pending_token(
    engine: DeviceEngine, state: DeviceState, facts: list[int]
) -> None:
    config, seen = SamplerConfig(temperature=1.5, seed=1), set()
    for pos, pending in ((POS, facts[POS]), (POS, 9), (POS + 1, 9)):
        if pos > state.pos:
            engine.forward_rows(state, facts[POS:pos])
            engine.commit(state, pos - POS)
        found = engine.draft(state, pending, on_device(config, pos))
        assert found.ids == engine.draft(state, pending, on_host(config, pos)).ids
        seen.add(found.ids)
    assert len(seen) == 3
    # of other positions than the block's, only the host knows
    elsewhere = PlainChoice(config=config, first=3)
    found, wanted = (engine.draft(state, 9, choose) for choose in (elsewhere, on_host(config, 2)))
    assert found.ids == wanted.ids not in seen and found.margins == ()


def test_rows_that_are_held_are_the_same_bits_behind_other_drafts(
    engine: DeviceEngine, state: DeviceState, facts: list[int]
) -> None:
    wanted = rows_of(engine.draft(state, facts[POS], on_host(GREEDY)))
    verified = engine.forward_rows(state, facts[POS : POS + 5])
    held = engine.draft(state, facts[POS], on_device(GREEDY))
    beside = engine.draw_rows(state, facts[POS : POS + 5], GREEDY)  # as many rows as a block
    engine.draft(state, 9, on_device(CONFIGS[2]))
    engine.draft(state, 11, on_host(CONFIGS[2]))
    assert np.array_equal(rows_of(held), wanted)
    assert np.array_equal(np.stack(list(beside.rows)), verified)


def test_m42_rows_that_nobody_holds_are_not_copied(
    engine: DeviceEngine, state: DeviceState, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[LentRows] = []
    monkeypatch.setattr(LentRows, "copy", copied.append)
    for pending in facts[POS : POS + 3]:
        assert len(engine.draft(state, pending, on_device(CONFIGS[1])).rows) == 5
    assert not copied


@pytest.mark.parametrize("rows", [2, 4, 6, 8])
def test_a_draft_and_its_rows_at_once_are_those_of_two_calls(
    engine: DeviceEngine, state: DeviceState, facts: list[int], rows: int
) -> None:
    other = engine.restore(engine.capture(state))
    for number, (drafts_by, config) in enumerate(((GREEDY, GREEDY), (CONFIGS[3], CONFIGS[3]), (GREEDY, CONFIGS[2]))):
        pending, pos = facts[state.pos + number], state.pos
        proposal = engine.draft(other, pending, on_device(drafts_by, pos))
        wanted = engine.draw_rows(other, [pending, *proposal.ids][:rows], config)
        together, found = engine.draft_and_draw(state, pending, rows, drafts_by=drafts_by, config=config)
        assert together.ms is not None and together.ms > 0
        assert replace(together, rows=(), ms=None) == replace(proposal, rows=())
        assert np.array_equal(rows_of(together), rows_of(proposal))
        assert (found.ids, found.probs) == (wanted.ids, wanted.probs)
        assert np.array_equal(np.stack(list(found.rows)), np.stack(list(wanted.rows)))
        assert state.pending == other.pending == len(found.rows) == min(rows, 6)
        for one in (state, other):
            engine.commit(one, 1 + number % 2)
        assert state.digest() == other.digest()
    engine.release(other)


def test_a_draft_and_its_rows_are_refused_as_by_two_calls(
    engine: DeviceEngine, state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers = {"drafts_by": GREEDY, "config": GREEDY}
    with pytest.raises(EngineError, match="nothing is committed"):
        engine.draft_and_draw(engine.new_state(), 7, 3, **samplers)
    with pytest.raises(EngineError, match="outside the vocabulary"):
        engine.draft_and_draw(state, 1280, 3, **samplers)
    with pytest.raises(EngineError, match="no tokens to run"):
        engine.draft_and_draw(state, 7, 0, **samplers)
    near_the_end = engine.new_state()
    engine.prefill(near_the_end, [9] * 125)
    with pytest.raises(EngineError, match="max_seq 128"):
        engine.draft_and_draw(near_the_end, 7, 4, **samplers)
    assert len(engine.draft_and_draw(near_the_end, 7, 3, **samplers)[1].ids) == 3
    monkeypatch.setattr(device_module, "can_draw_from", lambda vocab: False)
    monkeypatch.setattr(draft_walk, "can_draw_from", lambda vocab: False)
    proposal, verified = engine.draft_and_draw(state, 7, 4, **samplers)
    assert (len(proposal.ids), proposal.ms, verified.ids, len(verified.rows), state.pending) == (5, None, (), 4, 4)
    engine.release(near_the_end)


@pytest.mark.parametrize("engine", ON_GPUS, indirect=True)
def test_another_request_needs_no_other_capture(engine: DeviceEngine, state: DeviceState, facts: list[int]) -> None:
    held, ids, captured = walk_of(engine)._held, set(), set()
    for seed in (1, 2, 3):
        config = SamplerConfig(temperature=5.0 + seed, top_p=0.9, seed=seed)
        wanted = engine.draft(state, facts[POS], on_host(config)).ids
        assert engine.draft(state, facts[POS], on_device(config)).ids == wanted
        ids.add(wanted)
        captured.add(len(held))
    assert len(captured) == 1 and len(ids) == 3


def test_a_larger_vocabulary_is_left_to_the_host(
    engine: DeviceEngine, state: DeviceState, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_walk, "can_draw_from", lambda vocab: vocab < 1280)
    found = engine.draft(state, facts[POS], on_device(CONFIGS[2]))
    assert found.ids == engine.draft(state, facts[POS], on_host(CONFIGS[2])).ids and found.margins == ()


@pytest.mark.parametrize("engine", ONE, indirect=True)
@pytest.mark.parametrize(
    ("part", "place", "value", "row"),
    [
        ("markov_out", (300, 0), float("nan"), 0),
        ("markov_out", (300, 0), float("inf"), 0),
        ("confidence", (3,), float("nan"), 0),
        ("markov_in", None, float("nan"), 2),  # what the second draft says of the third
    ],
)
@pytest.mark.parametrize("config", [GREEDY, CONFIGS[1]], ids=["greedy", "sampled"])
def test_a_row_that_is_not_finite_is_named_and_the_model_goes_on(
    engine: DeviceEngine,
    facts: list[int],
    config: SamplerConfig,
    part: str,
    place: tuple[int, ...] | None,
    value: float,
    row: int,
) -> None:
    sound = engine.new_state()
    engine.prefill(sound, facts[:POS])
    ids = engine.draft(sound, facts[POS], on_device(config)).ids

    def broken(draft: RankDraft) -> RankDraft:
        changed = getattr(draft, part).clone()
        changed[place or (ids[row - 1], 0)] = value
        return replace(draft, **{part: changed})

    assert place is not None or ids[row - 1] not in (facts[POS], ids[0])
    (weights,) = engine.ranks
    assert weights.draft is not None
    with torch.inference_mode():
        changed = replace(weights, draft=broken(weights.draft))
    other = DeviceEngine([changed], engine.config, engine.contract, max_seq=128)
    state = other.new_state()
    other.prefill(state, facts[:POS])
    for choose in (on_device(config), on_host(config), on_device(config)):
        with pytest.raises(DrafterFault, match=rf"the drafter's row {row} is not finite"):
            other.draft(state, facts[POS], choose)
    for _ in range(2):
        with pytest.raises(DrafterFault, match=rf"the drafter's row {row} is not finite"):
            other.draft_and_draw(state, facts[POS], 6, drafts_by=config, config=config)
        assert (state.pos, state.pending) == (POS, 0)
    found, wanted = (one.draw_rows(of, [7, 8], config) for one, of in ((other, state), (engine, sound)))
    assert found.ids == wanted.ids
    assert np.array_equal(np.stack(list(found.rows)), np.stack(list(wanted.rows)))
    engine.release(sound)
    other.close()
