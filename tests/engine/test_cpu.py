"""CpuEngine as the protocol wants it: refusals, progress, cancelling, untouched rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import BF16_FULL, FP32_FULL
from dsv4nb.engine import blocks, forward, head, ops
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled, Engine
from dsv4nb.engine.state import CpuState
from dsv4nb.errors import EngineError
from dsv4nb.weights.store import Weights

MakeEngine = Callable[..., CpuEngine]

LENGTHS = [*range(1, 10), *range(126, 131), *range(255, 258)]


def poisoned(engine: CpuEngine, value: float) -> CpuState:
    """Return an empty state whose rings, and the blocks that it is going to get, hold `value`."""
    state, before = engine.new_state(), engine.new_state()
    before.reserve(300)
    engine.release(before)
    for layer in state.layers:
        layer.window.fill_(value)
        for cache in (layer.compressor, layer.indexer):
            if cache is not None:
                cache.source.fill_(value)
                cache.entries.pool.rows.fill_(value)
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
        state = poisoned(engine, value)
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


def test_c15_cancelled_prompts_leave_nothing_behind(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    rooms = set()
    for _ in range(10):
        state, answers = engine.new_state(), iter([False, True])
        with pytest.raises(Cancelled):
            engine.prefill(state, prompt[:400], should_stop=lambda answers=answers: next(answers))  # type: ignore[misc]
        assert engine.blocks_in_use == 3
        engine.release(state)
        assert engine.blocks_in_use == 0
        rooms.add(tuple(pool.rows.shape[0] for pool in state.pools))
    assert len(rooms) == 1


def test_h31_refuses_by_name_and_leaves_the_state(make_engine: MakeEngine, prompt: list[int]) -> None:
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
    engine = make_engine(threads=before + 1)
    engine.prefill(engine.new_state(), prompt[:3])
    assert torch.get_num_threads() == before


class Failing:
    """Stands for an operation: counts its calls while armed, and raises in the one with a given number."""

    def __init__(self, operation: Callable[..., Any], is_armed: Callable[[], bool], fail_at: int | None) -> None:
        self.operation, self.is_armed, self.fail_at, self.calls = operation, is_armed, fail_at, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.is_armed():
            self.calls += 1
            if self.calls - 1 == self.fail_at:
                raise RuntimeError("injected")
        return self.operation(*args, **options)


# of every stage of a layer, writes included; how often one runs depends on the layers that have it
OPERATIONS = [
    *("hyper_mix", "fp8_rows", "norm_rope_rows", "write_rows", "bf16_rows", "compress", "rope_entries", "index_rows"),
    *("index_scores", "top_entries", "sparse_attention", "route", "expert_up", "expert_down", "hyper_expand"),
]
# committed ids, ids to run, committed ids when the fault strikes; every operation takes part in each of these
RUNS = {"prefill": (254, 50, 256), "decode": (255, 1, 255), "verify": (254, 6, 254)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A prefill or a forward that is going to fail, and what it gives when it does not.

    Attributes:
        start: arrays of the state at `before`.
        committed, digest: where the fault strikes, and the state there.
        rows, end: logits, and the state when all rows are committed.
    """

    tokens: list[int]
    is_prefill: bool
    before: int
    start: dict[str, npt.NDArray[np.float32]]
    committed: int
    digest: str
    rows: npt.NDArray[np.float32]
    end: str

    def go(self, engine: CpuEngine, state: CpuState) -> npt.NDArray[np.float32]:
        """Run what is left of the tokens."""
        rest = self.tokens[state.pos :]
        return engine.prefill(state, rest).logits if self.is_prefill else engine.forward_rows(state, rest)


