"""CpuEngine as the protocol wants it: refusals, progress, cancelling, untouched rows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import BF16_FULL, FP32_FULL
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled, Engine
from dsv4nb.engine.state import CpuState
from dsv4nb.errors import EngineError
from dsv4nb.weights.store import Weights

MakeEngine = Callable[..., CpuEngine]

LENGTHS = [*range(1, 10), *range(126, 131), *range(255, 258)]


def poison(state: CpuState, value: float) -> CpuState:
    for layer in state.layers:
        layer.window.fill_(value)
        for cache in (layer.compressor, layer.indexer):
            if cache is not None:
                cache.source.fill_(value)
                cache.entries.fill_(value)
    return state


def test_is_an_engine(make_engine: MakeEngine, checkpoint: Checkpoint) -> None:
    engine: Engine = make_engine(max_seq=77)
    assert (engine.vocab_size, engine.max_seq) == (checkpoint.config.vocab_size, 77)
    assert engine.new_state().pos == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_unwritten_rows_are_never_read(make_engine: MakeEngine, prompt: list[int], length: int) -> None:
    engine = make_engine(FP32_FULL)
    results = []
    for value in (0.0, float("nan")):
        state = poison(engine.new_state(), value)
        logits = [engine.prefill(state, prompt[:length]).logits, *engine.forward_rows(state, prompt[:6])]
        results.append(np.stack(logits))
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])


def test_prefill_reports_progress_and_what_it_ran(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    state, seen = engine.new_state(), []
    engine.prefill(state, prompt[:10])
    done = engine.prefill(state, prompt[10:400], on_progress=lambda n, of: seen.append((n, of)))
    assert (done.pos, done.computed, state.pos) == (400, 390, 400)
    assert seen == [(246, 390), (390, 390)]
    assert done.logits.shape == (engine.vocab_size,)
    assert done.logits.dtype == np.float32


def test_cancelling_keeps_the_finished_chunks(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    state, answers = engine.new_state(), iter([False, True])
    with pytest.raises(Cancelled):
        engine.prefill(state, prompt[:400], should_stop=lambda: next(answers))
    assert state.pos == 256
    rest, cold = engine.prefill(state, prompt[256:400]), engine.new_state()
    assert np.array_equal(rest.logits, engine.prefill(cold, prompt[:400]).logits)
    assert state.digest() == cold.digest()


def test_refuses_by_name_and_leaves_the_state(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine(max_seq=32)
    state = engine.new_state()
    engine.prefill(state, prompt[:30])
    engine.forward_rows(state, prompt[:2])
    digest = state.digest()
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: engine.prefill(state, prompt[:3]), "max_seq 32"),
        (lambda: engine.forward_rows(state, prompt[:3]), "max_seq 32"),
        (lambda: engine.forward_rows(state, prompt[: MAX_ROWS + 1]), "at most 8"),
        (lambda: engine.prefill(state, []), "no tokens"),
        (lambda: engine.forward_rows(state, [engine.vocab_size]), "256 is outside the vocabulary"),
        (lambda: engine.forward_rows(state, [3, -1]), "-1 is outside the vocabulary"),
        (lambda: engine.commit(state, 3), "left 2 rows"),
        (lambda: engine.commit(object(), 1), "new_state"),  # type: ignore[arg-type]
    ]
    for call, message in refused:
        with pytest.raises(EngineError, match=message):
            call()
    assert (state.pos, state.pending, state.digest()) == (30, 2, digest)


def test_refuses_bfloat16_activations(checkpoint: Checkpoint, weights: Weights) -> None:
    with pytest.raises(EngineError, match="bf16_full"):
        CpuEngine(weights, checkpoint.config, BF16_FULL)


def test_a_closed_engine_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.forward_rows(state, [1])


def test_two_sequences_do_not_meet(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    alone = engine.new_state()
    engine.prefill(alone, prompt[:140])
    a, b = engine.new_state(), engine.new_state()
    for i in range(140):
        for state, token in ((a, prompt[i]), (b, prompt[-i - 1])):
            engine.forward_rows(state, [token])
            engine.commit(state, 1)
    assert a.digest() == alone.digest() != b.digest()


def test_the_callers_thread_count_is_put_back(make_engine: MakeEngine, prompt: list[int]) -> None:
    before = torch.get_num_threads()
    make_engine(threads=before + 1).prefill(make_engine().new_state(), prompt[:3])
    assert torch.get_num_threads() == before


def test_a_failing_forward_leaves_the_committed_rows(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    state, cold = engine.new_state(), engine.new_state()
    engine.prefill(state, prompt[:20])
    kept = state.layers[2].window
    state.layers[2].window = torch.empty(1, 1)
    with pytest.raises((IndexError, RuntimeError)):
        engine.forward_rows(state, prompt[20:24])
    assert (state.pos, state.pending) == (20, 0)
    state.layers[2].window = kept
    engine.prefill(state, prompt[20:60])
    engine.prefill(cold, prompt[:60])
    assert state.digest() == cold.digest()
