"""Prompts that are read in chunks: close to those read as rows, the same bits by the same cut, and nothing left over.

Once with the kernels' twins, which any machine runs, and once on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.engine import chunk_layer, device
from dsv4nb.engine.cache import ENTRY_BLOCK
from dsv4nb.engine.chunk_layer import scored_keys, unpacked_entries
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.prefill import FEWEST_ROWS, fast_plan, is_fast
from dsv4nb.engine.protocol import Cancelled
from dsv4nb.errors import EngineError
from dsv4nb.testing.dumped import drawn_like, dumped_values
from dsv4nb.testing.tiny_checkpoint import CHUNKED, write_tiny_checkpoint
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb.weights.kernel_shapes import chunk_fault, kernel_shapes
from dsv4nb_kernels import route

MAX_SEQ, CHUNK, LAYERS = 320, 64, 3
pytestmark = pytest.mark.twins

# logits of either way lie this far apart at most, of the largest: one flipped rounding in a network of random numbers
# moves everything behind it. Measured 0.042 with the twins; a wrong slot, angle or place moves them by their own size
GAP = 0.1
MARGIN = 0.1  # two best logits further apart than this share of the largest come in the same order
# of a row that took another expert, because two of its router's numbers are as good as equal: measured 0.2, in one of
# 150 rows; all others were within 0.07
OTHER_GAP = 0.3
CACHED_GAP = 0.1  # of the mean magnitude of a cached buffer, on average over its values: measured 0.03


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("small"), **CHUNKED)
    return open_checkpoint(folder, require_tokenizer=False)


@pytest.fixture(scope="module", params=["twins", pytest.param("gpu", marks=pytest.mark.gpu)])
def exact(request: pytest.FixtureRequest, small: Checkpoint) -> Iterator[DeviceEngine]:
    is_gpu = request.param == "gpu"
    with nullcontext() if is_gpu else twin_kernels():
        place = "cuda" if is_gpu else "cpu"
        engine = DeviceEngine.from_checkpoint(small, device=place, max_seq=MAX_SEQ, prefill="exact")
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def fast(exact: DeviceEngine, small: Checkpoint) -> DeviceEngine:
    return DeviceEngine(exact.ranks, small.config, small.contract, max_seq=MAX_SEQ, chunk_rows=CHUNK)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, 64, MAX_SEQ)]


def values(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return dumped_values(rows, width=128, tail=64)


def is_close(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    return bool(np.abs(found - wanted).max() <= GAP * np.abs(wanted).max())


@contextmanager
def noted_experts() -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the experts [T, K] of every layer that is launched inside."""
    chosen: list[torch.Tensor] = []
    launch = route.route

    def noting(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = launch(*args, **options)
        chosen.append(found[0].clone())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "route", noting)
        yield chosen


def experts_of(chosen: list[torch.Tensor], row: int = -1) -> list[list[int]]:
    """Return those of a row of the last piece on each layer."""
    return [sorted(experts[row].tolist()) for experts in chosen[-LAYERS:]]


def test_a_plan_of_chunks_covers_a_prompt_and_ends_in_rows() -> None:
    assert fast_plan(0) == []
    assert fast_plan(5000, 2048) == [(0, 2048), (2048, 4096), (4096, 5000)]
    assert fast_plan(64, 64) == [(0, 64)]
    assert [is_fast(last - first) for first, last in fast_plan(64 + FEWEST_ROWS - 1, 64)] == [True, False]
    assert [is_fast(last - first) for first, last in fast_plan(64 + FEWEST_ROWS, 64)] == [True, True]


@pytest.mark.parametrize("ratio", [4, 128])
def test_chunks_of_one_shape_unpack_the_same_entries_and_all_that_they_see(small: Checkpoint, ratio: int) -> None:
    counts: dict[int, set[int]] = {}
    for end in (*range(1, 4000), *range(16_000, 200_000, 61), 16_383, 16_384, 16_387, 32_767, 1 << 20):
        count = unpacked_entries(small.config, end, ratio)
        assert count >= end // ratio and count % ENTRY_BLOCK == 0
        counts.setdefault(scored_keys(small.config, end), set()).add(count)
    assert len(counts) > 10 and all(len(each) == 1 for each in counts.values())


