"""Parts of tensors that are read ahead: what a load gets is the same whatever the ring, and an end leaves nothing."""

from __future__ import annotations

import gc
import queue
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.errors import DamagedCheckpoint
from dsv4nb.weights import rank_parts, read_ahead
from dsv4nb.weights.kernel_layout import EXPERTS_AT_ONCE
from dsv4nb.weights.load_order import load_order
from dsv4nb.weights.pieces import Batch, batch_of
from dsv4nb.weights.placement import Part, SharedKind, place
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_parts import FileParts, Names
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb.weights.read_ahead import Slot
from dsv4nb.weights.reader import Reader
from dsv4nb.weights.store import tensors_of
from dsv4nb.weights.synthetic import write_synthetic

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Checkpoint:
    return open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")


@pytest.fixture(scope="module")
def whole(toy: Checkpoint) -> RankWeights:
    return load_ranks(toy, [CPU])[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of 440 MB: pieces of many sizes, and more of them than slots."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 1024, "n_routed_experts": 40}
    layers = {"num_hidden_layers": 3, "index_topk": 32, "index_n_heads": 4}
    folder = tmp_path_factory.mktemp("large")
    write_synthetic(folder, hf_config("tiny", {**sizes, **layers}))
    return open_checkpoint(folder, require_tokenizer=False)


def readers() -> int:
    return sum(thread.name.startswith("dsv4nb-read") for thread in threading.enumerate())


def same(one: object, other: object) -> bool:
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    return len(pairs) > 40 and all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def order_of(checkpoint: Checkpoint, ranks: int) -> list[tuple[Names, tuple[Part | None, ...]]]:
    placement = place(checkpoint.config, checkpoint.entries, ranks=ranks, kind="single" if ranks == 1 else "tensor")
    order = load_order(checkpoint.entries, checkpoint.config)
    return [(names, placement.parts(names[0])) for names in order]


def parts_of(checkpoint: Checkpoint, devices: list[torch.device]) -> FileParts:
    ranks = len(devices)
    placement = place(checkpoint.config, checkpoint.entries, ranks=ranks, kind="single" if ranks == 1 else "tensor")
    order = load_order(checkpoint.entries, checkpoint.config)
    return FileParts(checkpoint.entries, [batch_of(names, checkpoint.entries, placement) for names in order], devices)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "tensor"), (2, "tensor"), (2, "pipeline")])
@pytest.mark.parametrize(("slot_bytes", "slots", "threads"), [(4096, 2, 3), (1 << 20, 1, 1)])
def test_the_weights_do_not_depend_on_the_ring(
    toy: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    kind: SharedKind,
    slot_bytes: int,
    slots: int,
    threads: int,
) -> None:
    wanted = load_ranks(toy, [CPU] * ranks, kind=kind)
    monkeypatch.setattr(rank_parts, "SLOT_BYTES", slot_bytes)
    monkeypatch.setattr(read_ahead, "SLOTS", slots)
    monkeypatch.setattr(read_ahead, "THREADS", threads)
    found = load_ranks(toy, [CPU] * ranks, kind=kind)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_tensor_out_of_turn_ends_the_load(toy: Checkpoint) -> None:
    with pytest.raises(AssertionError, match=r"head\.weight"), parts_of(toy, [CPU]) as parts:
        parts.take(("head.weight",))


