"""Where a forward's time goes."""

from __future__ import annotations

import pytest
import torch

from dsv4nb.bench.kernels import BETWEEN, SHOWN, profiled, table

FIRST = [("up", 10.0, 14.0), ("down", 13.0, 20.0), ("up", 21.0, 23.0)]  # two overlap, then nothing for 1 us
SECOND = [("up", 100.0, 106.0), ("down", 101.0, 105.0)]  # one inside the other


def test_every_moment_counts_once_and_the_lines_add_up_to_the_step() -> None:
    found = table([FIRST, SECOND], context=5, width=2)
    assert found.step_us == (13 + 6) / 2
    assert {line.name: (line.calls, line.us) for line in found.lines} == {
        "up": (1.5, (4 + 2 + 6) / 2),
        "down": (1.0, 6 / 2),
        BETWEEN: (0.0, 1 / 2),
    }
    assert [line.name for line in found.lines] == ["up", "down", BETWEEN]
    assert str(found).splitlines()[-1].split() == ["step", "9.5", "100.0%"]


def test_a_long_table_sums_its_end_up() -> None:
    found = table([[(f"op {i}", float(i), i + 1.0) for i in range(SHOWN + 5)]], context=0, width=1)
    lines = str(found).splitlines()
    assert len(lines) == SHOWN + 4
    assert lines[-2].split()[:2] == ["6", "others"]  # and what lies between
    assert sum(float(line.split()[-2]) for line in lines[2:-1]) == pytest.approx(found.step_us, abs=0.1)


def test_profiles_what_runs_without_a_gpu() -> None:
    x = torch.ones(64, 64)
    found = profiled(torch.device("cpu"), lambda: x @ x + x, context=7, width=3, runs=2)
    assert found is not None
    by_name = {line.name: line for line in found.lines}
    assert by_name["aten::matmul"].calls == by_name["aten::add"].calls == 1
    assert sum(line.us for line in found.lines) == pytest.approx(found.step_us)


def test_a_profiler_that_sees_nothing_makes_no_table() -> None:
    assert profiled(torch.device("cpu"), lambda: None, context=0, width=1, runs=1) is None
