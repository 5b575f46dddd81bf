"""The engine's drafter: drafts of an independent reference, rings, what a draft depends on (dspark.md 10.3, 10.4)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import CONTRACTS, FP32_FULL, FP32_PLAIN, Contract
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.protocol import MAX_ROWS, Proposal, Row
from dsv4nb.engine.state import CpuState
from dsv4nb.errors import DrafterFault, EngineError
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.store import DraftWeights, Weights

MakeEngine = Callable[..., CpuEngine]


def greedy(row: Row, slot: int, ahead: Sequence[int]) -> int:
    return int(row.argmax())


@pytest.fixture(scope="module")
def weights(dspark_checkpoint: Checkpoint) -> Weights:
    return load_weights(dspark_checkpoint)


@pytest.fixture(scope="module")
def make_engine(dspark_checkpoint: Checkpoint, weights: Weights) -> MakeEngine:
    def make(contract: Contract = FP32_PLAIN, weights: Weights = weights) -> CpuEngine:
        return CpuEngine(weights, dspark_checkpoint.config, contract, max_seq=1024)

    return make


@pytest.fixture(scope="module")
def prompt(goldens_dspark: Path) -> list[int]:
    ids: list[int] = load_file(goldens_dspark / "fp32_plain.safetensors")["prompt"].tolist()
    return ids


def standing(engine: CpuEngine, ids: Sequence[int]) -> CpuState:
    state = engine.new_state()
    if ids:
        engine.prefill(state, ids)
    return state


def with_drafter(weights: Weights, change: Callable[[DraftWeights], DraftWeights]) -> Weights:
    assert weights.drafter is not None
    return replace(weights, drafter=change(weights.drafter))


# largest and median difference of a row; a rounding that falls the other way moves a row by whole steps
LIMITS = {"fp32_plain": (1e-4, 1e-4), "fp32_qat": (float("inf"), 1e-3), "fp32_full": (float("inf"), 1e-3)}


@pytest.mark.parametrize("mode", LIMITS)
def test_matches_the_frozen_drafts(make_engine: MakeEngine, goldens_dspark: Path, prompt: list[int], mode: str) -> None:
    golden = load_file(goldens_dspark / f"{mode}.safetensors")
    taps = load_file(goldens_dspark / "fp32_plain.safetensors")["dspark.taps"]
    engine, same, off = make_engine(CONTRACTS[mode]), 0, []
    for i, position in enumerate(golden["dspark.position"].tolist()):
        pending, *expected = golden["dspark.ids"][i].tolist()
        state = standing(engine, prompt[:position])
        assert state.rings is not None
        if mode != "fp32_plain":  # the frozen drafts start from taps without rounding
            state.rings.taps[:position] = taps[:position]
        drafted = engine.draft(state, pending, greedy)
        same += sum(a == b for a, b in zip(drafted.ids, expected, strict=True))
        off.append(np.abs(drafted.rows[0] - golden["dspark.logits"][i, 0].numpy()).max())
        if mode == "fp32_plain":
            assert drafted.ids == tuple(expected)
            torch.testing.assert_close(
                torch.tensor(drafted.conf_logits), golden["dspark.confidence"][i], rtol=0, atol=1e-4
            )
            rows = torch.from_numpy(np.stack(drafted.rows))
            torch.testing.assert_close(rows, golden["dspark.logits"][i], rtol=0, atol=1e-4)
    assert max(off) <= LIMITS[mode][0] and float(np.median(off)) <= LIMITS[mode][1]
    assert same >= 0.8 * 5 * len(off)


def test_the_ring_matches_the_frozen_one(make_engine: MakeEngine, goldens_dspark: Path, prompt: list[int]) -> None:
    golden = load_file(goldens_dspark / "fp32_plain.safetensors")
    state = standing(make_engine(), prompt)
    rows = {name: value for name, value in state.live() if name.startswith("mtp.")}
    assert list(rows) == [f"mtp.{stage}.window" for stage in range(3)]
    for found, expected in zip(rows.values(), golden["dspark.ring"], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pos", [1, 2, 33, 63, 64, 65, 127, 128, 129, 140])
def test_a_block_sees_the_window_before_it(make_engine: MakeEngine, prompt: list[int], pos: int) -> None:
    state = standing(make_engine(), prompt[:pos])
    assert state.rings is not None
    seen = state.rings.seen(pos).tolist()
    assert seen == [p % state.rings.rows.shape[1] for p in range(max(0, pos - 64), pos)]


def test_drafting_changes_nothing(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine(FP32_FULL)
    state = standing(engine, prompt[:100])
    rows = engine.forward_rows(state, prompt[100:104])
    before = state.digest()
    first, second = (engine.draft(state, 7, greedy) for _ in range(2))
    assert first.ids == second.ids and first.conf_logits == second.conf_logits
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, second.rows, strict=True))
    assert state.digest() == before and state.pending == 4
    engine.commit(state, 4)
    other = standing(engine, prompt[:104])
    assert state.digest() == other.digest() and rows.shape[0] == 4


def test_each_draft_is_chosen_behind_the_ones_before_it(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine, calls = make_engine(), []

    def choose(row: Row, slot: int, ahead: Sequence[int]) -> int:
        calls.append((slot, tuple(ahead), row.shape))
        return 10 + slot

    proposal = engine.draft(standing(engine, prompt[:50]), 7, choose)
    assert proposal.ids == (10, 11, 12, 13, 14)
    assert calls == [(i, tuple(range(10, 10 + i)), (256,)) for i in range(5)]


def test_only_the_markov_head_lets_a_draft_see_the_one_before(
    make_engine: MakeEngine, weights: Weights, prompt: list[int]
) -> None:
    def second_row(engine: CpuEngine, first: int) -> Row:
        state = standing(engine, prompt[:60])
        return engine.draft(state, 7, lambda row, slot, ahead: first if slot == 0 else 0).rows[1]

    engine = make_engine()
    assert not np.array_equal(second_row(engine, 20), second_row(engine, 21))
    silent = with_drafter(weights, lambda d: replace(d, markov_out=torch.zeros_like(d.markov_out)))
    engine = make_engine(weights=silent)
    assert np.array_equal(second_row(engine, 20), second_row(engine, 21))


def test_what_left_the_window_does_not_matter(make_engine: MakeEngine, weights: Weights, prompt: list[int]) -> None:
    """With the trunk's taps cut off from the past, a token 65 back changes no draft, one 64 back does."""
    engine = make_engine()
    base = standing(engine, prompt[:100])
    assert base.rings is not None and base.rings.upto == 0

    def drafts(changed: int) -> Proposal:
        state = standing(engine, prompt[:100])
        assert state.rings is not None
        state.rings.taps[changed % state.rings.taps.shape[0]] += 1.0
        return engine.draft(state, 7, greedy)

    plain = engine.draft(base, 7, greedy)
    assert np.array_equal(drafts(35).rows[0], plain.rows[0])
    assert not np.array_equal(drafts(36).rows[0], plain.rows[0])


