"""An everyday sample of `soak.py`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for their annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_m14_m16_m17_m20_m21_requests_end_once_in_order_and_leave_nothing(soak: Any) -> None:
    report = soak.soak(requests=300, seed=1)
    counts = report.counts
    assert report.requests == 300
    # what it is there for did happen
    for what in ("done: length", "done: stop", "cancelled while queued", "cancelled in prefill", "cancelled in decode"):
        assert counts[what] > 0, report
    for where in ("failed in prefill", "failed in decode"):
        assert sum(n for what, n in counts.items() if what.startswith(where)) > 0, report
    assert counts["servers closed"] > 0 and counts["servers drained"] > 0, report


def test_a_lost_device_ends_what_waits_and_what_comes(soak: Any) -> None:
    plan = next(iter(soak.plans(1, 0)))
    lost = {"fault": "device lost", "fault_step": "chunk", "fault_at": 0, "cancel": "", "is_in_step": False}
    plans = [replace(plan, number=n, pause_s=0.0, **lost) for n in range(12)]
    counts = soak.Life("lost", plans, "drained", close_after=0).run()
    assert counts["failed in prefill: device lost"] == 1 and counts["servers whose device was lost"] == 1
    assert counts["failed: after the device was lost"] + counts["refused: engine_dead"] == 11


def test_a_plan_is_a_function_of_the_seed(soak: Any) -> None:
    assert list(soak.plans(200, 3)) == list(soak.plans(200, 3)) != list(soak.plans(200, 4))
    numbers = range(0, 1 << 24, 12345)
    for number in numbers:
        plan = replace(next(iter(soak.plans(1, 0))), number=number)
        assert soak.number_of(soak.FakeState((), prompt=tuple(plan.prompt))) == number


def test_it_runs_as_a_script() -> None:
    command = [sys.executable, str(SCRIPT), "--requests", "40", "--seed", "2"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SCRIPT.parents[2]).stdout.split(
        "\n"
    )
    assert any(line.split() == ["requests", "40"] for line in lines), lines
