"""J-17, J-18, J-19: whatever ends a model, the memory of its GPUs is free again."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4nb
from dsv4nb.engine.pair_forward import PairForward
from dsv4nb.errors import EngineError, ModelClosed
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.testing.tiny_tokenizer import write_tiny_tokenizer
from dsv4nb.weights.progress import LoadStep

SLACK = 200 << 20
HELD = 300 << 20  # of each GPU at least, so that a model that stays is seen
HELD_HALF = 100 << 20
CLOSED_S = 2.0
KILLED_S = 5.0

# few layers, and an embedding and a head of 260 MB each
MODEL: dict[str, Any] = {
    "hidden_size": 1024,
    "vocab_size": 126976,
    "compress_ratios": [0, 4],
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 256,
    "index_topk": 32,
}

ONE = pytest.param((0,), marks=pytest.mark.gpu, id="one gpu")
PAIR = pytest.param((0, 1), marks=pytest.mark.gpu2, id="pair of gpus")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("memory") / "large", **MODEL))


@pytest.fixture(scope="module", params=[ONE, PAIR])
def devices(request: pytest.FixtureRequest, folder: Path) -> tuple[int, ...]:
    """GPUs whose contexts, libraries and compiled kernels are there: a model came and went."""
    ids: tuple[int, ...] = request.param
    use(folder, ids)
    return ids


@pytest.fixture
def free_before(devices: tuple[int, ...]) -> Iterator[list[int]]:
    gc.collect()
    torch.cuda.empty_cache()
    yield free(devices)


def use(folder: Path, devices: tuple[int, ...]) -> None:
    with dsv4nb.load(folder, devices=devices, max_seq=1024, warmup=False) as model:
        assert model.generate("hi", max_new=4).ids


def free(devices: tuple[int, ...]) -> list[int]:
    return [torch.cuda.mem_get_info(device)[0] for device in devices]


def taken(devices: tuple[int, ...], before: list[int]) -> list[int]:
    """Return what of the memory that was free before is free no more."""
    return [then - now for now, then in zip(free(devices), before, strict=True)]


def require_back(devices: tuple[int, ...], before: list[int], within_s: float) -> None:
    """Wait until as much is free as before."""
    began = time.monotonic()
    while max(left := taken(devices, before)) > SLACK:
        assert time.monotonic() - began < within_s, [one >> 20 for one in left]
        time.sleep(0.05)
    print(f"back after {time.monotonic() - began:.2f} s but for {[one >> 20 for one in left]} MiB")


def test_j17_a_closed_model_frees_its_gpus_whoever_holds_it(
    folder: Path, devices: tuple[int, ...], free_before: list[int]
) -> None:
    model = dsv4nb.load(folder, devices=devices, max_seq=1024, warmup=False)
    chat = model.chat()
    held: dict[object, object] = {1: model, 2: chat, 3: chat.send("hi", max_new=4), "_": model.engine}
    held[4] = model._parts.server.do(lambda engine, prefixes: engine.capture(engine.new_state()))
    held[5] = model.submit("hello", max_new=900)  # it runs when the model is closed
    with pytest.raises(ZeroDivisionError) as failed:
        held[6] = [model, 1 / 0]
    held[7] = failed  # with its traceback
    assert min(taken(devices, free_before)) > HELD
    model.close()
    require_back(devices, free_before, CLOSED_S)
    with pytest.raises(ModelClosed):
        model.generate("hi")
    model.close()
    use(folder, devices)
    require_back(devices, free_before, CLOSED_S)
    assert held[1] is model


@pytest.mark.parametrize("where", ["half of the weights", "engine", "warming"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_j19_an_interrupted_load_frees_what_it_took_and_the_next_one_works(
    folder: Path, devices: tuple[int, ...], free_before: list[int], where: str, error: type[BaseException]
) -> None:
    seen = list[int]()

    def interrupt(step: LoadStep) -> None:
        half = step.phase == "weights" and 2 * step.done_bytes >= step.total_bytes
        if half if where == "half of the weights" else step.phase == where:
            seen.append(min(taken(devices, free_before)))
            raise error

    with pytest.raises(error) as interrupted:
        dsv4nb.load(folder, devices=devices, max_seq=1024, warmup=where == "warming", progress=interrupt)
    assert seen[-1] > HELD_HALF
    require_back(devices, free_before, CLOSED_S)
    use(folder, devices)
    require_back(devices, free_before, CLOSED_S)
    assert interrupted.value.__traceback__ is not None  # as a notebook keeps the last one


CHILD = """
import sys, time
import dsv4nb
devices = tuple(map(int, sys.argv[2].split(",")))
model = dsv4nb.load(sys.argv[1], devices=devices, max_seq=1024, warmup=False, progress=False)
model.generate("hi", max_new=4)
ticket = model.submit("hello", max_new=900)
print("ready", flush=True)
time.sleep(600)
"""


def children_of(pid: int) -> list[Path]:
    """Return the folders of its processes in /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended by now
            if f"PPid:\t{pid}\n" in status.read_text():
                found.append(status.parent)
    return found


def test_j18_a_kernel_that_is_killed_leaves_no_process_and_no_memory(
    folder: Path, devices: tuple[int, ...], free_before: list[int]
) -> None:
    root = Path(dsv4nb.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), ",".join(map(str, devices))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}"},
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            assert min(taken(devices, free_before)) > HELD
            children = children_of(child.pid)
            child.send_signal(signal.SIGKILL)
            assert child.wait(KILLED_S) == -signal.SIGKILL
            require_back(devices, free_before, KILLED_S)
            assert not [one for one in children if one.exists()]
        finally:
            child.kill()


@pytest.mark.parametrize("devices", [PAIR], indirect=True)
def test_gpus_that_lost_each_other_end_one_reply_and_a_model_that_is_loaded_anew_works(
    folder: Path, devices: tuple[int, ...], free_before: list[int]
) -> None:
    with dsv4nb.load(folder, devices=devices, max_seq=1024, warmup=False, name="first") as model:
        wanted = model.generate("hi", temperature=0.0, max_new=4).ids
        engine: Any = model.engine
        forward = engine._forward
        assert isinstance(forward, PairForward)
        with torch.inference_mode():
            forward._links[1].mine.error[0] = 1
            forward._links[0].mine.counts[:] += 1  # the other GPU went on
        for device in devices:
            torch.cuda.synchronize(device)
        with pytest.raises(EngineError, match="cuda:0 and cuda:1 lost each other"):
            model.generate("hello", temperature=0.0, max_new=4)
        assert model.generate("hi", temperature=0.0, max_new=4).ids == wanted
    require_back(devices, free_before, CLOSED_S)
    with dsv4nb.load(folder, devices=devices, max_seq=1024, warmup=False) as again:
        assert again.generate("hi", temperature=0.0, max_new=4).ids == wanted
