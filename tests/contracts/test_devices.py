"""M-26 … M-28 on GPUs: walks and requests of the long runs beside, on the bundled model.

Whatever way a reply was made, speculated or not, behind a fork, a snapshot, a prefix from host memory or a chat from
disk, it has the ids and leaves the caches, bit for bit, of a run that nothing interrupted. Once with the kernels'
twins, where the CPU stands for GPUs, and on GPUs.
"""

from __future__ import annotations

import importlib.util
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dsv4nb import model as assembling
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.model import load
from dsv4nb.testing.twin_kernels import twin_kernels

HERE = Path(__file__).parent
ONE, PAIR = "0", "0,1"


@pytest.fixture(
    params=[
        pytest.param((ONE, False), marks=pytest.mark.twins, id="twins"),
        pytest.param((PAIR, False), marks=pytest.mark.twins, id="pair"),
        pytest.param((ONE, True), marks=pytest.mark.gpu, id="one gpu"),
        pytest.param((PAIR, True), marks=pytest.mark.gpu2, id="pair of gpus"),
    ]
)
def is_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Let whatever is loaded be on these devices."""
    devices, is_gpu = request.param
    load = DeviceEngine.from_checkpoint
    for name, value in {"DEVICES": devices, "MAX_SEQ": "4096", "SKIP_WARMUP": "1"}.items():
        monkeypatch.setenv(f"DSV4NB_{name}", value)

    def on_cpus(*args: Any, **options: Any) -> DeviceEngine:
        return load(*args, **options | {"device": ["cpu"] * len(options["device"])})

    with nullcontext() if is_gpu else twin_kernels():
        if not is_gpu:
            monkeypatch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
            monkeypatch.setattr(DeviceEngine, "from_checkpoint", on_cpus)
        yield is_gpu


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script of this folder."""
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)

    def imported(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield imported
    for name in ("walks", "models", "speculation"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("seed", range(4))
def test_m28_walks_of_chats_equal_cold_runs(script: Callable[[str], Any], is_gpu: bool, seed: int) -> None:
    counts = script("walks").run("toy", *((5, 14) if is_gpu else (1, 3)), seed)
    print(dict(counts))
    if is_gpu:
        assert min(counts[move] for move in ("send", "regenerate", "edit", "fork", "switch", "save", "cancel")) > 0
        assert counts["live"] + counts["anchor"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_m26_m27_ways_to_speculate_change_no_text(script: Callable[[str], Any], is_gpu: bool, seed: int) -> None:
    pytest.importorskip("llguidance")  # some requests have a grammar
    names = ("its own", "right at 0.9", "wrong at 3", "random")
    counts = script("speculation").run(120 if is_gpu else 2, seed, names)
    print(dict(counts))
    assert counts["drafts verified"] > 0
    if is_gpu:
        assert counts["drafts accepted"] > 100 and counts["drafts verified"] > counts["drafts accepted"]


def test_m26_caches_of_a_long_chat_are_those_of_cold_runs(script: Callable[[str], Any], is_gpu: bool) -> None:
    assert script("speculation").walk(300 if is_gpu else 4, 1, "its own", None) > 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no such timer")
def test_an_interrupt_at_any_moment_leaves_a_model_that_answers_as_before(is_gpu: bool) -> None:
    """In a prompt and in a reply, as a notebook interrupts a cell."""
    longest, stopped = (0.4, 0) if is_gpu else (2.0, 0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with load("toy") as model:
            asked: dict[str, Any] = {"prompt": "What is the capital of France?", "temperature": 0.0, "max_new": 24}
            wanted = model.generate(**asked).ids
            for seed in range(12 if is_gpu else 3):
                long: dict[str, Any] = {"prompt": "Tell me a story. " * 60, "temperature": 1.5, "seed": seed}
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0.002, longest))
                    stopped += model.generate(**long, max_new=2000).stop_reason == "cancelled"
                except KeyboardInterrupt:
                    stopped += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert model.generate(**asked).ids == wanted, seed
            model.cache.clear()
            assert model.engine.blocks_in_use == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 1
