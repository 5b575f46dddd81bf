"""Tokens chosen where the rows are: those of the host's sampler, and rows that nobody looks at stay on the device.

On one GPU, on a pair and on a pipeline; once with the kernels' twins, which any machine runs, and once on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import dsv4nb
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.config import SamplerConfig
from dsv4nb.engine import device as device_module
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.graphs import Graphs
from dsv4nb.engine.lent_rows import LentRows
from dsv4nb.engine.logprobs import probability_of
from dsv4nb.engine.plain_choice import GREEDY, can_draw
from dsv4nb.engine.rank_draws import RankDraws
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.engine.sampler import choose
from dsv4nb.engine.step import Room, StepInputs, Turns
from dsv4nb.errors import EngineError
from dsv4nb.testing.placements import PLACEMENTS
from dsv4nb.testing.twin_kernels import twin_kernels

pytestmark = pytest.mark.twins

CONFIGS = (
    GREEDY,
    SamplerConfig(top_k=1, temperature=3.0),
    SamplerConfig(temperature=0.0, sampler="inverse_cdf"),
    SamplerConfig(),
    SamplerConfig(seed=2**64 - 5),
    SamplerConfig(temperature=8.0, seed=3),
    SamplerConfig(temperature=2.5, top_p=0.8, seed=4),
    SamplerConfig(temperature=4.0, top_k=20, seed=2**63),
    SamplerConfig(temperature=6.0, min_p=0.05, seed=6),
    SamplerConfig(temperature=5.0, top_k=40, top_p=0.9, min_p=0.01, seed=7),
    SamplerConfig(temperature=9.0, top_k=10**30, seed=8),
)
ON_GPUS = [
    pytest.param("one gpu", marks=pytest.mark.gpu),
    pytest.param("pair of gpus", marks=pytest.mark.gpu2),
    pytest.param("pipeline of gpus", marks=pytest.mark.gpu2),
]


@pytest.fixture(scope="module", params=["one", "pair", "pipeline", *ON_GPUS])
def engine(request: pytest.FixtureRequest) -> Iterator[DeviceEngine]:
    devices, kind = PLACEMENTS[request.param]
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    with nullcontext() if "gpu" in request.param else twin_kernels():
        engine = DeviceEngine.from_checkpoint(toy, device=devices, placement=kind, max_seq=128, drafter=False)
        yield engine
        engine.close()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_m27_choices_are_those_of_the_host(engine: DeviceEngine, facts: list[int], rows: int) -> None:
    state, tokens = engine.new_state(), facts[40 : 40 + rows]
    engine.prefill(state, facts[:40])
    wanted = engine.forward_rows(state, tokens)
    others = set()
    for config in CONFIGS:
        assert can_draw(config)
        found = engine.draw_rows(state, tokens, config)
        assert list(found.ids) == [choose(row, config, 41 + i) for i, row in enumerate(wanted)], config
        assert np.array_equal(np.stack(list(found.rows)), wanted)
        likely = [probability_of(row, token) for row, token in zip(wanted[:-1], tokens[1:], strict=True)]
        assert found.probs == pytest.approx(likely, rel=1e-4, abs=1e-9)
        others.add(found.ids)
    assert len(others) > 4  # the settings tell
    assert state.pending == rows
    engine.commit(state, rows)
    plain = engine.new_state()
    engine.prefill(plain, facts[: 40 + rows])
    row, first = engine.forward_rows(state, facts[:1]), engine.draw_rows(plain, facts[:1], CONFIGS[5])
    assert np.array_equal(row[0], first.rows[0]) and first.token(0) == choose(row[0], CONFIGS[5], 42 + rows - 1)
    for held in (state, plain):
        engine.release(held)


def test_rows_that_are_held_are_the_same_bits_behind_other_forwards(engine: DeviceEngine, facts: list[int]) -> None:
    state = engine.new_state()
    engine.prefill(state, facts[:30])
    wanted = engine.forward_rows(state, facts[30:33])
    held, last = engine.draw_rows(state, facts[30:33], GREEDY), engine.draw_rows(state, facts[30:33], GREEDY)
    first = held.rows
    engine.commit(state, 3)
    engine.draw_rows(state, facts[50:53], CONFIGS[5])
    engine.forward_rows(state, facts[60:63])
    engine.prefill(state, facts[33:70])
    assert np.array_equal(np.stack(list(first)), wanted)
    assert np.array_equal(last.rows[2], wanted[2])
    engine.release(state)


def test_m42_rows_that_nobody_holds_are_not_copied(
    engine: DeviceEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, copied = engine.new_state(), list[LentRows]()
    monkeypatch.setattr(LentRows, "copy", copied.append)
    engine.prefill(state, facts[:30])
    for first in (30, 33):
        assert len(engine.draw_rows(state, facts[first : first + 3], GREEDY).ids) == 3
        engine.commit(state, 3)
    assert not copied
    engine.release(state)


@pytest.mark.parametrize("engine", ON_GPUS, indirect=True)
def test_another_request_needs_no_other_capture(engine: DeviceEngine, facts: list[int]) -> None:
    state = engine.new_state()
    engine.prefill(state, facts[:30])
    sides = getattr(engine._forward, "_sides", None) or getattr(engine._forward, "_spans", None) or [engine._forward]

    def captured() -> int:
        draws = [side._draws for side in sides if side._draws is not None]
        return sum(len(one._held) for one in draws)

    ids = set()
    for number, seed in enumerate((1, 2, 3, 4)):
        config = SamplerConfig(temperature=5.0 + seed, top_p=0.9, seed=seed)
        ids.add(engine.draw_rows(state, facts[30:34], config).ids)
        engine.commit(state, number % 2)
        if number == 0:
            before = captured()
    assert captured() == before > 0 and len(ids) == 4
    engine.release(state)


def test_refusals_are_those_of_forward_rows(engine: DeviceEngine) -> None:
    state = engine.new_state()
    for tokens, told in (([], "no"), ([1] * 9, "at most 8"), ([-1], "-1 is outside")):
        with pytest.raises(EngineError, match=told):
            engine.draw_rows(state, tokens, GREEDY)
    engine.release(state)
    with pytest.raises(EngineError, match="released"):
        engine.draw_rows(state, [1], GREEDY)


def test_a_larger_vocabulary_is_left_to_the_host(
    engine: DeviceEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "can_draw_from", lambda vocab: vocab < 1280)
    state = engine.new_state()
    engine.prefill(state, facts[:30])
    found = engine.draw_rows(state, facts[30:33], GREEDY)
    assert (found.ids, found.probs, found.token(0), state.pending) == ((), (), None, 3)
    assert np.array_equal(np.stack(list(found.rows)), engine.forward_rows(state, facts[30:33]))
    engine.release(state)


@pytest.mark.parametrize("engine", ["one", ON_GPUS[0]], indirect=True)
def test_rows_without_numbers_are_left_to_the_host_which_refuses_them(engine: DeviceEngine) -> None:
    forward, values = engine._forward, [float("nan"), float("inf"), -float("inf"), 0.0]
    assert isinstance(forward, RankForward)
    with engine._running():
        logits = torch.zeros(5, 64, device=forward.device)
        for row, value in enumerate(values[:2]):
            logits[row, 9] = value
        logits[2] = values[2]
        logits[3, 7] = values[2]
        logits[3, 8] = 5.0
        inputs = StepInputs(engine.config, 5, 128, Turns.of(engine.config, 128, forward.device))
        inputs.given[4:] = 8
        inputs.refresh()
        draws = RankDraws(64, forward.device, Room(forward.device), Graphs(forward.device, is_on=False))
        found = {}
        for config in (GREEDY, SamplerConfig(temperature=0.1)):
            found[config] = draws.launch(logits, inputs, config).land()
    for config, one in found.items():
        assert one.ids[:4] == (-1, -1, -1, 8) and one.ids[4] == choose(one.rows[4], config, 5)
        assert [one.token(row) for row in range(4)] == [None, None, None, 8]
        assert one.probs[3] == pytest.approx(probability_of(one.rows[3], 8))
        for row in one.rows[:3]:
            with pytest.raises(EngineError, match="the best logit of the row is"):
                choose(row, config, 1)
