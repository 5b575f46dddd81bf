"""Rolling back on GPUs at every phase of a compressed window, for every width and accepted count (dspark.md 10.3).

As `phases.py`, with the bundled model and its drafter; with the kernels' twins some of it, and on GPUs all.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.testing.twin_kernels import twin_kernels

SCRIPT = Path(__file__).with_name("phases.py")
MAX_SEQ = 1536
PARTS = 4  # of the phases, each a test
ROUNDS = 300

PLACES = {
    "twins": (["cpu"], "tensor"),
    "pair": (["cpu"] * 2, "tensor"),
    "one gpu": (["cuda:0"], "tensor"),
    "pair of gpus": (["cuda:0", "cuda:1"], "tensor"),
    "pipeline of gpus": (["cuda:0", "cuda:1"], "pipeline"),
}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.twins) for name in ("twins", "pair")),
        pytest.param("one gpu", marks=pytest.mark.gpu),
        *(pytest.param(name, marks=pytest.mark.gpu2) for name in ("pair of gpus", "pipeline of gpus")),
    ],
)
def engine(request: pytest.FixtureRequest, toy: Checkpoint) -> Iterator[DeviceEngine]:
    places, kind = PLACES[request.param]
    options: dict[str, Any] = {"max_seq": MAX_SEQ, "prefill": "exact", "placement": kind}
    with twin_kernels() if places[0] == "cpu" else nullcontext():
        engine = DeviceEngine.from_checkpoint(toy, device=places, **options)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("phases", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("part", range(PARTS))
def test_m28_what_is_kept_is_what_single_steps_leave_at_every_phase(
    engine: DeviceEngine, script: Any, part: int
) -> None:
    is_gpu = engine.ranks[0].device.type == "cuda"
    starts = range(script.START + part, script.START + 128, PARTS)
    compared = [script.phase(engine, start) for start in (starts if is_gpu else starts[-1 - 9 * part :][:1])]
    assert compared == [21] * len(compared)  # each width from 1 to 6, and each accepted count


def test_m28_rounds_of_any_width_and_count_are_one_prefill(engine: DeviceEngine, script: Any) -> None:
    rounds = ROUNDS if engine.ranks[0].device.type == "cuda" else 20
    assert rounds < script.walk(engine, rounds, 7) < MAX_SEQ
