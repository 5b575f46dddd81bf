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
    ("attend", "32x640, bfloat16"),
    ("attend", "64x640"),
    ("combine", "32x640"),
    ("combine", "32x1152"),
    ("expand", "4 parts"),
    ("expand", "nothing to add"),
    ("expand", "head"),
    ("expand", "chunk"),
    ("expand", "chunk of a pair"),
    ("expand", "chunk of a pair, head"),
    ("expand", "joined"),
    ("expand", "joined, pushed"),
    ("peer_join", "1 part"),
    ("peer_join", "4 parts"),
    ("collapse", "boundary"),
    ("collapse", "to experts"),
    ("route", "scores"),
    ("route", "table"),
    ("index_scores", "64x128"),
    ("index_scores", "64x128, alone"),
    ("index_scores", "64x128, few"),
    ("index_scores", "chunk"),
    ("top_entries", "16384"),
    ("top_entries", "65536"),
    ("norm_rope", "rows"),
    ("norm_rope", "heads"),
    ("unpack_records", "any"),
    ("index_rows", "64x128"),
    ("index_rows", "chunk"),
    ("compress source", "4"),
    ("compress source", "128"),
    ("compress pool", "4"),
    ("compress pool", "128"),
    ("compress pool", "index"),
    ("compress both", "source"),
    ("compress both", "pool"),
    ("chunk_attention", "plain, window"),
    ("chunk_attention", "plain, 4"),
    ("chunk_attention", "plain, 128"),
    ("chunk_attention", "lanes, window"),
    ("chunk_attention", "lanes, 4"),
    ("chunk_attention", "lanes, 128"),
    ("chunk_attention", "lanes, 4, narrow"),
    ("bf16_chunk", "64x4096"),
    ("bf16_chunk", "256x4096"),
    ("bf16_chunk", "512x4096"),
    ("bf16_chunk", "1024x4096"),
    ("bf16_chunk", "2048x4096"),
    ("round_chunk", "fp8"),
    ("round_chunk", "bf16"),
    ("round_chunk", "bf16, half"),
    ("arrange_fp4", "any"),
    ("fp8_chunk", "lanes 16384x1024"),
    ("fp8_chunk", "lanes 8192x1024"),
    ("fp8_chunk", "lanes 4096x4096"),
    ("fp8_chunk", "lanes in 4 groups 4096x4096"),
    ("fp8_chunk", "lanes 1536x4096"),
    ("fp8_chunk", "4096x4096"),
    ("plan_chunk", "count"),
    ("plan_chunk", "place"),
    ("expert_up_chunk", "lanes routed"),
    ("expert_up_chunk", "lanes shared"),
    ("expert_up_chunk", "4096x1024"),
    ("expert_down_chunk", "lanes routed"),
    ("expert_down_chunk", "lanes shared"),
    ("expert_down_chunk", "4096x1024"),
    ("expert_down_chunk", "sum"),
    ("collapse", "chunk"),
    ("norm_rope", "chunk"),
    ("tail", "head"),
    ("tail", "best"),
    ("tail", "panel"),
    ("tail", "markov"),
    ("tail", "process"),
    ("tail", "search"),
    ("tail", "fold"),
    ("tail", "ties"),
    ("tail", "race"),
    ("tail", "finish"),
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
    for capability, columns in CAPABILITIES.items():
        found += [("fp8_rows older", "16384x1024", c, capability) for c in columns]
    found += [("round_rows", "4 splits", 8, capability) for capability in CAPABILITIES]
    # the form, or the cut, of a kernel for Hopper alone
    hopper = {(op, shape) for op, shape in PLAIN if shape.startswith(("lanes", "64x128, alone", "64x128, few"))}
    plain = [(op, shape, c) for op, shape in PLAIN for c in CAPABILITIES if c == 90 or (op, shape) not in hopper]
    return found + [(op, shape, 8, capability) for op, shape, capability in plain]


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
    if op.startswith("fp8_rows"):
        cut, kernel = fp8_rows.tuning(n, k).at(columns), fp8_rows._fp8_rows_kernel
        constants = fp8_rows.constants(n, k, cut, columns, older=op.endswith("older"))
        pointers = {"words_ptr": "*i32", "w_scales_ptr": "*fp32", "x_ptr": "*fp16", "x_scales_ptr": "*fp32"}
    else:
        cut, kernel = bf16_rows.tuning(n, k), bf16_rows._bf16_rows_kernel
        constants = bf16_rows.constants(n, k, cut, columns)
        pointers = {"words_ptr": "*i32", "x_ptr": "*bf16"}
    signature = {**pointers, "out_ptr": "*fp32", "T": "i32"}
    used = resources(kernel, signature, constants, compiler_options(cut, dependent=True), capability)
    limits = {
        "cap": cut.registers or 255,
        "spills": fp8_rows.SPILLED_BYTES_MAX if op.startswith("fp8_rows") else bf16_rows.SPILLED_BYTES_MAX,
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
        _chunk_attention_lanes,
        _compress_both,
        _fp4_arrange,
        _kv_records,
        _round_chunk,
        bf16_chunk,
        chunk_attention,
        compress,
        hyper_mix,
        index_rows,
        index_scores,
        norm_rope_write,
        peer_join,
        route,
        sparse_attention,
        top_entries,
    )

    if op == "tail":
        return tail(shape)
    if op in ("fp8_chunk", "plan_chunk", "expert_up_chunk", "expert_down_chunk"):
        return [chunk_product(op, shape)]
    if op in ("attend", "combine"):
        size, *form = shape.split(", ")
        heads, places = map(int, size.split("x"))
        cut = sparse_attention.TUNING
        splits = 128 // cut.keys, (places - 128) // cut.keys
        limits = sparse_attention.LIMITS["combine" if op == "combine" else "rows" if form else "records"]
        left = types("mixed tops totals", "fp32 fp32 fp32")
        if op == "attend":
            kind = "bf16" if form else "u8"
            given = types("query window window_places entries entries_places", f"bf16 {kind} i32 {kind} i32") | left
            constants = sparse_attention.attend_constants(cut, *splits, heads, 512, 64, not form)
            kernel: Any = sparse_attention._attend_kernel
            return [(kernel, given | {"scale": "fp32"}, constants, {"num_warps": cut.warps[0]}, limits)]
        given = left | types("sink cos sin codes scales", "fp32 fp32 fp32 fp16 fp32")
        constants = sparse_attention.combine_constants(cut, sum(splits), heads, 512, 64)
        return [(sparse_attention._combine_kernel, given, constants, {"num_warps": cut.warps[1]}, limits)]
    if op in ("expand", "collapse"):
        mix = hyper_mix.TUNING
        if op == "expand":
            n = 4 if shape.endswith("head") else 24
            parts = {"nothing to add": 0, "joined, pushed": 1}.get(shape, 2 if "pair" in shape else 4)
            given = types("y stream post comb fn out parts", "fp32 bf16 fp32 fp32 fp32 bf16 fp32") | {"T": "i32"}
            given |= types("theirs mine counts error", "i64 i64 i32 i32") | {"polls": "i32"}
            together = hyper_mix.CHUNK_ROWS if shape.startswith("chunk") else 1
            joins = {"pushes": shape == "joined", "takes": shape.startswith("joined")}
            dependent = "pair" not in shape  # behind a copy
            constants = hyper_mix.expand_constants(4096, n, parts, mix, together, dependent, **joins)
            kernel, warps = hyper_mix._expand_kernel, mix.warps[0]
        else:
            given = types("stream parts scale base norm x codes scales", "bf16 fp32 fp32 fp32 fp32 bf16 fp16 fp32")
            given |= types("post comb values row_scales", "fp32 fp32 fp16 fp32") | {
                "hc_eps": "fp32",
                "norm_eps": "fp32",
            }
            columns, chunk = 8 if shape == "to experts" else 0, shape == "chunk"
            constants = hyper_mix.collapse_constants(4096, mix, 20, True, columns, chunk)
            kernel, warps = hyper_mix._collapse_kernel, mix.warps[1]
        limits = hyper_mix.CHUNK_LIMITS if shape.startswith("chunk") else hyper_mix.LIMITS
        return [(kernel, given, constants, {"num_warps": warps}, limits[op])]
    if op == "peer_join":
        given = types("parts theirs mine counts error out", "fp32 i64 i64 i32 i32 fp32") | {"T": "i32", "polls": "i32"}
        constants = peer_join.constants(4096, int(shape.split()[0]))
        return [(peer_join._peer_join_kernel, given, constants, {"num_warps": peer_join.WARPS}, peer_join.LIMITS)]
    if op == "route":
        given = types("logits bias table tokens experts weights", "fp32 fp32 i32 i32 i32 fp32") | {"factor": "fp32"}
        constants = route.constants(256, 6, 8, shape == "table")
        return [(route._route_kernel, given, constants, {"num_warps": route.WARPS}, route.LIMITS)]
    if op == "index_scores":
        cuts = {"chunk": index_scores.CHUNK_TUNING, "64x128": index_scores.TUNING}
        cuts |= {"64x128, alone": index_scores.ALONE, "64x128, few": index_scores.FEW}
        scores = cuts[shape]
        given = types("query keys weights visible scores", "bf16 bf16 fp32 i32 fp32")
        given |= {"T": "i32", "C": "i32"}
        options = {"num_warps": scores.warps}
        constants = index_scores.constants(64, 128, 8, scores)
        limits = index_scores.LIMITS["chunk" if shape == "chunk" else "step"]
        return [(index_scores._index_scores_kernel, given, constants, options, limits)]
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
    if op == "compress both":
        limits = _compress_both.LIMITS[shape]
        if shape == "source":
            given = types("product position offset ring keys_offset keys_ring", "fp32 i32 fp32 fp32 fp32 fp32")
            constants = _compress_both.source_constants(4, 2624, (16, 2048), (16, 512), 4)
            options = {"num_warps": compress.SOURCE_WARPS}
            return [(_compress_both._sources_kernel, given | {"T": "i32"}, constants, options, limits)]
        given = types("position ring norm entries keys_ring", "i32 fp32 fp32 u8 fp32")
        given |= types("keys_norm keys cos sin", "fp32 bf16 fp32 fp32") | {"eps": "fp32"}
        pools = compress.Pool(4, 2, 16, 512, 64), compress.Pool(4, 2, 16, 128, 64)
        constants = _compress_both.both_constants(*pools, "kv", "index")
        return [(_compress_both._pools_kernel, given, constants, {"num_warps": compress.pool_warps(4, 2)}, limits)]
    if op.startswith("compress"):
        part = op.split()[1]
        ratio, halves, splits = (128, 1, 8) if shape == "128" else (4, 2, 4)
        line = 2 * halves * 512
        source = types("product offset position ring", "fp32 fp32 i32 fp32") | {"T": "i32"}
        kind = "bf16" if shape == "index" else "u8"
        pool = types("position ring norm cos sin entries", f"i32 fp32 fp32 fp32 fp32 {kind}") | {"eps": "fp32"}
        if part == "source":
            constants = compress.source_constants(ratio, 256, line, 512, splits)
            options = {"num_warps": compress.SOURCE_WARPS}
            return [(compress._source_kernel, source, constants, options, compress.LIMITS[part])]
        width, rounding = (128, "index") if shape == "index" else (512, "kv")
        constants = compress.pool_constants(ratio, halves, 256, width, 64, rounding)
        options = {"num_warps": compress.pool_warps(ratio, halves)}
        return [(compress._pool_kernel, pool, constants, options, compress.LIMITS[part])]
    if op == "unpack_records":
        given = types("first second first_out second_out", "u8 u8 bf16 bf16")
        given |= dict.fromkeys(("first_rows", "second_rows", "first_programs"), "i32")
        constants, options = _kv_records.unpack_constants(512, 64), {"num_warps": _kv_records.WARPS}
        return [(_kv_records._unpack_kernel, given, constants, options, _kv_records.LIMITS)]
    if op == "arrange_fp4":
        given = types("codes scales words", "i32 i32 i32") | {"K": "i32"}
        return [(_fp4_arrange._arrange_fp4_kernel, given, {}, {"num_warps": _fp4_arrange.WARPS}, _fp4_arrange.LIMITS)]
    if op == "round_chunk":
        given = types("x values scales", "fp32 fp16 fp32" if shape == "fp8" else "bf16 fp16 fp32")
        width = {"fp8": 4096, "bf16": 32768, "bf16, half": 16384}[shape]
        constants = _round_chunk.constants(1, width, shape == "fp8")
        kernel, options = _round_chunk._round_chunk_kernel, {"num_warps": _round_chunk.WARPS}
        return [(kernel, given, constants, options, _round_chunk.LIMITS)]
    if op == "chunk_attention":
        form, kind, *narrow = shape.split(", ")
        ratio = 0 if kind == "window" else int(kind)
        given = types("query ring entries places position sink", "bf16 bf16 bf16 i32 i32 fp32")
        given |= types("cos sin out", "fp32 fp32 bf16") | {"held": "i32", "most": "i32", "scale": "fp32"}
        cut, problem = chunk_attention.PLAIN, (128, ratio, ratio == 4, 32, 128 if narrow else 512, 64)
        constants = chunk_attention.constants(cut, *problem)
        kernel, options = chunk_attention._chunk_attention_kernel, {"num_warps": cut.warps}
        if form == "lanes":
            constants, cut = chunk_attention.lane_constants(*problem), chunk_attention.LANES
            kernel, options = _chunk_attention_lanes.chunk_attention_lanes_kernel, {"num_warps": cut.warps}
        return [(kernel, given, constants, options, chunk_attention.LIMITS[form])]
    if op == "bf16_chunk":
        n, k = map(int, shape.split("x"))
        product = bf16_chunk.tuning(n, k)
        given = types("x weights out", "bf16 bf16 fp32") | {"T": "i32"}
        constants, options = bf16_chunk.constants(n, k, product), {"num_warps": product.warps}
        return [(bf16_chunk._bf16_chunk_kernel, given, constants, options, bf16_chunk.LIMITS)]
    if op == "index_rows":
        given = types("product cos sin out", "fp32 fp32 fp32 bf16") | {"T": "i32"}
        together = index_rows.CHUNK_ROWS if shape == "chunk" else 1
        constants, options = index_rows.constants(64, 128, 64, 1, True, together), {"num_warps": index_rows.WARPS}
        return [(index_rows._index_rows_kernel, given, constants, options, index_rows.LIMITS)]
    part = "heads" if shape == "heads" else "rows"
    limits = norm_rope_write.LIMITS[part]
    options = {"num_warps": norm_rope_write.WARPS[part]}
    if part == "rows":
        given = types("product latent_norm kv_norm cos sin slots", "fp32 fp32 fp32 fp32 fp32 i32")
        given |= types("codes scales ring", "fp16 fp32 u8") | {"eps": "fp32"}
        constants = norm_rope_write.rows_constants(1024, 512, 64, 8, True, True, shape == "chunk")
        return [(norm_rope_write._norm_rope_rows_kernel, given, constants, options, limits)]
    given = types("product cos sin out", "fp32 fp32 fp32 bf16") | {"eps": "fp32"}
    constants = norm_rope_write.heads_constants(32, 512, 64, 1)
    return [(norm_rope_write._norm_rope_heads_kernel, given, constants, options, limits)]


