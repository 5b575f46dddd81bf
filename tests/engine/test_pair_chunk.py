"""Prompts in chunks on two GPUs that share a model: as on one, the same bits on both, and no copy that comes too soon.

Once with the kernels' twins, where the CPU stands for both GPUs, and once on two GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import dsv4nb
from dsv4nb.bench.asked import Asked
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.checkpoint.revision import detect_contract
from dsv4nb.engine import chunk_layer, device, pair_chunk, rank_chunk
from dsv4nb.engine.chunk_room import Outputs
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.pair_chunk import Exchange, PairChunk
from dsv4nb.engine.protocol import Cancelled
from dsv4nb.testing.dumped import dumped_values
from dsv4nb.testing.tiny_checkpoint import CHUNKED, write_tiny_checkpoint
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.synthetic import SyntheticReader

MAX_SEQ, CHUNK = 320, 64
pytestmark = pytest.mark.twins

GAP = 0.1  # of the largest logit, as between chunks and rows (see test_rank_chunk): sums have another order here too
CACHED_GAP = 0.1  # of the mean magnitude of a cached buffer, likewise
SMALL = CHUNKED | {"num_attention_heads": 64}  # whose halves are as small as the tiles are


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("small"), **SMALL)
    return open_checkpoint(folder, require_tokenizer=False)


@pytest.fixture(scope="module")
def pair(small: Checkpoint, pair_places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(small, device=pair_places, max_seq=MAX_SEQ, chunk_rows=CHUNK)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def one(small: Checkpoint, pair_places: list[str]) -> Iterator[DeviceEngine]:
    engine = DeviceEngine.from_checkpoint(small, device=pair_places[0], max_seq=MAX_SEQ, chunk_rows=CHUNK)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, 64, MAX_SEQ)]


def chunks_of(engine: DeviceEngine) -> PairChunk:
    assert isinstance(engine._chunks, PairChunk)
    return engine._chunks


def values(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return dumped_values(rows, width=128, tail=64)


def require_mirrors(state: DeviceState) -> None:
    """Both GPUs hold the same bits, in every row that a later position can see; a drafter's are on the first alone."""
    for caches in state.caches.copies:
        if caches.device.type == "cuda":
            torch.cuda.synchronize(caches.device)
    first, second = ({part.name: (part, rows) for part, rows in each.parts(state.pos)} for each in state.caches.copies)
    assert second.keys() == {name for name in first if not name.startswith("mtp.")}
    for name, (part, theirs) in second.items():
        rows = torch.arange(part.first, part.last)
        rows = rows if part.is_entries else rows % len(theirs)
        assert torch.equal(first[name][1].cpu()[rows], theirs.cpu()[rows]), name


# 290 positions have more entries than a row may pick, and end in a chunk of 34 rows; 200 end in eight decode rows
@pytest.mark.parametrize("length", [40, 200, 290])
def test_a_prompt_on_two_is_that_of_one(pair: DeviceEngine, one: DeviceEngine, prompt: list[int], length: int) -> None:
    assert (pair.prefill_form, pair.prefill_fault) == ("fast", "")
    assert [weights.shapes.heads for weights in (*pair.ranks, *one.ranks)] == [32, 32, 64]
    ours, theirs = pair.new_state(), one.new_state()
    found, wanted = pair.prefill(ours, prompt[:length]), one.prefill(theirs, prompt[:length])
    assert (found.pos, found.computed) == (wanted.pos, wanted.computed) == (length, length)
    assert found.logits.shape == wanted.logits.shape
    gap, size = np.abs(found.logits - wanted.logits).max(), np.abs(wanted.logits).max()
    print(f"gap {gap:.5f} of {size:.4f}")
    assert gap < GAP * size
    require_mirrors(ours)
    cached = one.dump(one.capture(theirs))
    for name, rows in pair.dump(pair.capture(ours)).items():
        if rows.size:
            apart = np.abs(values(rows) - values(cached[name])).mean() / np.abs(values(cached[name])).mean()
            assert apart < CACHED_GAP, name
    for token in prompt[length : length + 4]:  # decode rows go on from there
        row, other = pair.forward_rows(ours, [token])[0], one.forward_rows(theirs, [token])[0]
        assert np.abs(row - other).max() < GAP * np.abs(other).max()
        pair.commit(ours, 1)
        one.commit(theirs, 1)
    require_mirrors(ours)


def test_the_same_cut_gives_the_same_bits_and_so_does_any_cut_into_chunks(
    pair: DeviceEngine, prompt: list[int]
) -> None:
    whole = pair.new_state()
    wanted = pair.prefill(whole, prompt[:192]).logits
    digest = whole.digest()
    for cuts in ((192,), (40, 150, 192), (64, 128, 192)):
        state, first = pair.new_state(), 0
        for last in cuts:
            logits = pair.prefill(state, prompt[first:last]).logits
            require_mirrors(state)
            state, first = pair.restore(pair.capture(state)), last
        assert np.array_equal(logits, wanted), cuts
        assert state.digest() == digest, cuts