def test_rings_written_late_or_in_pieces_are_the_same_bits(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine(FP32_FULL)
    whole = standing(engine, prompt)
    pieces, rng = engine.new_state(), random.Random(1)
    while pieces.pos < len(prompt):
        engine.prefill(pieces, prompt[pieces.pos : pieces.pos + rng.choice((1, 2, 3, 9, 30))])
        if rng.random() < 0.5:
            engine.draft(pieces, 7, greedy)
    assert pieces.digest() == whole.digest()
    again = engine.restore(engine.capture(whole))
    assert again.digest() == whole.digest()
    assert engine.draft(again, 9, greedy).conf_logits == engine.draft(whole, 9, greedy).conf_logits
    loaded = engine.restore(engine.load(engine.dump(engine.capture(whole)), len(prompt)))
    assert loaded.digest() == whole.digest()


@pytest.mark.parametrize("phase", [125, 126, 127, 128])
def test_m27_every_width_and_accepted_count_at_every_phase(
    make_engine: MakeEngine, prompt: list[int], phase: int
) -> None:
    """Rolling back is one assignment, drafter rings included (dspark.md 10.3); around an entry of ratio 128."""
    engine = make_engine(FP32_FULL)
    start = standing(engine, prompt[:phase])
    snapshot = engine.capture(start)
    single, digests, logits = engine.restore(snapshot), {0: start.digest()}, []
    ahead = [(11 * i + phase) % 240 + 8 for i in range(MAX_ROWS)]
    for n, token in enumerate(ahead[:6], 1):
        logits.append(engine.forward_rows(single, [token])[0])
        engine.commit(single, 1)
        digests[n] = single.digest()
    for width in range(1, 7):
        for kept in range(width + 1):
            state = engine.restore(snapshot)
            rows = engine.forward_rows(state, [*ahead[:kept], *[9] * (width - kept)])
            assert all(np.array_equal(rows[i], logits[i]) for i in range(kept))
            engine.commit(state, kept)
            assert state.digest() == digests[kept], (width, kept)
            engine.release(state)


def test_rounds_of_any_accept_count_leave_what_single_steps_leave(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(FP32_FULL), random.Random(5)
    state, single = standing(engine, [9, 10, 11]), standing(engine, [9, 10, 11])
    for number in range(60):
        width = rng.randint(1, 6)
        kept = rng.randint(1, width)
        tokens = [rng.randrange(8, 250) for _ in range(width)]
        if number % 7 == 0:
            engine.draft(state, tokens[0], greedy)
        engine.forward_rows(state, tokens)
        engine.commit(state, kept)
        engine.prefill(single, tokens[:kept])
        if number % 10 == 9:
            assert state.digest() == single.digest(), number
    assert state.pos > 128 and state.digest() == single.digest()


def test_a_drafter_is_not_there_or_its_call_is_wrong(
    make_engine: MakeEngine, weights: Weights, dspark_checkpoint: Checkpoint, prompt: list[int]
) -> None:
    plain = CpuEngine(load_weights(dspark_checkpoint, drafter=False), dspark_checkpoint.config, FP32_PLAIN)
    assert plain.block_size == 0 and "drafter" not in plain.layout() and "drafter" not in plain.state_bytes(100)
    with pytest.raises(EngineError, match="no drafter"):
        plain.draft(standing(plain, prompt[:5]), 7, greedy)
    engine = make_engine()
    assert engine.block_size == 5 and engine.layout() != plain.layout()
    with pytest.raises(EngineError, match="nothing is committed"):
        engine.draft(engine.new_state(), 7, greedy)
    with pytest.raises(EngineError, match="token id 256 is outside"):
        engine.draft(standing(engine, prompt[:5]), 256, greedy)
    snapshot = plain.capture(standing(plain, prompt[:5]))
    with pytest.raises(EngineError, match=r"arrays without mtp\.0\.window"):
        engine.load(plain.dump(snapshot), 5)


@pytest.mark.parametrize("part", ["markov_out", "confidence", "main_norm"])
def test_a_drafter_that_computes_no_numbers_is_named_and_the_model_goes_on(
    make_engine: MakeEngine, weights: Weights, prompt: list[int], part: str
) -> None:
    def broken(drafter: DraftWeights) -> DraftWeights:
        value = getattr(drafter, part).clone()
        value.view(-1)[3] = float("nan")
        return replace(drafter, **{part: value})

    engine, sound = make_engine(weights=with_drafter(weights, broken)), make_engine()
    state = standing(engine, prompt[:40])
    with pytest.raises(DrafterFault, match="not finite"):
        engine.draft(state, 7, greedy)
    expected = sound.forward_rows(standing(sound, prompt[:40]), [7, 8])
    assert np.array_equal(engine.forward_rows(state, [7, 8]), expected)


def test_state_bytes_count_what_a_state_holds(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    state = standing(engine, prompt)
    assert state.rings is not None
    assert engine.state_bytes(len(prompt))["drafter"] == state.rings.taps.nbytes + state.rings.rows.nbytes
