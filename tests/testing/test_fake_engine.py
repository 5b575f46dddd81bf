from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsv4nb.encoding.constants import EOS, THINK_CLOSE
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled, Engine
from dsv4nb.errors import EngineError
from dsv4nb.testing.fake_engine import FakeEngine, FakeState, FakeTokenizer
from dsv4nb.testing.fake_model import fake_model


def test_it_is_an_engine_that_says_its_script() -> None:
    engine: Engine = FakeEngine([7, 8, 9], vocab_size=16)
    state = engine.new_state()
    first = engine.prefill(state, [3, 4])
    assert (first.pos, first.computed, int(first.logits.argmax())) == (2, 2, 7)
    rows = engine.forward_rows(state, [7, 8, 9])
    assert rows.shape == (3, 16) and rows.dtype == np.float32
    assert rows.argmax(1).tolist() == [8, 9, 1]
    engine.commit(state, 2)
    assert state.pos == 4
    assert engine.forward_rows(state, [9]).argmax(1).tolist() == [1]


def test_sequences_take_the_scripts_in_turn() -> None:
    engine = FakeEngine([7], [8])
    heads = [int(engine.prefill(engine.new_state(), [3]).logits.argmax()) for _ in range(3)]
    assert heads == [7, 8, 8]


def test_it_counts_waits_and_fails_as_told() -> None:
    engine = FakeEngine(
        [7] * 9, delay_s=0.02, chunk=2, faults={1: ValueError("x")}, prefill_faults={1: ValueError("y")}
    )
    state = engine.new_state()
    progress: list[tuple[int, int]] = []
    engine.prefill(state, [3] * 5, on_progress=lambda done, of: progress.append((done, of)))
    assert progress == [(2, 5), (4, 5), (5, 5)]
    started = time.monotonic()
    engine.forward_rows(state, [7])
    assert time.monotonic() - started >= 0.02
    with pytest.raises(ValueError, match="x"):
        engine.forward_rows(state, [7])
    with pytest.raises(ValueError, match="y"):
        engine.prefill(engine.new_state(), [3])
    engine.close()
    counted = {"new_state": 2, "prefill": 2, "chunks": 3, "forward_rows": 2, "close": 1}
    assert engine.calls == dict.fromkeys(engine.calls, 0) | counted
    assert engine.prefilled == [5, 0]


def test_a_stopped_prefill_keeps_finished_chunks() -> None:
    engine = FakeEngine([7], chunk=2)
    state = engine.new_state()
    with pytest.raises(Cancelled):
        engine.prefill(state, [3] * 5, should_stop=lambda: state.pos >= 2)
    assert state.ledger == [3, 3]


def test_every_step_can_be_watched_and_failed() -> None:
    seen: list[tuple[str, int]] = []

    def on_step(step: str, state: FakeState) -> None:
        assert state.prompt == (3, 4, 5)
        seen.append((step, state.pos))
        if len(seen) == 5:
            raise ValueError("watched")

    engine = FakeEngine([7] * 9, chunk=2, on_step=on_step)
    state = engine.new_state()
    engine.prefill(state, [3, 4, 5])
    engine.forward_rows(state, [7])
    with pytest.raises(ValueError, match="watched"):
        engine.forward_rows(state, [7])
    assert seen == [("prefill", 0), ("chunk", 0), ("chunk", 2), ("forward_rows", 3), ("forward_rows", 3)]
    assert len(engine.intervals) == 3 and engine.intervals == sorted(engine.intervals)


@pytest.mark.parametrize("faults", [{"prefill_faults": {0: ValueError("x")}}, {"chunk": 1}], ids=str)
def test_a_prefill_that_does_not_end_leaves_its_prompt_and_its_interval(faults: dict[str, Any]) -> None:
    engine = FakeEngine([7], **faults)
    state = engine.new_state()
    with pytest.raises((ValueError, Cancelled)):
        engine.prefill(state, [3, 4], should_stop=lambda: state.pos == 1)
    assert state.prompt == (3, 4) and len(engine.intervals) == 1


def best(engine: FakeEngine, state: FakeState, *tokens: int) -> list[int]:
    """Return what follows each of `tokens`, and forget them again."""
    found: list[int] = engine.forward_rows(state, tokens).argmax(1).tolist()
    engine.commit(state, 0)
    return found


def test_a_snapshot_goes_on_where_it_was_taken_as_often_as_asked() -> None:
    engine = FakeEngine([7, 8, 9, 10])
    state = engine.new_state()
    engine.prefill(state, [3, 4])
    engine.forward_rows(state, [7])
    engine.commit(state, 1)
    snapshot = engine.capture(state)
    engine.forward_rows(state, [8, 9])
    engine.commit(state, 2)
    branches = [engine.restore(snapshot) for _ in range(2)]
    assert [branch.pos for branch in branches] == [snapshot.pos, 3]
    assert [best(engine, branch, 8, 9) for branch in branches] == [[9, 10]] * 2
    assert state.ledger == [3, 4, 7, 8, 9] and branches[1].ledger == [3, 4, 7]


def test_a_sequence_that_is_asked_again_takes_the_next_script() -> None:
    engine = FakeEngine([7, 7], [8, 8], [9, 9], [10, 10])
    state = engine.new_state()
    engine.prefill(state, [3])
    anchor = engine.capture(state)
    assert engine.prefill(state, [4]).logits.argmax() == 7  # one prompt in two pieces
    assert best(engine, state, 7) == [7]
    assert engine.prefill(state, [5]).logits.argmax() == 8
    assert best(engine, state, 8) == [8]
    assert engine.prefill(engine.restore(anchor), [6]).logits.argmax() == 9
    assert engine.prefill(engine.new_state(), [3]).logits.argmax() == 10