def test_a_prompt_again_and_again_is_the_same_bits(pair: DeviceEngine, small: Checkpoint, prompt: list[int]) -> None:
    """It is launched, captured, replayed, for other tokens and of another length that is padded to the same."""
    plain = DeviceEngine(
        pair.ranks, small.config, small.contract, max_seq=MAX_SEQ, chunk_rows=CHUNK, links=pair.links, graphs=False
    )
    for turn, length in enumerate((150, 150, 150, 150, 167, 180, 150)):
        tokens = prompt[turn : turn + length]
        found = []
        for engine in (pair, plain):
            state = engine.new_state()
            found.append((engine.prefill(state, tokens).logits.tobytes(), state.digest()))
            require_mirrors(state)
            engine.release(state)
        assert found[0] == found[1], turn
    plain.close()


def test_the_streams_are_the_same_bits_on_both(pair: DeviceEngine, prompt: list[int]) -> None:
    state = pair.new_state()
    pair.prefill(state, prompt[:CHUNK])
    require_mirrors(state)
    first, second = (side._room.tensor("stream", CHUNK, CHUNK, 4, 256, dtype=torch.bfloat16) for side in sides(pair))
    assert first.float().abs().sum() > 0
    assert torch.equal(first.cpu(), second.cpu())


def sides(engine: DeviceEngine) -> tuple[rank_chunk.RankChunk, ...]:
    return chunks_of(engine)._sides


def test_a_stop_between_chunks_keeps_whole_chunks_on_both(pair: DeviceEngine, prompt: list[int]) -> None:
    state, seen, answers = pair.new_state(), list[tuple[int, int]](), iter([False, False, True])
    with pytest.raises(Cancelled):
        pair.prefill(
            state,
            prompt[:200],
            should_stop=lambda: next(answers),
            on_progress=lambda done, total: seen.append((done, total)),
        )
    assert (seen, state.pos) == ([(64, 200), (128, 200)], 128)
    require_mirrors(state)
    twin = pair.new_state()
    pair.prefill(twin, prompt[:128])
    assert state.digest() == twin.digest()
    assert np.array_equal(pair.prefill(state, prompt[128:200]).logits, pair.prefill(twin, prompt[128:200]).logits)


