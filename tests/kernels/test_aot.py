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

# kernels without inline PTX, whose programs look at one row: they are the same for every number of rows
PLAIN = (
    ("attend", "32x640"),
    ("attend", "64x640"),
    ("combine", "32x640"),
    ("expand", "4 parts"),
    ("expand", "nothing to add"),
    ("expand", "head"),
    ("collapse", "boundary"),
    ("collapse", "to experts"),
    ("route", "scores"),
    ("route", "table"),
    ("index_scores", "64x128"),
    ("top_entries", "16384"),
    ("top_entries", "65536"),
    ("norm_rope", "rows"),
    ("norm_rope", "heads"),
    ("index_rows", "64x128"),
    ("compress source", "4"),
    ("compress source", "128"),
    ("compress pool", "4"),
    ("compress pool", "128"),
    ("compress pool", "index"),
)
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
    found += [("round_rows", "4 splits", 8, capability) for capability in CAPABILITIES]
    return found + [(op, shape, 8, capability) for op, shape in PLAIN for capability in CAPABILITIES]


def compile_variant(op: str, shape: str, columns: int, capability: int) -> dict[str, Any]:
    from dsv4nb_kernels import _rounded_rows, bf16_rows, fp8_rows
    from dsv4nb_kernels._launch import compiler_options
    from dsv4nb_kernels.bench._resources import resources

    found: dict[str, Any] = {"op": op, "shape": shape, "columns": columns, "capability": capability}
    if (op, shape) in PLAIN:
        return {**found, **compile_plain(op, shape, capability)}
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


def types(names: str, pointers: str) -> dict[str, str]:
    """Pointers by name, in the order of their types."""
    return {f"{name}_ptr": f"*{kind}" for name, kind in zip(names.split(), pointers.split(), strict=True)}


def compile_plain(op: str, shape: str, capability: int) -> dict[str, Any]:
    from dsv4nb_kernels.bench._resources import resources

    used, limits = [], None
    for kernel, signature, constants, options, limits in plain(op, shape):  # noqa: B007 - the last one's limits
        used.append(asdict(resources(kernel, signature, constants, {**options, "launch_pdl": True}, capability)))
    assert limits is not None
    worst = {name: max(each[name] for each in used) for name in ("registers", "stack_bytes", "shared_bytes")}
    own = {"cap": limits.registers, "spills": limits.stack_bytes, "own_shared": limits.shared_bytes}
    return {**worst, **own, "uses_lanes": False, "moves_lanes": True}


