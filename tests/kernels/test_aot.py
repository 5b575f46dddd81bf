"""Every variant that the engine uses compiles for Hopper and Blackwell without a GPU, within its figures.

Triton's interpreter, which the other tests of this folder run in, leaves nothing to compile; so this file runs itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import pytest

pytestmark = pytest.mark.kernels

CAPABILITIES = {90: (1, 2, 4, 8), 100: (1, 8), 120: (1, 8)}  # and the numbers of token columns
SYSTEM_SHARED = 1024  # bytes that a program of these architectures does not choose


def variants() -> list[tuple[str, str, int, int]]:
    """Operation, cut (the first matrix that has it), token columns, capability."""
    from dsv4nb_kernels import bf16_rows, expert_up, fp8_rows

    found = []
    for module in (fp8_rows, bf16_rows):
        firsts = {(k, cut): (n, k) for (n, k), cut in reversed(sorted(module.TUNINGS.items()))}
        for n, k in firsts.values():
            for capability, columns in CAPABILITIES.items():
                found += [(module.__name__.split(".")[-1], f"{n}x{k}", c, capability) for c in columns]
    for hidden, inner in expert_up.TUNINGS:
        for capability, columns in CAPABILITIES.items():
            for op in ("expert_up", "expert_up older", "expert_down", "expert_down early"):
                most = 2 if op == "expert_down early" else 8
                found += [(op, f"{hidden}x{inner}", c, capability) for c in columns if c <= most]
    return found + [("round_rows", "4 splits", 8, capability) for capability in CAPABILITIES]


def compile_variant(op: str, shape: str, columns: int, capability: int) -> dict[str, Any]:
    from dsv4nb_kernels import _rounded_rows, bf16_rows, fp8_rows
    from dsv4nb_kernels._launch import compiler_options
    from dsv4nb_kernels.bench._resources import resources

    found = {"op": op, "shape": shape, "columns": columns, "capability": capability}
    if op == "round_rows":
        used = resources(
            _rounded_rows._round_rows_kernel,
            {"x_ptr": "*fp32", "codes_ptr": "*fp16", "scales_ptr": "*fp32", "K": "i32"},
            {"SPLITS": 4, "BLOCKS": _rounded_rows.PROGRAM_BLOCKS, "FP8": True, "DEPENDENT": True},
            {"launch_pdl": True},
            capability,
        )
        limits = {"cap": _rounded_rows.REGISTERS_MAX, "spills": 0, "own_shared": _rounded_rows.SHARED_BYTES_MAX}
        return {**found, **limits, "uses_lanes": False, **asdict(used)}
    n, k = map(int, shape.split("x"))
    if op.startswith("expert"):
        return {**found, **compile_experts(op, n, k, columns, capability)}
    if op == "fp8_rows":
        cut, kernel = fp8_rows.tuning(n, k).at(columns), fp8_rows._fp8_rows_kernel
        constants = fp8_rows.constants(n, k, cut, columns)
        pointers = {"words_ptr": "*i32", "w_scales_ptr": "*fp32", "x_ptr": "*fp16", "x_scales_ptr": "*fp32"}
    else:
        cut, kernel = bf16_rows.tuning(n, k), bf16_rows._bf16_rows_kernel
        constants = bf16_rows.constants(n, k, cut, columns)
        pointers = {"words_ptr": "*i32", "x_ptr": "*bf16"}
    signature = {**pointers, "out_ptr": "*fp32", "T": "i32"}
    used = resources(kernel, signature, constants, compiler_options(cut, dependent=True), capability)
    limits = {
        "cap": cut.registers or 255,
        "spills": fp8_rows.SPILLED_BYTES_MAX if op == "fp8_rows" else bf16_rows.SPILLED_BYTES_MAX,
        "own_shared": 0 if cut.warps == 1 else cut.tiles * cut.warps * 32 * 4 * (2 if columns == 1 else 4),
    }
    return {**found, **limits, "uses_lanes": True, **asdict(used)}


def compile_experts(op: str, hidden: int, inner: int, columns: int, capability: int) -> dict[str, Any]:
    from dsv4nb_kernels import expert_down, expert_up
    from dsv4nb_kernels.bench._resources import resources

    is_up, early = op.startswith("expert_up"), op.endswith("early")
    module: Any = expert_up if is_up else expert_down
    cut = module.tuning(hidden, inner)
    signature = {"routed_ptr": "*i32", "shared_ptr": "*i32", "shared_scales_ptr": "*fp32", "experts_ptr": "*i32"}
    signature |= {"out_ptr": "*fp32", "T": "i32"}
    if is_up:
        kernel = expert_up._expert_up_kernel
        constants = expert_up.constants(hidden, inner, 6, cut, columns, rows_are_older=op.endswith("older"))
        signature |= {"x_ptr": "*fp16", "x_scales_ptr": "*fp32", "weights_ptr": "*fp32", "limit": "fp32", "zero": "i32"}
    else:
        kernel = expert_down._expert_down_kernel
        constants = expert_down.constants(hidden, inner, 6, cut, columns, early)
        signature |= {"inner_ptr": "*fp32" if early else "*fp16"}
    used = resources(kernel, signature, constants, module.options(cut), capability)
    values = 2 if columns == 1 else 4
    if is_up:  # the shared expert's programs add up, and those of an expert of one row, of two rows, of more
        values += {1: 2, 2: 6}.get(columns, 10)
    return {
        "cap": cut.registers or 255,
        "spills": module.SPILLED_BYTES_MAX[capability],
        "own_shared": values * cut.warps * 32 * 4,
        "uses_lanes": True,
        **asdict(used),
    }


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    """Run this file in a process whose kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_every_variant_compiles(report: list[dict[str, Any]]) -> None:
    assert len(report) == len(variants()) > 0


def test_registers_and_spills_stay_within_their_figures(report: list[dict[str, Any]]) -> None:
    assert not [row for row in report if row["registers"] > row["cap"] or row["stack_bytes"] > row["spills"]]


def test_shared_memory_holds_no_more_than_the_sum_of_the_warps(report: list[dict[str, Any]]) -> None:
    assert not [row for row in report if row["shared_bytes"] > row["own_shared"] + SYSTEM_SHARED]


def test_no_tensor_leaves_its_lanes(report: list[dict[str, Any]]) -> None:
    assert not [row for row in report if row["uses_lanes"] and row["moves_lanes"]]


if __name__ == "__main__":
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        print(json.dumps(list(pool.map(compile_variant, *zip(*variants(), strict=True)))))
