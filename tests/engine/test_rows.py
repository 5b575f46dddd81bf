"""A row is the same bits in a prompt however cut, alone, and in a verify batch (dspark.md 3.2, 10.3; C-11, C-13)."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from dsv4nb.contract import FP32_FULL, FP32_PLAIN, Contract
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.protocol import MAX_ROWS

MakeEngine = Callable[..., CpuEngine]

CONTRACTS = [FP32_PLAIN, FP32_FULL]
CUTS = [
    [*[1] * 140, 160],
    [3, 5, 4, 1, 287],
    [127, 1, 172],
    [129, 171],
    [130, 126, 44],
    [4] * 75,
    [64, 64, 64, 64, 44],
]


def random_cut(seed: int, total: int) -> list[int]:
    rng = random.Random(seed)
    cut: list[int] = []
    while (left := total - sum(cut)) > 0:
        cut.append(min(left, rng.choice([1, 2, 3, 5, 8, 9, 31, 64, 127, 128, 200])))
    return cut


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_how_a_prompt_is_cut_changes_no_bit(make_engine: MakeEngine, prompt: list[int], contract: Contract) -> None:
    engine = make_engine(contract)

    def run(cut: list[int]) -> tuple[bytes, str]:
        state, done = engine.new_state(), 0
        for n in cut:
            logits = engine.prefill(state, prompt[done : done + n]).logits
            done += n
        return logits.tobytes(), state.digest()

    whole = run([300])
    for cut in CUTS + [random_cut(seed, 300) for seed in range(3)]:
        assert run(cut) == whole, cut


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
@pytest.mark.parametrize("start", [0, 13, 124, 200])
def test_any_batch_with_any_committed_part_equals_single_steps(
    make_engine: MakeEngine, prompt: list[int], contract: Contract, start: int
) -> None:
    engine = make_engine(contract)
    state = engine.new_state()
    if start:
        engine.prefill(state, prompt[:start])
    logits, digests = {}, {start: state.digest()}
    for pos in range(start, start + 40):
        logits[pos] = engine.forward_rows(state, [prompt[pos]])[0]
        engine.commit(state, 1)
        digests[pos + 1] = state.digest()

    rng = random.Random(start)
    state = engine.new_state()
    if start:
        engine.prefill(state, prompt[:start])
    seen = set()
    while state.pos < start + 40 - MAX_ROWS:
        rows = rng.randint(1, MAX_ROWS)
        kept = rng.randint(0, rows)
        wrong = [rng.randrange(engine.vocab_size) for _ in range(rows - kept)]
        batch = engine.forward_rows(state, prompt[state.pos : state.pos + kept] + wrong)
        for i in range(kept):
            assert np.array_equal(batch[i], logits[state.pos + i]), (state.pos, rows, kept, i)
        seen.add((state.pos % 4, rows))
        engine.commit(state, kept)
        assert state.digest() == digests[state.pos], (state.pos, rows, kept)
    assert len(seen) > 3


@pytest.mark.parametrize("start", range(121, 137))
def test_every_start_around_a_pooled_window_and_every_accepted_count(
    make_engine: MakeEngine, prompt: list[int], start: int
) -> None:
    engine = make_engine(FP32_FULL)
    cold = engine.new_state()
    engine.prefill(cold, prompt[:start])
    digests = [cold.digest()]
    for token in prompt[start : start + 6]:
        engine.forward_rows(cold, [token])
        engine.commit(cold, 1)
        digests.append(cold.digest())
    for kept in range(7):
        state = engine.new_state()
        engine.prefill(state, prompt[:start])
        engine.forward_rows(state, prompt[start : start + kept] + [9] * (6 - kept))
        engine.commit(state, kept)
        assert state.digest() == digests[kept], kept


def test_two_threads_give_the_same_bits_among_themselves(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine(FP32_FULL, threads=2)
    results = set()
    for cut in ([150], [146, 1, 1, 1, 1], [7, 64, 79]):
        state, done = engine.new_state(), 0
        for n in cut:
            logits = engine.prefill(state, prompt[done : done + n]).logits
            done += n
        results.add((logits.tobytes(), state.digest()))
    assert len(results) == 1