def plain(op: str, shape: str) -> list[tuple[Any, dict[str, str], dict[str, int | bool], dict[str, int], Any]]:
    """Of each launch the kernel, the types of its run-time arguments, its constants, the options and the limits."""
    from dsv4nb_kernels import (
        compress,
        hyper_mix,
        index_rows,
        index_scores,
        norm_rope_write,
        route,
        sparse_attention,
        top_entries,
    )

    if op in ("attend", "combine"):
        heads, cut = int(shape.split("x")[0]), sparse_attention.TUNING
        splits = 128 // cut.keys, 512 // cut.keys
        limits = sparse_attention.LIMITS[op]
        left = types("mixed tops totals", "fp32 fp32 fp32")
        if op == "attend":
            given = types("query window window_places entries entries_places", "bf16 bf16 i32 bf16 i32") | left
            constants = sparse_attention.attend_constants(cut, *splits, heads, 512)
            kernel: Any = sparse_attention._attend_kernel
            return [(kernel, given | {"scale": "fp32"}, constants, {"num_warps": cut.warps[0]}, limits)]
        given = left | types("sink cos sin codes scales", "fp32 fp32 fp32 fp16 fp32")
        constants = sparse_attention.combine_constants(cut, sum(splits), heads, 512, 64)
        return [(sparse_attention._combine_kernel, given, constants, {"num_warps": cut.warps[1]}, limits)]
    if op in ("expand", "collapse"):
        mix = hyper_mix.TUNING
        if op == "expand":
            n, parts = (4, 4) if shape == "head" else (24, 4 if shape == "4 parts" else 0)
            given = types("y stream post comb fn out parts", "fp32 bf16 fp32 fp32 fp32 bf16 fp32") | {"T": "i32"}
            constants = hyper_mix.expand_constants(4096, n, parts, mix)
            kernel, warps = hyper_mix._expand_kernel, mix.warps[0]
        else:
            given = types("stream parts scale base norm x codes scales", "bf16 fp32 fp32 fp32 fp32 bf16 fp16 fp32")
            given |= types("post comb values row_scales", "fp32 fp32 fp16 fp32") | {
                "hc_eps": "fp32",
                "norm_eps": "fp32",
            }
            constants = hyper_mix.collapse_constants(4096, mix, 20, True, 8 if shape == "to experts" else 0)
            kernel, warps = hyper_mix._collapse_kernel, mix.warps[1]
        return [(kernel, given, constants, {"num_warps": warps}, hyper_mix.LIMITS[op])]
    if op == "route":
        given = types("logits bias table tokens experts weights", "fp32 fp32 i32 i32 i32 fp32") | {"factor": "fp32"}
        constants = route.constants(256, 6, 8, shape == "table")
        return [(route._route_kernel, given, constants, {"num_warps": route.WARPS}, route.LIMITS)]
    if op == "index_scores":
        scores = index_scores.TUNING
        given = types("query keys weights visible scores", "bf16 bf16 fp32 i32 fp32") | {"T": "i32", "C": "i32"}
        options = {"num_warps": scores.warps, "num_stages": scores.stages}
        constants = index_scores.constants(64, 128, 8, scores)
        return [(index_scores._index_scores_kernel, given, constants, options, index_scores.LIMITS)]
    if op == "top_entries":
        top = top_entries.TUNING
        given = types("scores visible keys entries keys_out entries_out", "fp32 i32 i32 i32 i32 i32") | {"width": "i32"}
        kernel = top_entries._top_entries_kernel
        rounds = top.rounds(int(shape), 512)
        launches = [
            (top_entries.constants(512, each, top, each == rounds[0], each == rounds[-1]), {"num_warps": each.warps})
            for each in rounds
        ]
        return [(kernel, given, constants, options, top_entries.LIMITS) for constants, options in launches]
    if op.startswith("compress"):
        part = op.split()[1]
        ratio, halves, splits = (128, 1, 8) if shape == "128" else (4, 2, 4)
        line = 2 * halves * 512
        source = types("product offset position ring", "fp32 fp32 i32 fp32") | {"T": "i32"}
        pool = types("position ring norm cos sin entries", "i32 fp32 fp32 fp32 fp32 bf16") | {"eps": "fp32"}
        if part == "source":
            constants = compress.source_constants(ratio, 256, line, 512, splits)
            options = {"num_warps": compress.SOURCE_WARPS}
            return [(compress._source_kernel, source, constants, options, compress.LIMITS[part])]
        width, rounding = (128, "index") if shape == "index" else (512, "kv")
        constants = compress.pool_constants(ratio, halves, 256, width, 64, rounding)
        options = {"num_warps": compress.POOL_WARPS}
        return [(compress._pool_kernel, pool, constants, options, compress.LIMITS[part])]
    if op == "index_rows":
        given = types("product cos sin out", "fp32 fp32 fp32 bf16")
        constants = index_rows.constants(64, 128, 64, 1, True)
        return [(index_rows._index_rows_kernel, given, constants, {"num_warps": index_rows.WARPS}, index_rows.LIMITS)]
    limits = norm_rope_write.LIMITS[shape]
    options = {"num_warps": norm_rope_write.WARPS[shape]}
    if shape == "rows":
        given = types("product latent_norm kv_norm cos sin slots", "fp32 fp32 fp32 fp32 fp32 i32")
        given |= types("codes scales ring", "fp16 fp32 bf16") | {"eps": "fp32"}
        constants = norm_rope_write.rows_constants(1024, 512, 64, 8, True, True)
        return [(norm_rope_write._norm_rope_rows_kernel, given, constants, options, limits)]
    given = types("product cos sin out", "fp32 fp32 fp32 bf16") | {"eps": "fp32"}
    constants = norm_rope_write.heads_constants(32, 512, 64, 1)
    return [(norm_rope_write._norm_rope_heads_kernel, given, constants, options, limits)]


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


def test_shared_memory_stays_within_its_figures(report: list[dict[str, Any]]) -> None:
    assert not [row for row in report if row["shared_bytes"] > row["own_shared"] + SYSTEM_SHARED]


def test_no_tensor_leaves_its_lanes(report: list[dict[str, Any]]) -> None:
    assert not [row for row in report if row["uses_lanes"] and row["moves_lanes"]]


if __name__ == "__main__":
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        print(json.dumps(list(pool.map(compile_variant, *zip(*variants(), strict=True)))))