# 290 positions have more entries than a row may pick
@pytest.mark.parametrize("length", [40, 290])
def test_a_prompt_in_chunks_is_that_of_rows(
    exact: DeviceEngine, fast: DeviceEngine, small: Checkpoint, prompt: list[int], length: int
) -> None:
    assert (exact.prefill_form, fast.prefill_form, fast.prefill_fault) == ("exact", "fast", "")
    options = {"max_seq": MAX_SEQ, "chunk_rows": CHUNK, "graphs": False}  # so that experts can be noted
    fast, exact = (
        DeviceEngine(exact.ranks, small.config, small.contract, prefill=form, **options) for form in ("fast", "exact")
    )
    ours, theirs = fast.new_state(), exact.new_state()
    with noted_experts() as chosen:
        found = fast.prefill(ours, prompt[:length])
    with noted_experts() as wanted_chosen:
        wanted = exact.prefill(theirs, prompt[:length])
    assert (found.pos, found.computed) == (wanted.pos, wanted.computed) == (length, length)
    gap, size = np.abs(found.logits - wanted.logits).max(), np.abs(wanted.logits).max()
    print(f"gap {gap:.5f} of {size:.4f}")
    first, last = fast_plan(length, CHUNK)[-1]
    agree = [experts_of(chosen, last - first - 1) == experts_of(wanted_chosen)]  # rows that fill a chunk follow it
    assert 0 < gap < (GAP if agree[-1] else OTHER_GAP) * size  # another order of sums: no bits are the same by chance
    cached = exact.dump(exact.capture(theirs))
    for name, rows in fast.dump(fast.capture(ours)).items():
        assert rows.shape == cached[name].shape
        if rows.size:
            ours_as, theirs_as = values(rows), values(cached[name])
            apart = np.abs(ours_as - theirs_as).mean() / np.abs(theirs_as).mean()
            print(f"{name}: {apart:.5f}")
            assert apart < CACHED_GAP, name
    # the caches serve decode rows as those that rows left do
    clear, row, other = 0, found.logits, wanted.logits
    for _ in range(6):
        best = np.sort(other)[-2:]
        if best[1] - best[0] > (MARGIN if agree[-1] else 2 * OTHER_GAP) * np.abs(other).max():
            clear += 1
            assert row.argmax() == other.argmax()
        token = [int(other.argmax())]
        with noted_experts() as chosen:
            row = fast.forward_rows(ours, token)[0]
        with noted_experts() as wanted_chosen:
            other = exact.forward_rows(theirs, token)[0]
        agree.append(experts_of(chosen) == experts_of(wanted_chosen))
        gap = np.abs(row - other).max() / np.abs(other).max()
        print(f"gap {gap:.3f}{'' if agree[-1] else ', another expert'}")
        assert gap <= (GAP if agree[-1] else OTHER_GAP)
        fast.commit(ours, 1)
        exact.commit(theirs, 1)
    print(f"{clear} of 6 rows are clear")
    assert agree.count(False) <= 1
    for engine, state in ((fast, ours), (exact, theirs)):
        engine.release(state)


def test_the_same_cut_gives_the_same_bits_and_so_does_any_cut_into_chunks(
    fast: DeviceEngine, prompt: list[int]
) -> None:
    """A row does not depend on the chunk that it is in: 192 rows in chunks of 64, of 40 and more, behind a snapshot."""
    whole = fast.new_state()
    wanted = fast.prefill(whole, prompt[:192]).logits
    digest = whole.digest()
    for cuts in ((192,), (40, 150, 192), (64, 128, 192)):
        state, first = fast.new_state(), 0
        for last in cuts:
            logits = fast.prefill(state, prompt[first:last]).logits
            state, first = fast.restore(fast.capture(state)), last
        assert np.array_equal(logits, wanted), cuts
        assert state.digest() == digest, cuts


