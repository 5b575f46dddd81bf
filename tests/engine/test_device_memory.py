"""What a GPU engine says of its memory is what it takes: by the formula, by its buffers, and by torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

import dsv4nb
from dsv4nb.bench.asked import Asked
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine import device_memory, extent
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_caches import Caches, Share, device_state_bytes
from dsv4nb.engine.device_memory import bytes_on
from dsv4nb.engine.free_memory import free_host_bytes
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb.weights.rank_loader import load_ranks

META = torch.device("meta")
NEAR = 0.01  # of what the allocator gives


@pytest.mark.parametrize("kv_fp8", [True, False])
@pytest.mark.parametrize("positions", [100, 4096, 32_768, 1 << 20])
def test_h08_state_bytes_are_those_of_the_buffers(positions: int, kv_fp8: bool) -> None:
    config = Asked(shape="flash-0731").config()
    told = device_state_bytes(config, positions, kv_fp8=kv_fp8, has_drafter=True)
    share = Share(device=META, layers=range(config.num_hidden_layers), kv_fp8=kv_fp8, has_drafter=True)
    caches = Caches(config, positions, [share])
    found = dict.fromkeys(told, 0)
    for layer in caches.layers:
        found["window"] += layer.window.nbytes
        for name, cache in (("compressor", layer.compressor), ("indexer", layer.indexer)):
            if cache is not None:
                found[name] += cache.entries.nbytes
                found["source"] += cache.source.nbytes
    assert caches.draft is not None
    found["drafter"] = sum(buffer.nbytes for buffer in caches.draft.buffers())
    assert told == found
    assert caches.nbytes == sum(told.values())


@pytest.mark.parametrize(
    ("kv_fp8", "each"),
    [
        (False, 6880),  # bfloat16: 21 layers / 4 and 20 / 128 of 1,024 bytes, 21 index keys / 4 of 256
        (True, 4544.5),  # the same with records of 592 bytes
    ],
)
def test_h08_a_position_of_flash_takes_so_many_bytes(kv_fp8: bool, each: float) -> None:
    config = Asked(shape="flash").config()
    taken = [
        sum(device_state_bytes(config, positions, kv_fp8=kv_fp8).values()) for positions in (16_384, 131_072, 1 << 20)
    ]
    assert taken[1] - taken[0] == each * (131_072 - 16_384)
    assert taken[2] - taken[1] == each * ((1 << 20) - 131_072)


@pytest.fixture(
    params=[pytest.param("twins", marks=pytest.mark.twins), pytest.param("pair", marks=pytest.mark.twins)],
)
def engine(request: pytest.FixtureRequest, toy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceEngine]:
    monkeypatch.setattr(extent, "FEWEST", 512)
    with twin_kernels():
        places = ["cpu"] if request.param == "twins" else ["cpu", "cpu"]
        engine = DeviceEngine.from_checkpoint(toy, device=places, max_seq=3000, prefill="exact")
        yield engine
        engine.close()


def test_a_state_is_told_with_the_extent_that_it_takes(engine: DeviceEngine) -> None:
    told = [sum(engine.state_bytes(positions).values()) for positions in (1, 512, 513, 1024, 2500, 3000)]
    assert told[0] == told[1] < told[2] == told[3] < told[4] == told[5]
    for positions, nbytes in ((1, told[0]), (600, told[2]), (3000, told[5])):
        state = engine.new_state()
        state.grow(positions)
        assert state.caches.nbytes == nbytes


def test_the_largest_session_fits_into_what_is_free(engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = engine._shelf

    def taken(positions: int) -> int:
        return sum(sum(bytes_on(share, shelf, positions).values()) for share in shelf.shares)

    free = [0]
    monkeypatch.setattr(device_memory, "free_host_bytes", lambda: free[0])
    for free[0], fits in (
        (taken(512) - 1, 0),
        (taken(512), 512),
        (taken(1024) - 1, 512),
        (taken(1024), 1024),
        (taken(2048), 2048),
        (taken(3000) - 1, 2048),
        (taken(3000), 3000),
        (1 << 40, 3000),
    ):
        assert engine.largest_session() == fits
    free[0] = taken(3000) - taken(1024)
    assert engine.largest_session() < 3000
    state = engine.new_state()
    state.grow(1000)
    assert engine.largest_session() < 3000  # it is held
    shelf.clear()
    engine.release(state)
    assert engine.largest_session() == 3000


def test_a_model_on_gpus_says_what_its_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory.free_bytes(torch.device("cpu")) == pytest.approx(free_host_bytes(), rel=0.2)
    with dsv4nb.load("toy", devices="cpu") as model:
        assert model.largest_session() == model.max_seq
        monkeypatch.setattr(type(model.engine), "largest_session", lambda self: 77, raising=False)
        assert model.largest_session() == 77


def test_what_forwards_share_is_a_class_of_its_own(engine: DeviceEngine) -> None:
    state = engine.new_state()
    engine.forward_rows(state, [1, 2])
    for device in engine.cache_bytes():
        shared = device.classes["forward"]
        assert shared.used == 0 and shared.reserved > 2 * 3 * 3000 * 64 * 4  # the angles alone
    before = engine.cache_bytes()
    engine.forward_rows(state, [1, 2])
    assert engine.cache_bytes() == before


def allocated(devices: list[torch.device]) -> list[int]:
    gc.collect()
    for device in devices:
        torch.cuda.synchronize(device)
    return [torch.cuda.memory_allocated(device) for device in devices]


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.gpu, id="gpu"), pytest.param(2, marks=pytest.mark.gpu2, id="two gpus")]
)
def test_h07_h08_the_allocator_agrees(toy: Checkpoint, facts: list[int], count: int) -> None:
    devices = [torch.device("cuda", number) for number in range(count)]
    empty = allocated(devices)
    # without a drafter: its few products of float32 take a workspace of cuBLAS
    engine = DeviceEngine.from_checkpoint(toy, device=devices, drafter=False, max_seq=1 << 20)
    loaded = allocated(devices)
    before = [device.reserved for device in engine.cache_bytes()]
    for nbytes, first, taken, shared in zip(
        (weights.resident_bytes for weights in engine.ranks), empty, loaded, before, strict=True
    ):
        assert taken - first == pytest.approx(nbytes + shared, rel=NEAR)
    for positions in (4096, 65_536, 1 << 20):
        start = allocated(devices)
        state = engine.new_state()
        state_bytes = engine.state_bytes(positions)
        with engine._running():
            state.grow(positions)
        engine._shelf.clear()  # of the smaller caches that it had
        for first, taken in zip(start, allocated(devices), strict=True):
            assert taken - first == pytest.approx(sum(state_bytes.values()), rel=NEAR)
        engine.release(state)
        engine._shelf.clear()
        del state
        assert allocated(devices) == start
    state = engine.new_state()
    engine.prefill(state, facts[:300])
    for pos in range(300, 340, 8):
        engine.forward_rows(state, facts[pos : pos + 8])
        engine.commit(state, 8)
    snapshot = engine.capture(state)
    everything = [device.reserved for device in engine.cache_bytes()]
    for weights, first, taken, told in zip(engine.ranks, empty, allocated(devices), everything, strict=True):
        assert taken - first == pytest.approx(weights.resident_bytes + told, rel=NEAR)
    snapshot.release()
    engine.close()


@pytest.mark.gpu
def test_h07_weights_take_what_they_say(toy: Checkpoint) -> None:
    device = torch.device("cuda", 0)
    (before,) = allocated([device])
    ranks = load_ranks(toy, [device], drafter=True)
    (after,) = allocated([device])
    assert after - before == pytest.approx(ranks[0].resident_bytes, rel=NEAR)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Lets a GPU have so many bytes more than this process holds: others may use it beside."""
    _, total = torch.cuda.mem_get_info(0)

    def leave(nbytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved(0) + nbytes
        torch.cuda.set_per_process_memory_fraction(limit / total, 0)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device=None: (limit - torch.cuda.memory_reserved(0), limit)
        )

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.gpu
def test_the_largest_session_of_a_gpu_is_what_it_can_take(toy: Checkpoint, small_gpu: Callable[[int], None]) -> None:
    engine = DeviceEngine.from_checkpoint(toy, device="cuda", drafter=False, max_seq=1 << 20)
    assert engine.largest_session() == engine.max_seq
    small_gpu(sum(engine.state_bytes(1 << 20).values()) // 2)
    largest = engine.largest_session()
    assert 0 < largest < 1 << 20
    state = engine.new_state()
    with engine._running():
        state.grow(largest)
        with pytest.raises(torch.OutOfMemoryError):
            engine.new_state().grow(1 << 20)
    engine.close()
