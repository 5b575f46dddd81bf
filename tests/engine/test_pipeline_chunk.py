"""Prompts in chunks on GPUs that run one after the other: the bits of one GPU, by the same cut.

Once with the kernels' twins, where the CPU stands for all GPUs, and once on two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.engine import device
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.protocol import Cancelled
from dsv4nb.testing.tiny_checkpoint import CHUNKED, write_tiny_checkpoint
from dsv4nb.testing.twin_kernels import twin_kernels

MAX_SEQ, CHUNK = 320, 64
pytestmark = pytest.mark.twins


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("small"), **CHUNKED)
    return open_checkpoint(folder, require_tokenizer=False)


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
def line(small: Checkpoint, places: list[str]) -> Iterator[DeviceEngine]:
    options: dict[str, Any] = {"max_seq": MAX_SEQ, "chunk_rows": CHUNK}
    engine = DeviceEngine.from_checkpoint(small, device=places, placement="pipeline", **options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def one(small: Checkpoint, places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(small, device=places[0], max_seq=MAX_SEQ, chunk_rows=CHUNK)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, 64, MAX_SEQ)]


# 290 positions have more entries than a row may pick, and end in a chunk of 34 rows; 200 end in one row by one
@pytest.mark.parametrize("length", [40, 200, 290])
def test_a_prompt_has_the_bits_of_one_gpu(
    line: DeviceEngine, one: DeviceEngine, prompt: list[int], length: int
) -> None:
    assert (line.prefill_form, line.prefill_fault) == ("fast", "")
    ours, theirs = line.new_state(), one.new_state()
    found, wanted = line.prefill(ours, prompt[:length]), one.prefill(theirs, prompt[:length])
    assert (found.pos, found.computed) == (wanted.pos, wanted.computed) == (length, length)
    assert np.array_equal(found.logits, wanted.logits)
    assert ours.digest() == theirs.digest()
    rows = prompt[length : length + 3]  # decode rows go on from there
    assert np.array_equal(line.forward_rows(ours, rows), one.forward_rows(theirs, rows))


def test_a_stop_between_chunks_keeps_whole_chunks_everywhere(
    line: DeviceEngine, one: DeviceEngine, prompt: list[int]
) -> None:
    ours, theirs, answers = line.new_state(), one.new_state(), iter([False, False, True])
    with pytest.raises(Cancelled):
        line.prefill(ours, prompt[:290], should_stop=lambda: next(answers))
    assert ours.pos == 2 * CHUNK
    one.prefill(theirs, prompt[: 2 * CHUNK])
    assert ours.digest() == theirs.digest()
    assert np.array_equal(
        line.prefill(ours, prompt[2 * CHUNK : 290]).logits, one.prefill(theirs, prompt[2 * CHUNK : 290]).logits
    )


def test_memory_is_a_class_on_each_and_does_not_grow(line: DeviceEngine, places: list[str], prompt: list[int]) -> None:
    state = line.new_state()
    line.prefill(state, prompt[: CHUNK + 40])
    reserved = [each.classes["prefill"].reserved for each in line.cache_bytes()]
    assert len(reserved) == len(places) and all(reserved)
    line.prefill(state, prompt[CHUNK + 40 : 300])
    assert [each.classes["prefill"].reserved for each in line.cache_bytes()] == reserved


@pytest.mark.parametrize("count", [2, 3])
def test_a_drafter_sees_the_context_that_one_gpu_leaves(
    monkeypatch: pytest.MonkeyPatch, facts: list[int], count: int
) -> None:
    """Its heads are too few for the kernels of a chunk, but not for their twins."""
    monkeypatch.setattr(device, "chunk_fault", lambda config, shapes: "")
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    drafts = []
    with twin_kernels():
        for places in (["cpu"], ["cpu"] * count):
            options: dict[str, Any] = {"placement": "pipeline", "max_seq": 192, "chunk_rows": 100}
            engine = DeviceEngine.from_checkpoint(toy, device=places, **options)
            state = engine.new_state()
            row = engine.prefill(state, facts[:136]).logits
            drafts.append(engine.draft(state, int(row.argmax()), lambda row, slot, ahead: int(row.argmax())))
            drafts.append(state.digest())
    (ours, digest), (theirs, other) = drafts[:2], drafts[2:]
    assert digest == other
    assert ours.ids == theirs.ids and ours.conf_logits == theirs.conf_logits
