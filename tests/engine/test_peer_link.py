"""J-29: two GPUs are used together only if what one sends is what the other reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4nb
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.engine import device as loading_engine
from dsv4nb.engine import peer_link
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.peer_link import PeerLink, sound_links, told
from dsv4nb.errors import EngineError
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb_kernels import peer_join

CPUS = [torch.device("cpu")] * 2
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(params=["twins", pytest.param("gpu", marks=pytest.mark.gpu2)])
def devices(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    is_gpu = request.param == "gpu"
    with nullcontext() if is_gpu else twin_kernels():
        yield [FIRST, SECOND] if is_gpu else CPUS


def poison(monkeypatch: pytest.MonkeyPatch, wanted: int, byte: int) -> None:
    """Let the copy number `wanted` arrive with a wrong bit in one byte."""
    copy, copies = peer_link._copy, list[int]()

    def wrong(source: Tensor, target: Tensor) -> None:
        copy(source, target)
        copies.append(1)
        if len(copies) == wanted:
            target[byte] ^= 0x40

    monkeypatch.setattr(peer_link, "_copy", wrong)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (1, "zeros, copied from {0} to {1}, byte 4,096 is 0x40, not 0x00"),
        (2, "ones, copied from {0} to {1}, byte 4,096 is 0xBF, not 0xFF"),
        (8, "0x55, copied from {1} to {0}, byte 4,096 is 0x15, not 0x55"),
        (9, "0xAA, copied from {1} to {0}, byte 4,096 is 0xEA, not 0xAA"),
        (10, "ramp, copied from {1} to {0}, byte 4,096 is 0x40, not 0x00"),
    ],
)
def test_j29_a_poisoned_copy_is_refused(
    monkeypatch: pytest.MonkeyPatch, devices: list[torch.device], wanted: int, said: str
) -> None:
    poison(monkeypatch, wanted, 4096)
    names = [peer_link._name(device) for device in devices]
    with pytest.raises(EngineError) as caught:
        sound_links(devices, joins=True)
    assert said.format(*names) in str(caught.value)
    assert "One GPU runs alone: devices=0" in str(caught.value)
    assert caught.value.param == "devices"


def test_j29_a_copy_of_another_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that arrives twice, and another one never, is right in every pattern but the ramp."""

    def wrong(source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        target[8192:12288] = source[4096:8192]

    monkeypatch.setattr(peer_link, "_copy", wrong)
    with pytest.raises(EngineError, match=r"pattern ramp, copied from cpu to cpu, byte 8,193 is 0x04, not 0x08"):
        sound_links(CPUS, joins=False)


@pytest.mark.parametrize(
    ("sender", "pattern"), [(0, "0x55"), (0, "0xAA"), (0, "ramp"), (1, "0x55"), (1, "0xAA"), (1, "ramp")]
)
def test_j29_a_poisoned_push_is_refused(monkeypatch: pytest.MonkeyPatch, sender: int, pattern: str) -> None:
    with twin_kernels():
        launch, joins = peer_join.launch, list[int]()

        def wrong(parts: Tensor, link: Any, **options: Any) -> Any:
            found = launch(parts, link, **options)
            if not options.get("takes", True):
                return found
            joins.append(1)  # two of each pattern
            if len(joins) == 2 * (3 * sender + ["0x55", "0xAA", "ramp"].index(pattern)) + 1:
                found.view(torch.int32)[2, 7] ^= 1
            return found

        monkeypatch.setattr(peer_join, "launch", wrong)
        with pytest.raises(EngineError) as caught:
            sound_links(CPUS, joins=True)
    assert f"pattern {pattern}, pushed from cpu to cpu and added on cpu, byte 2,076 is" in str(caught.value)
    assert "placement='pipeline' pushes nothing; or one GPU runs alone: devices=0" in str(caught.value)


def test_j29_words_that_never_come_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(parts: Tensor, link: Any, **options: Any) -> Any:
        if not options.get("takes", True):
            return None
        link.mine.error[0] = 1
        return torch.zeros_like(parts[0])

    monkeypatch.setattr(peer_join, "launch", lost)
    said = "cpu and cpu do not hear each other: cpu waited in vain for its part of 0x55, pushed from cpu to cpu"
    with pytest.raises(EngineError, match=said):
        sound_links(CPUS, joins=True)


def test_j29_a_sound_pair_passes(devices: list[torch.device]) -> None:
    sound_links(devices, joins=True)  # compiles the kernel
    began = time.perf_counter()
    (link,) = sound_links(devices, joins=True)
    took = time.perf_counter() - began
    print(f"{link}, found in {took:.3f} s")
    assert link.devices == tuple(devices)
    assert took < 1.0
    if devices[0].type == "cuda":
        assert link.gb_s is not None and min(link.gb_s) > 1.0 and link.join_us is not None and 0 < link.join_us < 1000
    else:
        assert (link.gb_s, link.join_us, str(link)) == (None, None, "")


def test_j29_neighbours_are_tested_and_one_alone_is_not() -> None:
    assert len(sound_links([*CPUS, *CPUS], joins=False)) == 3
    assert sound_links(CPUS[:1], joins=False) == ()


def test_j29_a_link_says_how_fast_it_is() -> None:
    link = PeerLink(devices=(FIRST, SECOND), gb_s=(389.6, 391.2), join_us=3.52)
    assert str(link) == "390 and 391 GB/s there and back, a join in 3.5 µs"
    assert told([link]) == str(link)
    slower = PeerLink(devices=(SECOND, FIRST), gb_s=(50.0, 49.0), join_us=None)
    assert told([link, slower]).endswith("; GPU 1 and GPU 0 50 and 49 GB/s there and back")
    assert told([]) == told([PeerLink(devices=(FIRST, SECOND), gb_s=None, join_us=None)]) == ""


def test_j29_nothing_is_read_where_the_link_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[object]()
    monkeypatch.setattr(loading_engine, "load_ranks", lambda *args, **options: read.append(args))
    poison(monkeypatch, 4, 77)
    toy = open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")
    for placement in ("tensor", "pipeline"):
        with pytest.raises(EngineError, match=r"the link of the GPUs changes what it carries.*byte 77 is"):
            DeviceEngine.from_checkpoint(toy, device=["cpu", "cpu"], placement=placement)  # type: ignore[arg-type]
        poison(monkeypatch, 4, 77)
    assert not read


@pytest.mark.kernels
def test_j29_a_sound_pair_passes_through_the_kernel() -> None:
    (link,) = sound_links(CPUS, joins=True)
    assert link.join_us is None
