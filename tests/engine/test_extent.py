"""Forwards that look no further into the caches than they must: the extents, and that no bit tells which one it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine import extent, rank_layer
from dsv4nb.engine.cache import whole_blocks
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.extent import extent_of, extents
from dsv4nb.engine.step import Room, StepInputs, Turns
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb_kernels._rounded_rows import RoundedRows
from dsv4nb_kernels.sparse_attention import Keys

LONG = {"twins": 16_384, "gpu": 1 << 20}  # positions of the longest extent: many blocks and splits that no row sees

MakeEngine = Callable[[int], DeviceEngine]


def test_extents_are_powers_of_two_up_to_the_longest_sequence() -> None:
    ends = [0, 1, 2048, 2049, 4097, 8192, 8193, 100_000, 131_073, 150_000]
    assert [extent_of(end, 150_000) for end in ends] == [
        *[2048] * 3, 4096, 8192, 8192, 16_384, 131_072, 150_000, 150_000,
    ]  # fmt: skip
    assert extent_of(10, 384) == 384
    assert extent_of(1_000_000, 1 << 20) == 1 << 20
    assert list(extents(384)) == [384]
    assert list(extents(8192)) == [2048, 4096, 8192]
    assert list(extents(20_000)) == [2048, 4096, 8192, 16_384, 20_000]


def test_inputs_of_an_extent_lie_in_the_memory_of_the_longest() -> None:
    config = replace(from_hf(tiny_hf_config()), sliding_window=64)
    longest = StepInputs(config, 3, 16_384, Turns.of(config, 16_384, torch.device("cpu")))
    seen = []
    for positions in (512, 8192, 16_384):
        inputs = longest.at(positions)
        inputs.given[0] = 500
        inputs.refresh()
        windows = inputs.windows[128]
        assert windows.places is not None
        assert [row[row >= 0].tolist() for row in windows.places] == [[0, 1, 2]] * 3
        assert (inputs.windows[4].entries, windows.entries) == (positions // 4, whole_blocks(positions // 128))
        assert windows.places.is_contiguous()
        assert windows.places.data_ptr() == longest.windows[128].places.data_ptr()  # type: ignore[union-attr]
        seen.append(windows.places.shape)
    assert seen == [(3, 32), (3, 64), (3, 128)]
    assert inputs.slots is longest.slots and inputs.given is longest.given


def test_room_of_widths_and_extents_is_one_piece() -> None:
    room = Room(torch.device("cpu"))
    first, second = room.part("x", 64, 2, 8), room.part("x", 64, 4, 16)
    assert first.data_ptr() == second.data_ptr()
    assert (first.shape, second.shape) == ((2, 8), (4, 16))
    assert room.part("x", 128, 2, 8).data_ptr() != first.data_ptr()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("twins", marks=pytest.mark.twins),
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("pair", marks=pytest.mark.twins),
        pytest.param("two gpus", marks=pytest.mark.gpu2),
    ],
)
def make(request: pytest.FixtureRequest, toy: Checkpoint) -> Iterator[MakeEngine]:
    """Make an engine with room for the longest extent whose smallest one is given; all have the same weights."""
    is_gpu = request.param in ("gpu", "two gpus")
    places = ["cuda:0", "cuda:1"] if is_gpu else ["cpu", "cpu"]
    count = 1 if request.param in ("gpu", "twins") else 2
    made: list[DeviceEngine] = []
    with pytest.MonkeyPatch.context() as patch, nullcontext() if is_gpu else twin_kernels():
        max_seq = LONG["gpu" if is_gpu else "twins"]
        ranks = DeviceEngine.from_checkpoint(toy, device=places[:count], drafter=False, max_seq=256).ranks

        def engine(fewest: int) -> DeviceEngine:
            patch.setattr(extent, "FEWEST", fewest)
            made.append(DeviceEngine(ranks, toy.config, toy.contract, max_seq=max_seq, prefill="exact"))
            return made[-1]

        yield engine
        for one in made:
            one.close()


def walk(engine: DeviceEngine, prompt: list[int]) -> tuple[list[npt.NDArray[np.float32]], str]:
    """Run a prompt and rows of every width behind it, across the ends of small extents."""
    state, rows = engine.new_state(), []
    rows.append(engine.prefill(state, prompt[:230]).logits)
    pos = 230
    for width in (1, 2, 3, 4, 5, 6, 7, 8):
        rows += list(engine.forward_rows(state, prompt[pos : pos + width]))
        engine.commit(state, width)
        pos += width
    digest = state.digest()
    engine.release(state)
    return rows, digest


def test_no_bit_tells_the_extent(make: MakeEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()
    launch = rank_layer.run_experts

    def noting(step: rank_layer.Step, *rest: object) -> torch.Tensor:
        seen.add(step.extent)
        return launch(step, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("dsv4nb.engine.rank_forward.run_experts", noting)
    small = make(64)
    found = walk(small, facts)
    assert seen == {64, 128, 256, 512}
    seen.clear()
    whole = make(small.max_seq)
    wanted = walk(whole, facts)
    assert seen == {small.max_seq}
    assert found[1] == wanted[1]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found[0], wanted[0], strict=True))


def test_where_every_entry_is_chosen_none_is_scored(
    make: MakeEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(64)
    scored: list[int] = []
    score = rank_layer.index_scores.index_scores

    def scoring(query: Tensor, keys: Tensor, *rest: Any, **more: Any) -> Tensor:
        scored.append(len(keys))
        return score(query, keys, *rest, **more)

    monkeypatch.setattr(rank_layer.index_scores, "index_scores", scoring)
    state = engine.new_state()
    engine.prefill(state, facts[:120])
    assert engine.config.index_topk == 128 // 4 and scored == []
    engine.prefill(state, facts[120:136])
    assert set(scored) == {whole_blocks(256 // 4)}
    engine.release(state)


def test_kernels_of_an_extent_can_be_compiled_ahead(
    make: MakeEngine, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The splits and the entries that kernels are compiled for are those of a later forward, and no trace is left."""
    engine = make(64)
    launched: list[tuple[str, int]] = []
    attend, choose = rank_layer.sparse_attention.sparse_attention, rank_layer.top_entries.top_entries

    def attending(query: Tensor, window: Keys, entries: Keys | None, *rest: Any, **more: Any) -> RoundedRows:
        launched.append(("places", 0 if entries is None else entries.places.shape[1]))
        return attend(query, window, entries, *rest, **more)

    def choosing(scores: Tensor, *rest: Any, **more: Any) -> Tensor:
        launched.append(("scores", scores.shape[1]))
        return choose(scores, *rest, **more)

    monkeypatch.setattr(rank_layer.sparse_attention, "sparse_attention", attending)
    monkeypatch.setattr(rank_layer.top_entries, "top_entries", choosing)
    state = engine.new_state()
    engine.prefill(state, facts[:60])
    before, caches = state.digest(), state.caches
    for positions in (8192, engine.max_seq):
        launched.clear()
        engine.compile(state, positions)
        compiled = set(launched)
        assert compiled == {("places", positions // 128), ("scores", positions // 4)}
        assert (state.digest(), state.caches is caches) == (before, True)
        launched.clear()
        far = engine.new_state()
        far.pos = positions - 1
        engine.forward_rows(far, [1])
        assert {("places", 0), ("places", 32), *compiled} == set(launched)  # of the window alone, and of picked entries
        engine.release(far)