def test_a_short_rest_is_decode_rows_bit_for_bit(exact: DeviceEngine, fast: DeviceEngine, prompt: list[int]) -> None:
    state, twin = fast.new_state(), exact.new_state()
    found, wanted = fast.prefill(state, prompt[:31]), exact.prefill(twin, prompt[:31])
    assert np.array_equal(found.logits, wanted.logits)
    assert state.digest() == twin.digest()
    fast.prefill(state, prompt[31:100])
    copied = exact.restore(exact.load(fast.dump(fast.capture(state)), 100))
    assert np.array_equal(fast.prefill(state, prompt[100:131]).logits, exact.prefill(copied, prompt[100:131]).logits)
    assert state.digest() == copied.digest()


def test_a_stop_between_chunks_keeps_whole_chunks(fast: DeviceEngine, prompt: list[int]) -> None:
    state, seen, answers = fast.new_state(), list[tuple[int, int]](), iter([False, False, True])
    with pytest.raises(Cancelled):
        fast.prefill(
            state,
            prompt[:200],
            should_stop=lambda: next(answers),
            on_progress=lambda done, total: seen.append((done, total)),
        )
    assert (seen, state.pos) == ([(64, 200), (128, 200)], 128)
    twin = fast.new_state()
    fast.prefill(twin, prompt[:128])
    assert state.digest() == twin.digest()
    assert np.array_equal(fast.prefill(state, prompt[128:200]).logits, fast.prefill(twin, prompt[128:200]).logits)


def test_rows_that_nobody_wrote_are_never_read(fast: DeviceEngine, prompt: list[int]) -> None:
    results = []
    for value in (0.0, float("nan")):
        state = fast.new_state()
        with torch.inference_mode():
            for layer in state.caches.layers:
                for buffer in layer.buffers():
                    buffer.view(torch.uint8).fill_(255 if value != value else 0)  # NaN in every format
            assert fast._chunks is not None
            for held in fast._chunks._room._held.values():
                held.fill_(255 if value != value else 0)  # NaN in every format of floats
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        results.append(fast.prefill(state, prompt[:100]).logits)
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])


