"""Every operation has its faces: a twin and a test always, a kernel and a bench together."""

from __future__ import annotations

import importlib
import pickle
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsv4nb_kernels.bench import _driver

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "dsv4nb_kernels"
TWINS, BENCHES = KERNELS / "reference", KERNELS / "bench"
FORBIDDEN = re.compile(r"^\s*(from|import) (dsv4nb|triton)\b", re.MULTILINE)
OF_ALL = {"aot", "faces"}  # tests of no single operation


def names(folder: Path, prefix: str = "") -> set[str]:
    found = {path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}*.py")}
    return {name for name in found if not name.startswith("_")}


def test_every_twin_has_a_test_and_every_test_a_twin() -> None:
    assert names(TWINS) == names(ROOT / "tests" / "kernels", "test_") - OF_ALL


def test_every_kernel_has_a_twin_and_a_bench_and_every_bench_a_kernel() -> None:
    assert names(KERNELS) == names(BENCHES)
    assert names(KERNELS) <= names(TWINS)


def test_twins_import_neither_the_product_nor_triton() -> None:
    for path in TWINS.glob("*.py"):
        assert not FORBIDDEN.search(path.read_text()), path.name


@pytest.fixture(params=sorted(names(BENCHES)))
def bench(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"dsv4nb_kernels.bench.{request.param}")


def test_a_bench_times_the_product_on_every_problem_and_knows_its_arms_apart(bench: ModuleType) -> None:
    arms = bench.arms(torch.device("cpu"))
    problems = {(arm.op, arm.shape, arm.rows) for arm in arms}
    assert {(arm.op, arm.shape, arm.rows) for arm in arms if arm.is_product} == problems
    assert len({(arm.op, arm.shape, arm.rows, arm.name) for arm in arms}) == len(arms)
    assert bench.__name__.rpartition(".")[2] in {arm.op for arm in arms}


def test_a_benchs_kernels_compile_in_other_processes(bench: ModuleType) -> None:
    for arm in bench.arms(torch.device("cpu")):
        pickle.dumps(arm.compile)


def timing(name: str, rows: int, us: float | None, is_peer: bool = False) -> _driver.Timing:
    arm = _driver.Arm(
        op="op",
        shape="half",
        rows=rows,
        name=name,
        bytes_read=4_000_000,
        make=lambda count: lambda i: None,
        is_product=name == "a",
        is_peer=is_peer,
    )
    return _driver.Timing(arm=arm, us=us, copy_tb_s=4.0, note="" if us else "ValueError: no")


def test_the_table_names_the_arm_that_is_never_far_from_the_fastest() -> None:
    timings = [timing("a", 1, 1.0), timing("b", 1, 1.1), timing("a", 6, 3.0), timing("b", 6, 2.0)]
    text = _driver.table([*timings, timing("them", 1, None, is_peer=True)], best=1)
    assert text.splitlines()[1].split() == ["op", "half", "1", "1.00", "4.00", "100.0%", "*", "a"]
    assert "them  [ValueError: no]" in text
    assert text.splitlines()[-1] == "one arm for every T: op half: b (1.100), a (1.500)"
    assert sum(" b" in line for line in text.splitlines()[:-1]) == 1  # at T = 1 it is neither best nor the product


def test_a_weight_is_out_of_the_cache_before_its_turn_comes_again() -> None:
    for bytes_read in (1_000, 16 << 20, 1 << 30):
        assert _driver.copies(bytes_read) * bytes_read >= _driver.ROTATED_BYTES > 8 * 60_000_000