def test_next_id_decides_by_the_ids_alone() -> None:
    engine = FakeEngine(next_id=lambda ids: (31 * sum(ids) + len(ids)) % 97)
    cold, state = engine.new_state(), engine.new_state()
    engine.prefill(state, [3, 4])
    snapshot = engine.capture(state)
    assert best(engine, state, 5, 6) == best(engine, engine.restore(snapshot), 5, 6)
    engine.prefill(state, [5, 6])
    row = engine.prefill(cold, [3, 4, 5, 6]).logits
    assert int(row.argmax()) == (31 * 18 + 4) % 97
    assert best(engine, state, 8) == best(engine, cold, 8) == [(31 * 26 + 5) % 97]


def test_what_is_released_is_refused_and_no_longer_counted() -> None:
    engine: Engine = FakeEngine([7])
    state = engine.new_state()
    engine.prefill(state, [3])
    kept, forgotten = engine.capture(state), engine.capture(state)
    assert engine.blocks_in_use == 3 and kept.nbytes == forgotten.nbytes
    del forgotten
    gc.collect()
    assert engine.blocks_in_use == 2
    for _ in range(2):
        engine.release(state)
        kept.release()
    assert engine.blocks_in_use == 0
    calls: list[Callable[[], object]] = [
        lambda: engine.prefill(state, [3]),
        lambda: engine.forward_rows(state, [3]),
        lambda: engine.commit(state, 0),
        lambda: engine.capture(state),
        lambda: engine.restore(kept),
        lambda: engine.dump(kept),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="at position 1 was released"):
            call()


def test_a_dumped_snapshot_comes_back_in_another_engine() -> None:
    engine, other = FakeEngine([7, 8, 9]), FakeEngine(max_seq=8)
    state = engine.new_state()
    engine.prefill(state, [3, 4])
    arrays = engine.dump(engine.capture(state))
    loaded = other.load(arrays, 2)
    assert (engine.layout(), loaded.pos) == (other.layout(), 2)
    assert best(other, other.restore(loaded), 7, 8) == [8, 9]
    wrong = np.zeros((2, 1), np.int32)
    for bad, pos, message in (
        (arrays, 3, "ledger must be int32 .3."),
        (arrays, 9, r"pos 9 is outside 0 … 8"),
        (arrays | {"script": wrong}, 2, r"script must be int32 \[2\]; found int32 \[2, 1\]"),
        (arrays | {"more": wrong}, 2, "found ledger, script, n_prompt, more"),
    ):
        with pytest.raises(EngineError, match=message):
            other.load(bad, pos)
    assert sum(engine.state_bytes(400).values()) == 1000 + 400 // 4 * 10


@pytest.mark.parametrize("step", ["capture", "restore", "load"])
def test_keeping_and_going_back_can_be_failed(step: str) -> None:
    armed: list[str] = []

    def on_step(begun: str, state: FakeState) -> None:
        if begun in armed:
            raise MemoryError(begun)

    engine = FakeEngine([7], on_step=on_step)
    snapshot = engine.capture(engine.new_state())
    arrays, held = engine.dump(snapshot), engine.blocks_in_use
    armed.append(step)
    calls: dict[str, Callable[[], object]] = {
        "capture": lambda: engine.capture(engine.states[0]),
        "restore": lambda: engine.restore(snapshot),
        "load": lambda: engine.load(arrays, 0),
    }
    with pytest.raises(MemoryError, match=step):
        calls[step]()
    assert engine.blocks_in_use == held and len(engine.states) == 1
    armed.clear()
    calls[step]()
    assert engine.restore(snapshot).pos == 0


def test_it_refuses_what_an_engine_refuses() -> None:
    engine = FakeEngine([7], max_seq=4)
    state = engine.new_state()
    for prompt in ([], [3] * 5):
        with pytest.raises(EngineError, match=f"{len(prompt)} tokens at 0"):
            engine.prefill(state, prompt)
    assert not any(engine.intervals)
    engine.prefill(state, [3])
    for rows in ([], [7] * (MAX_ROWS + 1), [7] * 4):
        with pytest.raises(EngineError):
            engine.forward_rows(state, rows)
    engine.forward_rows(state, [7])
    with pytest.raises(EngineError, match=r"commit\(2\)"):
        engine.commit(state, 2)


def test_words_come_back_as_they_were() -> None:
    tokens = FakeTokenizer(vocab_size=265)
    for text in ("", "Hello  there,\n world ", "😀 ไทย", "many more words than the vocabulary has room for"):
        assert tokens.decode(tokens.encode_plain(text)) == text
        assert tokens.decode(tokens.encode_bytes(text)) == text
    assert max(tokens.encode_plain("and others too")) < 265


def test_only_trusted_text_has_control_tokens() -> None:
    tokens = FakeTokenizer()
    assert tokens.encode_trusted(f"a{THINK_CLOSE}b{EOS}")[1::2] == [tokens.id_of(THINK_CLOSE), tokens.eos_id]
    for text in (f"a{THINK_CLOSE}b", THINK_CLOSE, f" {EOS}"):
        assert not tokens.control_ids & set(tokens.encode_plain(text))
        assert tokens.decode(tokens.encode_plain(text)) == text


def test_a_fake_model_gives_its_replies_in_turn() -> None:
    with fake_model(["One.", [300]], name="two") as model:
        assert model.name == "two"
        first, *later = (model.generate("hi") for _ in range(3))
        assert first.text == "One." and [result.ids for result in later] == [(300,), (300,)]
        assert "model       two" in str(model.info)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from dsv4nb.testing.fake_model import fake_model; fake_model().generate('a');"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