@pytest.fixture(scope="module", params=RUNS)
def cold_run(request: pytest.FixtureRequest, make_engine: MakeEngine, prompt: list[int]) -> Run:
    before, count, committed = RUNS[request.param]
    tokens, is_prefill = prompt[: before + count], request.param == "prefill"
    engine = make_engine(FP32_FULL)
    state = engine.new_state()
    engine.prefill(state, tokens[:before])
    start = engine.dump(engine.capture(state))
    if committed > before:
        engine.prefill(state, tokens[before:committed])
    digest = state.digest()
    run = (
        engine.prefill(state, tokens[committed:]).logits if is_prefill else engine.forward_rows(state, tokens[before:])
    )
    engine.commit(state, state.pending)
    return Run(
        tokens=tokens,
        is_prefill=is_prefill,
        before=before,
        start=start,
        committed=committed,
        digest=digest,
        rows=run,
        end=state.digest(),
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_h20_a_fault_in_any_layer_leaves_what_is_committed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, cold_run: Run, operation: str
) -> None:
    engine = make_engine(FP32_FULL)
    start = engine.load(cold_run.start, cold_run.before)

    def attempt(state: CpuState, fail_at: int | None) -> int:
        """Run, and return how often the operation was called in the forward that is to fail."""
        failing = Failing(getattr(ops, operation), lambda: state.pos == cold_run.committed, fail_at)
        with monkeypatch.context() as patch:
            patch.setattr(ops, operation, failing)
            cold_run.go(engine, state)
        return failing.calls

    calls = attempt(engine.restore(start), None)
    assert calls > 0
    for fail_at in {0, calls // 2, calls - 1}:
        state = engine.restore(start)
        with pytest.raises(RuntimeError, match="injected"):
            attempt(state, fail_at)
        assert (state.pos, state.pending, state.digest()) == (cold_run.committed, 0, cold_run.digest)
        assert np.array_equal(cold_run.go(engine, state), cold_run.rows)
        engine.commit(state, state.pending)
        assert state.digest() == cold_run.end


def test_h27_only_the_last_position_of_a_prompt_goes_through_the_head(
    make_engine: MakeEngine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def counting(stream: Tensor, *args: Any) -> Tensor:
        rows.append(stream.shape[0])
        return head.head_logits(stream, *args)

    monkeypatch.setattr(forward, "head_logits", counting)
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, (prompt * 2)[:700])
    engine.prefill(state, prompt[:5])
    assert rows == [8, 8]  # one tile each, the least there is


def test_running_out_of_memory_is_a_memory_error(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, empty = make_engine(), torch.empty
    snapshot = engine.capture(engine.new_state())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_: empty(1 << 60))
        for make in (engine.new_state, lambda: engine.restore(snapshot)):
            with pytest.raises(MemoryError, match="can't allocate memory"):
                make()
    assert engine.restore(snapshot).digest() == engine.new_state().digest()


def refuse(*_: Any) -> Tensor:
    raise MemoryError("no room")


def too_much(*_: Any) -> Tensor:
    return torch.empty(1 << 60)  # torch's own words for it


@pytest.mark.parametrize("allocate", [refuse, too_much])
@pytest.mark.parametrize("rows", [8, 300])
def test_h02_when_growing_fails_all_works_on(
    make_engine: MakeEngine,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
    allocate: Callable[..., Tensor],
    rows: int,
) -> None:
    engine = make_engine()
    prompt = (prompt * 2)[: 510 + rows]
    state = engine.new_state()
    engine.prefill(state, prompt[:510])
    snapshot, digest = engine.capture(state), state.digest()
    other = engine.restore(snapshot)
    run = engine.prefill if rows > MAX_ROWS else engine.forward_rows
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "new_rows", allocate)
        for one in (state, other, state):
            with pytest.raises(MemoryError):
                run(one, prompt[510:])
            assert (one.pos, one.pending, one.digest()) == (510, 0, digest)
            with pytest.raises(EngineError, match="left 0 rows"):
                engine.commit(one, 1)
        assert np.isfinite(engine.forward_rows(state, prompt[510:511])).all()  # completes no entry: needs no room
    cold = engine.new_state()
    expected = engine.prefill(cold, prompt).logits
    for one in (state, other, engine.restore(snapshot)):
        assert np.array_equal(engine.prefill(one, prompt[510:]).logits, expected)
        assert one.digest() == cold.digest()


def test_h02_a_state_that_grew_equals_one_that_did_not(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine, roomy = make_engine(max_seq=4096), make_engine(max_seq=4096)
    first = roomy.new_state()
    first.reserve(3000)
    grown, ready = engine.new_state(), roomy.new_state()
    roomy.release(first)
    sizes = set()
    for start in range(0, 2600, 260):
        part = (prompt * 6)[start : start + 260]
        assert np.array_equal(engine.prefill(grown, part).logits, roomy.prefill(ready, part).logits)
        sizes.add(next(iter(engine._pools)).rows.shape[0])
    assert len(sizes) > 3 and grown.digest() == ready.digest()


def test_what_is_released_is_refused_by_name(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, prompt[:9])
    snapshot, kept = engine.capture(state), engine.capture(state)
    for _ in range(2):
        engine.release(state)
        snapshot.release()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: engine.prefill(state, [9]), "the state at position 9 was released"),
        (lambda: engine.forward_rows(state, [9]), "the state at position 9 was released"),
        (lambda: engine.commit(state, 0), "the state at position 9 was released"),
        (lambda: engine.capture(state), "the state at position 9 was released"),
        (lambda: engine.restore(snapshot), "the snapshot at position 9 was released"),
        (lambda: engine.dump(snapshot), "the snapshot at position 9 was released"),
    ]
    for call, message in calls:
        with pytest.raises(EngineError, match=message):
            call()
    assert engine.restore(kept).pos == snapshot.pos == 9


def test_what_another_engine_made_is_refused_by_name(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()
    state = other.new_state()
    snapshot = other.capture(state)
    for call in (
        lambda: engine.forward_rows(state, [9]),
        lambda: engine.capture(state),
        lambda: engine.release(state),
    ):
        with pytest.raises(EngineError, match="this engine's new_state"):
            call()
    for ask in (engine.restore, engine.dump):
        with pytest.raises(EngineError, match="this engine's capture"):
            ask(snapshot)
    assert not state.is_released