def test_a_chunk_that_fails_on_one_leaves_both_as_they_were(
    pair: DeviceEngine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = pair.new_state(), pair.new_state()
    for each in (state, other):
        pair.prefill(each, prompt[:64])
    left = [3]

    def attend(*args: Any) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no room")
        return chunk_layer.attend(*args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no room"):
        patch.setattr(rank_chunk, "attend", attend)
        pair.prefill(state, prompt[64:128])
    assert state.pos == 64
    pair.prefill(state, prompt[64:128])
    pair.prefill(other, prompt[64:128])
    assert state.digest() == other.digest()
    require_mirrors(state)


def test_memory_is_a_class_on_both_and_does_not_grow(pair: DeviceEngine, small: Checkpoint, prompt: list[int]) -> None:
    engine = DeviceEngine(pair.ranks, small.config, small.contract, max_seq=MAX_SEQ, chunk_rows=CHUNK)
    state = engine.new_state()
    engine.prefill(state, prompt[:40])
    taken = [each.classes["prefill"] for each in engine.cache_bytes()]
    assert len(taken) == 2 and all(each.used == 0 < each.reserved for each in taken)
    engine.prefill(state, prompt[40:300])  # longer chunks, and entries that are picked
    assert [each.classes["prefill"] for each in engine.cache_bytes()] == taken


def test_halves_that_are_too_small_are_read_exactly_and_say_why() -> None:
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    with twin_kernels():
        engine = DeviceEngine.from_checkpoint(toy, device=["cpu", "cpu"], max_seq=128)
    assert engine.prefill_form == "exact"
    assert engine.prefill_fault == "heads is 16; a chunk's kernels take multiples of 32"


def test_a_drafter_sees_the_context_that_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model's heads are too few for the kernels of a chunk, but not for their twins."""
    monkeypatch.setattr(device, "chunk_fault", lambda config, shapes: "")
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    with dsv4nb.load("toy", devices="cpu") as model:
        ids = model.tokenize("Anna went from Paris to Rome on Monday. Then she went home. " * 9)[:136]
    with twin_kernels():
        exact = DeviceEngine.from_checkpoint(toy, device=["cpu", "cpu"], max_seq=192, prefill="exact")
        fast = DeviceEngine(exact.ranks, toy.config, toy.contract, max_seq=192, chunk_rows=100)
        assert fast.block_size == 5
        states = fast.new_state(), exact.new_state()
        found, wanted = (engine.prefill(state, ids).logits for engine, state in zip((fast, exact), states, strict=True))
        assert np.abs(found - wanted).max() < GAP * np.abs(wanted).max()
        require_mirrors(states[0])
        cached = exact.dump(exact.capture(states[1]))
        assert any(name.startswith("mtp.") for name in cached)
        for name, rows in fast.dump(fast.capture(states[0])).items():
            apart = np.abs(values(rows) - values(cached[name])).mean() / np.abs(values(cached[name])).mean()
            assert apart < CACHED_GAP, name


class Stream:
    """A stream that knows what is done, on every stream, before what is launched on it next."""

    numbers = iter(range(1000))

    def __init__(self, device: object = None) -> None:
        self.number, self.seen = next(self.numbers), Counter[int]()

    def launch(self) -> None:
        self.seen[self.number] += 1

    def wait_event(self, event: Event) -> None:
        assert event.seen is not None, "waited for before it was recorded: a stream would go on at once"
        self.seen |= event.seen


class Event:
    def __init__(self) -> None:
        self.seen: Counter[int] | None = None

    def record(self, stream: Stream) -> None:
        stream.launch()
        self.seen = Counter(stream.seen)


class Access(NamedTuple):
    """What one launch does with one piece of memory."""

    first: int
    last: int
    writes: bool
    stream: int
    number: int
    seen: Counter[int]

    def precedes(self, later: Access) -> bool:
        return later.seen[self.stream] >= self.number

    def clashes(self, other: Access) -> bool:
        return self.first < other.last and other.first < self.last and (self.writes or other.writes)


class Watch:
    """Notes which stream reads and writes the parts of sums, while the CPU computes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams, self.accesses, self._moved = [Stream(), Stream()], list[Access](), list[tuple[Tensor, bool]]()
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.streams[device.index])
        patch.setattr(torch.cuda, "stream", self.copying)
        own_send = pair_chunk._End.send

        def send(end: Any, part: Tensor, room: Tensor, other: Any) -> None:
            self._moved = [(part, False), (room, True)]
            own_send(end, part, room, other)

        patch.setattr(pair_chunk._End, "send", send)
        for name in ("attend", "mix_experts"):
            patch.setattr(rank_chunk, name, self.writing(getattr(rank_chunk, name)))
        own_mix, own_leave = chunk_layer.Chunk.mix, rank_chunk.RankChunk._leave

        def mix(chunk: chunk_layer.Chunk, y: Tensor | None, weights: Any) -> None:
            self.read(y, chunk.outputs)
            own_mix(chunk, y, weights)

        def leave(side: rank_chunk.RankChunk, chunk: chunk_layer.Chunk, y: Tensor, *args: Any) -> Tensor:
            self.read(y, chunk.outputs)
            return own_leave(side, chunk, y, *args)

        patch.setattr(chunk_layer.Chunk, "mix", mix)
        patch.setattr(rank_chunk.RankChunk, "_leave", leave)

    @contextmanager
    def copying(self, stream: Stream) -> Iterator[None]:
        yield
        for part, writes in self._moved:
            self.note(part, stream, writes=writes)

    def writing(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(chunk: chunk_layer.Chunk, *args: Any) -> Tensor:
            y = run(chunk, *args)
            self.note(y[chunk.outputs._rank], self.streams[chunk.outputs._rank], writes=True)
            return y

        return watched

    def read(self, y: Tensor | None, outputs: Outputs) -> None:
        for part in () if y is None else y:
            self.note(part, self.streams[outputs._rank], writes=False)

    def note(self, part: Tensor, stream: Stream, *, writes: bool) -> None:
        assert part.is_contiguous()
        stream.launch()
        first = part.data_ptr()
        seen = Counter(stream.seen)
        self.accesses.append(Access(first, first + part.nbytes, writes, stream.number, seen[stream.number], seen))

    def races(self) -> list[tuple[Access, Access]]:
        """Return pairs of launches that may run in another order than they were launched in, and must not."""
        pairs = combinations(self.accesses, 2)
        return [(one, later) for one, later in pairs if one.clashes(later) and not one.precedes(later)]


@pytest.fixture
def watched(
    small: Checkpoint, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Watch, Callable[[], None]]]:
    """A watch, and what reads a prompt in chunks of 40, 40 and 32 rows under it: the last alone has a head."""
    with twin_kernels():
        engine = DeviceEngine.from_checkpoint(small, device=["cpu", "cpu"], max_seq=MAX_SEQ, chunk_rows=40)
        watch = Watch(monkeypatch)
        chunks_of(engine)._exchange = Exchange([torch.device("cuda", 0), torch.device("cuda", 1)])

        def read() -> None:
            engine.prefill(engine.new_state(), prompt[:112])

        yield watch, read


def test_nothing_is_copied_too_soon_or_written_before_it_was_read(watched: tuple[Watch, Callable[[], None]]) -> None:
    watch, read = watched
    read()
    joins = 3 * 6
    # parts, copies, sums: those of the last output are needed in the last chunk alone
    assert len(watch.accesses) == joins * (2 + 4 + 4) - 2 * 4
    assert watch.races() == []


def one_piece(patch: pytest.MonkeyPatch, watch: Watch) -> None:
    patch.setattr(Outputs, "pass_on", lambda outputs: None)


def a_turn_without_a_join(patch: pytest.MonkeyPatch, watch: Watch) -> None:
    run = PairChunk.run

    def running(chunks: PairChunk, *args: Any, has_head: bool) -> Any:
        found = run(chunks, *args, has_head=has_head)
        for side in chunks._sides:
            side.outputs.pass_on()
        return found

    patch.setattr(PairChunk, "run", running)


def old_events(patch: pytest.MonkeyPatch, watch: Watch) -> None:
    record = Event.record
    patch.setattr(Event, "record", lambda event, stream: None if event.seen else record(event, stream))


def sums_that_do_not_wait(patch: pytest.MonkeyPatch, watch: Watch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda own, event: None if own in watch.streams else wait(own, event))


@pytest.mark.parametrize("fault", [one_piece, a_turn_without_a_join, old_events, sums_that_do_not_wait])
def test_the_watch_sees_what_would_go_wrong(
    watched: tuple[Watch, Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch, Watch], None],
) -> None:
    watch, read = watched
    fault(monkeypatch, watch)
    read()
    assert watch.races() != []


def test_events_are_recorded_before_they_are_waited_for(
    watched: tuple[Watch, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, read = watched
    own = pair_chunk._End.record
    late: list[pair_chunk._End] = []
    join = Exchange.join

    def joining(exchange: Exchange, parts: Sequence[Tensor]) -> None:
        join(exchange, parts)
        for end in late:
            own(end)

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="waited for before it was recorded"):
        patch.setattr(pair_chunk._End, "record", lambda end: late.append(end))
        patch.setattr(Exchange, "join", joining)
        read()
    read()


@pytest.mark.kernels
@pytest.mark.usefixtures("indexed_by_scalars", "unpadded")
def test_a_chunk_of_two_ranks_through_all_kernels_is_that_of_their_twins(tmp_path: Path, prompt: list[int]) -> None:
    """Nine rows are a chunk to the kernels."""
    folder = write_tiny_checkpoint(tmp_path, **SMALL | {"compress_ratios": [0], "num_hidden_layers": 1})
    checkpoint = open_checkpoint(folder, require_tokenizer=False)
    engine = DeviceEngine.from_checkpoint(checkpoint, device=["cpu", "cpu"], max_seq=128)
    results = []
    for kernels in (nullcontext(), twin_kernels()):
        state = engine.new_state()
        with torch.inference_mode(), kernels:
            logits = chunks_of(engine).run(state.caches, prompt[:9], 0, has_head=True)
        assert logits is not None and logits.shape == (1, 64)
        state.commit(9)
        require_mirrors(state)
        results.append(logits)
    gap, size = np.abs(results[0] - results[1]).max(), np.abs(results[1]).max()
    print(f"gap {gap:.5f} of {size:.4f}")
    assert gap < GAP * size


@pytest.mark.gpu2
def test_a_prompt_of_the_full_widths_on_two_is_that_of_one() -> None:
    """Layers as wide as V4-Flash's, one of each kind: whole chunks, and entries that are picked."""
    changes = {"compress_ratios": [0, 4, 128]}
    config = Asked(shape="flash-0731", layers=3, experts=16, changes=changes).config()
    contract, _ = detect_contract(config, ())
    ids = [int(token) for token in np.random.default_rng(1).integers(0, config.vocab_size, 5000)]
    reader, found = SyntheticReader(config, device="cuda:0"), list[npt.NDArray[np.float32]]()
    for pair_places in (["cuda:0"], ["cuda:0", "cuda:1"]):
        ranks = load_ranks(reader, [torch.device(place) for place in pair_places], source=reader)
        engine = DeviceEngine(ranks, config, contract, max_seq=5120)
        assert (engine.prefill_form, engine.prefill_fault) == ("fast", "")
        state, again = engine.new_state(), engine.new_state()
        found.append(engine.prefill(state, ids).logits)
        assert np.array_equal(engine.prefill(again, ids).logits, found[-1])
        assert again.digest() == state.digest()
        if len(pair_places) > 1:
            require_mirrors(state)
        engine.close()
    gap, size = np.abs(found[0] - found[1]).max(), np.abs(found[0]).max()
    print(f"gap {gap:.5f} of {size:.4f}")
    assert gap < GAP * size