def tail(name: str) -> list[tuple[Any, dict[str, str], dict[str, int | bool], dict[str, int], Any]]:
    """Likewise of what follows the last layer."""
    from dsv4nb_kernels import _best, draw, head_argmax, markov_step
    from dsv4nb_kernels._draw_rules import Stages

    n, first = 129280, {"first_id": "i32"}
    if name == "head":
        head = head_argmax.TUNING
        given = types("x weight logits parts sums", "bf16 bf16 fp32 i64 fp32") | {"T": "i32"} | first
        constants, options = head_argmax.constants(n, 4096, head), {"num_warps": head.warps, "num_stages": head.stages}
        return [(head_argmax._head_kernel, given, constants, options, head_argmax.LIMITS[name])]
    if name == "best":
        given, constants = types("parts values ids", "i64 fp32 i32"), _best.constants(n // head_argmax.TUNING.rows)
        return [(_best._best_kernel, given, constants, {"num_warps": _best.WARPS}, _best.LIMITS)]
    if name == "panel":
        given = types("logits parts sums values ids log_sums", "fp32 i64 fp32 fp32 i32 fp32") | first
        constants, options = (
            head_argmax.panel_constants(n, 20, head_argmax.TUNING),
            {"num_warps": head_argmax.PANEL_WARPS},
        )
        return [(head_argmax._panel_kernel, given, constants, options, head_argmax.LIMITS[name])]
    if name == "markov":
        given = (
            types("base tokens in out logits parts", "fp32 i32 bf16 bf16 fp32 i64") | {"T": "i32", "V": "i32"} | first
        )
        constants, options = markov_step.constants(n, 256, markov_step.TUNING), {"num_warps": markov_step.TUNING.warps}
        return [(markov_step._markov_kernel, given, constants, options, markov_step.LIMITS)]
    search = types("row best numbers whole state", "fp32 i64 fp64 i64 i64")
    given = {
        "process": types(
            "logits bias counts numbers row best sums bins copies", "fp32 fp64 i32 fp64 fp32 i64 fp32 i64 i64"
        ),
        "search": search | types("bins copies", "i64 i64"),
        "fold": types("copies bins", "i64 i64"),
        "ties": search | types("bins ties", "i64 i32"),
        "race": search | types("ties raced", "i32 i64"),
        "finish": types("logits numbers best raced sums ids log_probs", "fp32 fp64 i64 i64 fp32 i32 fp32"),
    }[name]
    everything = draw.launches(n, Stages(*[True] * 5), draw.TUNING)
    return [
        (draw.KERNELS[name], given, constants, draw.options(name, draw.TUNING), draw.LIMITS[name])
        for launch, constants in everything
        if launch == name
    ]


def chunk_product(op: str, shape: str) -> tuple[Any, dict[str, str], dict[str, int | bool], dict[str, int], Any]:
    """A product of a chunk, or what its experts need beside."""
    from dsv4nb_kernels import _chunk_lanes, _chunk_plan, expert_down_chunk, expert_up_chunk, fp8_chunk

    lanes, on_hopper = shape.startswith("lanes"), {"num_warps": _chunk_lanes.WARPS}
    if op == "fp8_chunk":
        n, k = map(int, shape.split()[-1].split("x"))
        given = types("words w_scales x x_scales out", "i32 fp32 fp16 fp32 fp32") | {"T": "i32"}
        if lanes:
            groups = 4 if "groups" in shape else 1
            constants = fp8_chunk.lane_constants(n, k, groups, fp8_chunk.tuning(n, k))
            return fp8_chunk._fp8_chunk_lanes_kernel, given, constants, on_hopper, fp8_chunk.LIMITS["lanes"]
        constants = {"N": n, "K": k, "GROUPS": 1, **fp8_chunk.PLAIN}
        options = fp8_chunk.PLAIN_OPTIONS
        return fp8_chunk._fp8_chunk_kernel, given, constants, options, fp8_chunk.LIMITS["plain"]
    if op == "plan_chunk":
        options, limits = {"num_warps": _chunk_plan.WARPS}, _chunk_plan.LIMITS
        if shape == "count":
            given = types("experts counts", "i32 i32") | {"total": "i32"}
            return _chunk_plan._count_kernel, given, {"READ": _chunk_plan.READ}, options, limits
        given = types("experts counts order places ends tile_experts tile_places", "i32 i32 i32 i32 i32 i32 i32")
        given |= {"total": "i32", "E": "i32", "M": "i32"}
        constants = {"READ": _chunk_plan.READ, "ROWS": _chunk_plan.ROWS, "EXPERTS": 256}
        return _chunk_plan._place_kernel, given, constants, options, limits
    tiles = types("ends tile_experts tile_places", "i32 i32 i32") | {"T": "i32"}
    if op == "expert_up_chunk":
        shape_of = expert_up_chunk.constants(4096, 1024, 6)
        given = tiles | types("x x_scales weights order out", "fp16 fp32 fp32 i32 fp16") | {"limit": "fp32"}
        if lanes:
            given |= types("words peaks scales", "i32 u8 fp32")
            constants = shape_of | {"ROUTED": shape == "lanes routed"}
            kernel: Any = expert_up_chunk._expert_up_chunk_lanes_kernel
            return kernel, given, constants, on_hopper, expert_up_chunk.LIMITS["lanes"]
        given |= types("routed shared shared_scales", "i32 i32 fp32")
        options = expert_up_chunk.PLAIN_OPTIONS
        return expert_up_chunk._expert_up_chunk_kernel, given, shape_of, options, expert_up_chunk.LIMITS["plain"]
    if shape == "sum":
        given = types("parts places out", "fp32 i32 fp32") | {"T": "i32"}
        constants = {"HIDDEN": 4096, "CHOICES": 6, "CHOICES_MAX": _chunk_plan.CHOICES_MAX}
        constants |= {"SUMMED": expert_down_chunk.SUMMED}
        return expert_down_chunk._add_kernel, given, constants, {"num_warps": 4}, expert_down_chunk.LIMITS["sum"]
    shape_of = expert_down_chunk.constants(4096, 1024, 6)
    given = tiles | types("inner parts", "fp16 fp32")
    if lanes:
        given |= types("words peaks scales counts", "i32 u8 fp32 i32") | {"total": "i32", "E": "i32"}
        routed = shape == "lanes routed"
        constants = shape_of | expert_down_chunk.lane_constants(expert_down_chunk.TUNING, routed, 256)
        kernel = expert_down_chunk._expert_down_chunk_lanes_kernel
        return kernel, given, constants, on_hopper, expert_down_chunk.LIMITS["lanes"]
    given |= types("routed shared shared_scales", "i32 i32 fp32")
    constants = shape_of | {"N": expert_down_chunk.PLAIN_COLUMNS}
    options = expert_down_chunk.PLAIN_OPTIONS
    return expert_down_chunk._expert_down_chunk_kernel, given, constants, options, expert_down_chunk.LIMITS["plain"]


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