def test_j19_an_interrupt_frees_the_ring_and_a_second_load_works(
    toy: Checkpoint, whole: RankWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: list[weakref.ref[Slot]] = []

    class Noted(Slot):
        def __init__(self, nbytes: int, gpu: torch.device | None) -> None:
            super().__init__(nbytes, gpu)
            slots.append(weakref.ref(self))

    def stop(step: LoadStep) -> None:
        if 2 * step.done_bytes > step.total_bytes:
            raise KeyboardInterrupt

    monkeypatch.setattr(read_ahead, "Slot", Noted)
    monkeypatch.setattr(read_ahead, "SLOTS", 4)
    with pytest.raises(KeyboardInterrupt) as caught:
        load_ranks(toy, [CPU], on_progress=stop)
    gc.collect()
    assert caught.value.__traceback__ is not None and readers() == 0
    assert 0 < len(slots) <= 4 and [slot() for slot in slots] == [None] * len(slots)
    assert same(load_ranks(toy, [CPU])[0], whole) and readers() == 0


@pytest.mark.parametrize("fails", ["device", "disk", "ring"])
def test_j19_a_load_that_fails_anywhere_leaves_no_thread_and_the_next_one_works(
    toy: Checkpoint, whole: RankWeights, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    left = {"device": 150, "disk": 300, "ring": 3}[fails]

    def failing(error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise error
            return real(*args, **options)

        return run

    error, told, where, name = {
        "device": (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", FileParts, "_room"),
        "disk": (OSError(5, "Input/output error"), "cannot be read: Input/output error", read_ahead, "_read_at"),
        "ring": (MemoryError("no memory for a slot"), "for a slot", read_ahead, "Slot"),
    }[fails]
    with monkeypatch.context() as here:
        here.setattr(where, name, failing(error, getattr(where, name)))
        with pytest.raises((torch.OutOfMemoryError, DamagedCheckpoint, MemoryError), match=told):
            load_ranks(toy, [CPU])
        assert left < 0 and readers() == 0
    assert same(load_ranks(toy, [CPU])[0], whole)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no such timer")
def test_j19_an_interrupt_at_any_moment_leaves_no_thread(toy: Checkpoint) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before, stopped = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for seed in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0.0005, 0.04))
                load_ranks(toy, [CPU])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                stopped += 1
                deadline = time.monotonic() + 1  # for a thread that was not quite started
                while readers():
                    assert time.monotonic() < deadline, seed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 3


def test_of_two_ranks_each_gets_its_part_of_what_is_read_once(toy: Checkpoint) -> None:
    read = 0
    with torch.inference_mode(), parts_of(toy, [CPU, CPU]) as both, parts_of(toy, [CPU]) as alone:
        for names, placed in order_of(toy, 2):
            (stored,) = alone.take(names)
            assert stored is not None
            for found, part in zip(both.take(names), placed, strict=True):
                if found is None or part is None:
                    assert found is part is None
                    continue
                assert found.is_contiguous() and found.shape == (len(names), *part.shape)
                wanted = stored[(slice(None), *part.index)]
                assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))
            read += sum(toy.entries[name].nbytes for name in names)
            assert both.bytes_read == alone.bytes_read == read
    assert read == sum(entry.nbytes for entry in toy.entries.values())