def test_scores_in_bands_choose_the_same_entries(
    exact: DeviceEngine, fast: DeviceEngine, small: Checkpoint, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4nb.engine import rank_chunk

    start = fast.new_state()
    fast.prefill(start, prompt[:256])
    snapshot = fast.capture(start)
    make = rank_chunk.RankChunk.__init__
    monkeypatch.setattr(make, "__kwdefaults__", {**(make.__kwdefaults__ or {}), "score_bytes": 1})
    banded = DeviceEngine(exact.ranks, small.config, small.contract, max_seq=MAX_SEQ, chunk_rows=CHUNK)
    bands, own = [], chunk_layer.index_scores.index_scores

    def count(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        bands.append(len(query))
        return own(query, *args, **options)

    monkeypatch.setattr(chunk_layer.index_scores, "index_scores", count)
    states = [fast.restore(snapshot), banded.restore(banded.load(fast.dump(snapshot), 256))]
    found = [
        engine.prefill(state, prompt[256:312]).logits for engine, state in zip((fast, banded), states, strict=True)
    ]
    assert bands == [64, 16, 16, 16, 16]  # 56 tokens are a chunk of 64 rows
    assert np.array_equal(*found)
    assert states[0].digest() == states[1].digest()


def test_memory_is_a_class_of_its_own_and_does_not_grow(
    exact: DeviceEngine, small: Checkpoint, prompt: list[int]
) -> None:
    engine = DeviceEngine(exact.ranks, small.config, small.contract, max_seq=MAX_SEQ, chunk_rows=CHUNK)
    state = engine.new_state()
    assert "prefill" not in exact.cache_bytes()[0].classes
    engine.prefill(state, prompt[:40])
    (first,) = engine.cache_bytes()
    taken = first.classes["prefill"]
    assert taken.used == 0 < taken.reserved
    assert first.reserved == sum(part.reserved for part in first.classes.values())
    assert "prefill" not in engine.state_bytes(40)
    engine.prefill(state, prompt[40:300])  # longer chunks, and entries that are picked
    assert engine.cache_bytes()[0].classes["prefill"] == taken


def test_the_prompts_of_an_exact_engine_are_never_chunks(
    exact: DeviceEngine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a chunk")

    monkeypatch.setattr("dsv4nb.engine.rank_chunk.RankChunk.run", refuse)
    whole, cut = exact.new_state(), exact.new_state()
    wanted = exact.prefill(whole, prompt[:70]).logits
    for first in range(0, 70, 7):
        logits = exact.forward_rows(cut, prompt[first : first + 7])
        exact.commit(cut, 7)
    assert np.array_equal(logits[-1], wanted)
    assert whole.digest() == cut.digest()


def test_what_cannot_be_is_refused_by_name(exact: DeviceEngine, small: Checkpoint) -> None:
    options: list[tuple[dict[str, Any], str]] = [
        ({"prefill": "quick"}, "prefill is 'quick'; it must be one of fast, exact"),
        ({"chunk_rows": 31}, "a chunk of 31 rows; it must have from 32 to 4096"),
        ({"chunk_rows": 4097}, "a chunk of 4097 rows"),
    ]
    for option, told in options:
        with pytest.raises(EngineError, match=told):
            DeviceEngine(exact.ranks, small.config, small.contract, max_seq=MAX_SEQ, **option)


def test_a_model_of_other_shapes_is_read_exactly_and_says_why(small: Checkpoint) -> None:
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    engine = DeviceEngine.from_checkpoint(toy, device="cpu", max_seq=128)
    assert engine.prefill_form == "exact"
    assert engine.prefill_fault == "heads is 16; a chunk's kernels take multiples of 32"
    config, shapes = small.config, kernel_shapes(small.config)
    assert chunk_fault(config, shapes) == ""
    for changed, told in (
        (replace(config, o_lora_rank=64), "o_lora_rank is 64"),
        (replace(config, sliding_window=96), "sliding_window is 96"),
        (replace(config, index_topk=96), "index_topk is 96"),
        (replace(config, n_routed_experts=2048), "n_routed_experts is 2048"),
    ):
        assert chunk_fault(changed, shapes).startswith(told)
    assert chunk_fault(config, replace(shapes, heads=512)).startswith("heads times head_dim is 65536")


def test_a_trained_model_answers_as_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heads are too few for the kernels of a chunk, but not for their twins; a drafter sees the same context."""
    monkeypatch.setattr(device, "chunk_fault", lambda config, shapes: "")
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    with dsv4nb.load("toy", devices="cpu") as model:
        ids = model.tokenize("Anna went from Paris to Rome on Monday. Then she went home. " * 9)[:136]
    with twin_kernels():
        exact = DeviceEngine.from_checkpoint(toy, device="cpu", max_seq=192, prefill="exact")
        fast = DeviceEngine(exact.ranks, toy.config, toy.contract, max_seq=192, chunk_rows=100)
        states = fast.new_state(), exact.new_state()
        found, wanted = (engine.prefill(state, ids).logits for engine, state in zip((fast, exact), states, strict=True))
        assert is_close(found, wanted)
        for _ in range(8):
            best = np.sort(wanted)[-2:]
            token = int(wanted.argmax())
            assert best[1] - best[0] < 1.0 or found.argmax() == token
            found, wanted = fast.forward_rows(states[0], [token])[0], exact.forward_rows(states[1], [token])[0]
            assert is_close(found, wanted)
            fast.commit(states[0], 1)
            exact.commit(states[1], 1)
        cached = exact.dump(exact.capture(states[1]))
        for name, rows in fast.dump(fast.capture(states[0])).items():
            apart = np.abs(values(rows) - values(cached[name])).mean() / np.abs(values(cached[name])).mean()
            assert apart < CACHED_GAP, name


def arrays_at(engine: DeviceEngine, pos: int) -> dict[str, npt.NDArray[Any]]:
    """Return what a sequence of `pos` positions might have left: normal values."""
    rng = np.random.default_rng(pos)
    state = engine.new_state()
    state.pos = pos
    arrays = engine.dump(engine.capture(state))
    engine.release(state)
    return {name: drawn_like(rows, rng, width=128, tail=64) for name, rows in arrays.items()}


@pytest.mark.kernels
@pytest.mark.usefixtures("indexed_by_scalars", "unpadded")
def test_a_chunk_through_all_kernels_is_that_of_their_twins(tmp_path: Path, prompt: list[int]) -> None:
    """Nine rows are a chunk to the kernels; these end windows, and pick among 66 entries."""
    folder = write_tiny_checkpoint(tmp_path, **CHUNKED | {"compress_ratios": [4], "num_hidden_layers": 1})
    checkpoint = open_checkpoint(folder, require_tokenizer=False)
    engine = DeviceEngine.from_checkpoint(checkpoint, device="cpu", max_seq=MAX_SEQ)
    pos, tokens, results, caches = 255, prompt[:9], [], []
    snapshot, fast = engine.load(arrays_at(engine, pos), pos), engine._chunks
    assert fast is not None
    for kernels in (nullcontext(), twin_kernels()):
        state = engine.restore(snapshot)
        with torch.inference_mode(), kernels:
            logits = fast.run(state.caches, tokens, pos, has_head=True)
        assert logits is not None
        state.commit(len(tokens))
        results.append(logits)
        caches.append(engine.dump(engine.capture(state)))
    gap = np.abs(results[0] - results[1]).max()
    print(f"gap {gap:.5f} of {np.abs(results[1]).max():.4f}")
    assert is_close(results[0], results[1])
    for name, rows in caches[0].items():
        ours, theirs = values(rows), values(caches[1][name])
        assert np.abs(ours - theirs).mean() <= CACHED_GAP * np.abs(theirs).mean(), name


def test_a_prompt_again_and_again_is_the_same_bits(
    exact: DeviceEngine, fast: DeviceEngine, small: Checkpoint, prompt: list[int]
) -> None:
    """It is launched, captured, replayed, for other tokens and of another length that is padded to the same."""
    plain = DeviceEngine(
        exact.ranks, small.config, small.contract, max_seq=MAX_SEQ, chunk_rows=CHUNK, graphs=False
    )  # fmt: skip
    for turn, length in enumerate((150, 150, 150, 150, 167, 180, 150)):
        tokens = prompt[turn : turn + length]
        found = []
        for engine in (fast, plain):
            state = engine.new_state()
            found.append((engine.prefill(state, tokens).logits.tobytes(), state.digest()))
            engine.release(state)
        assert found[0] == found[1], turn
    plain.close()


@pytest.mark.parametrize("exact", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
def test_a_chunk_can_be_captured(fast: DeviceEngine, prompt: list[int]) -> None:
    """Nothing in it waits, allocates or looks at a value."""
    states = [fast.new_state() for _ in range(2)]
    for state in states:
        fast.prefill(state, prompt[:256])
    chunks = fast._chunks
    assert chunks is not None
    with fast._running():
        logits = chunks.run(states[0].caches, prompt[256:310], 256, has_head=True)
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for graph in graphs:  # with the first one torch takes 1 KiB for its own random numbers, as long as one lives
            before = chunks.nbytes, torch.cuda.memory_allocated()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                for _ in chunks.launches(states[1].caches, 54, 256, has_head=True):
                    pass
        graph.replay()
        torch.cuda.synchronize()
        assert (chunks.nbytes, torch.cuda.memory_allocated()) == before
        again = chunks.run(states[1].caches, prompt[256:310], 256, has_head=True)
    assert logits is not None and again is not None
    assert np.array_equal(logits, again)
    for state in states:
        state.commit(54)
    assert states[0].digest() == states[1].digest()