@pytest.mark.gpu
def test_j19_files_reach_a_gpu_through_pinned_memory_and_little_of_it(
    large: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, pinned = torch.device("cuda", 0), set[bool]()

    class Noted(Slot):
        def __init__(self, nbytes: int, gpu: torch.device | None) -> None:
            super().__init__(nbytes, gpu)
            if gpu is not None:
                pinned.add(self.bytes.is_pinned())

    monkeypatch.setattr(read_ahead, "Slot", Noted)
    monkeypatch.setattr(rank_parts, "AHEAD_BYTES", 32 << 20)
    wanted = load_ranks(large, [CPU])[0]
    torch.cuda.init()  # nobody may have, and then there are no statistics to reset
    before = torch.cuda.memory_allocated(device)

    def stop(step: LoadStep) -> None:
        if 2 * step.done_bytes > step.total_bytes:
            raise KeyboardInterrupt

    for on_progress in (stop, None, stop):
        torch.cuda.reset_peak_memory_stats(device)
        if on_progress is None:
            (found,) = load_ranks(large, [device])
            assert same(found, wanted)
            peak = torch.cuda.max_memory_allocated(device) - before
            some = EXPERTS_AT_ONCE * found.layers[0].experts.up.routed[0].nbytes
            # a group as it is stored, w1 beside w3, and packed
            assert peak - found.resident_bytes <= rank_parts.AHEAD_BYTES + 4 * some
            del found
        else:
            with pytest.raises(KeyboardInterrupt):
                load_ranks(large, [device], on_progress=on_progress)
        gc.collect()
        assert torch.cuda.memory_allocated(device) == before and readers() == 0
    assert pinned == {True}


@pytest.mark.gpu2
def test_files_reach_two_gpus_as_they_reach_the_cpu(large: Checkpoint) -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    for kind in ("tensor", "pipeline"):
        wanted = load_ranks(large, [CPU, CPU], kind=kind)
        found = load_ranks(large, devices, kind=kind)
        for one, other, device in zip(found, wanted, devices, strict=True):
            assert same(one, other) and {tensor.device for tensor in tensors_of(one)} == {device}


class Late:
    """A stream of a GPU that is not there: a thread does what is put on it, in order, after a while."""

    def __init__(self, device: torch.device) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        delays = random.Random(0)
        while (job := self.jobs.get()) is not None:
            time.sleep(delays.choice((0, 0, 0.0005)))
            job()

    def wait_stream(self, other: object) -> None:
        """What a CPU did is done."""

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        event = event or LateEvent()
        self.jobs.put(event.done.set)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class LateEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(5)


class Waiting:
    """The stream that packs, which is the thread itself."""

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Late]]:
    """Let the CPU stand for GPUs whose copies are late, and note their streams."""
    streams: list[Late] = []
    current: list[Late] = []
    copy = torch.Tensor.copy_

    def stream_of(device: torch.device) -> Late:
        streams.append(Late(device))
        return streams[-1]

    @contextmanager
    def on(stream: Late) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def copy_later(to: Tensor, read: Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        current[-1].jobs.put(lambda: copy(to, read))

    room = FileParts._room

    def on_cpu(self: FileParts, batch: Batch, rank: int) -> Tensor | None:
        with monkeypatch.context() as here:
            here.setattr(self, "_devices", [CPU] * len(self._devices))
            return room(self, batch, rank)

    monkeypatch.setattr(torch.cuda, "Stream", stream_of)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Waiting())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(FileParts, "_room", on_cpu)
    monkeypatch.setattr(read_ahead, "_pin", lambda memory: None)
    monkeypatch.setattr(read_ahead, "_unpin", lambda address, gpu: None)
    yield streams
    for stream in streams:
        stream.jobs.put(None)
        stream.thread.join()


@pytest.mark.parametrize("slots", [1, 3, 32])
@pytest.mark.parametrize("ahead_bytes", [0, 100_000, 1 << 28])
def test_copies_that_are_late_are_waited_for(
    toy: Checkpoint, late: list[Late], monkeypatch: pytest.MonkeyPatch, slots: int, ahead_bytes: int
) -> None:
    monkeypatch.setattr(read_ahead, "SLOTS", slots)
    monkeypatch.setattr(rank_parts, "AHEAD_BYTES", ahead_bytes)
    most = 0
    with Reader(toy.entries) as reader, parts_of(toy, [torch.device("cuda", rank) for rank in range(2)]) as parts:
        for names, placed in order_of(toy, 2)[:150]:
            ahead = sum(batch.copied_bytes for number, batch in enumerate(parts._batches) if number in parts._sent)
            most = max(most, ahead)
            for found, part in zip(parts.take(names), placed, strict=True):
                assert found is not None and part is not None
                for name, own in zip(names, found, strict=True):
                    assert torch.equal(own.view(torch.uint8), reader.read(name)[part.index].view(torch.uint8)), name
    assert len(late) == 2 and readers() == 0
    assert most <= ahead_bytes
    assert most > 0 or ahead_bytes == 0 or slots == 1  # one slot has nothing else while a copy is late
