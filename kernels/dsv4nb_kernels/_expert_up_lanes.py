"""One tile of the upper halves, eight gate rows and the same eight up rows: chains over a warp's blocks, and SwiGLU."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4nb_kernels._fp4 import (
    add_fp4_unit,
    add_fp4_unit_plainly,
    add_fp8_unit,
    add_fp8_unit_plainly,
    held_back,
)
from dsv4nb_kernels._lanes import KEEP, STREAM, after_loads, load_lanes
from dsv4nb_kernels._reduce import no_chains


@triton.jit
def routed_by_lanes(
    p_w,
    p_x,
    o_g,
    o_t,
    zero,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A lane's chains over its warp's blocks, every WARPS-th of D.

    `p_w`, `p_x`: the lane's first 16 bytes of each; COLUMNS: of the product; ROWS: in a unit of the activations.
    """
    X_BLOCK: tl.constexpr = 512 * ROWS * WARPS
    X_STRIDE: tl.constexpr = 512 * ROWS // COLUMNS
    EARLY: tl.constexpr = DEPTH if DEPTH < BLOCKS else BLOCKS
    acc = no_chains(32 * WARPS, COLUMNS)
    p_s = p_w + (2048 - o_g * 48 - o_t * 16)  # 16 g behind the codes
    w = ()
    s = ()
    for i in tl.static_range(EARLY):
        w = w + load_lanes(p_w + i * (2176 * WARPS), 4, 512, STREAM)
        s = s + load_lanes(p_s + i * (2176 * WARPS), 1, 16, STREAM)
    if COLUMNS == 1:
        x = load_lanes(p_x, BLOCKS, X_BLOCK, KEEP)
    for i in tl.static_range(BLOCKS):
        if COLUMNS > 1:
            x = load_lanes(p_x + i * X_BLOCK, COLUMNS, X_STRIDE, KEEP)
        if i + EARLY < BLOCKS:
            w = w + load_lanes(p_w + (i + EARLY) * (2176 * WARPS), 4, 512, STREAM)
            s = s + load_lanes(p_s + (i + EARLY) * (2176 * WARPS), 1, 16, STREAM)
        p_w = after_loads(p_w)
        for u in tl.static_range(8):
            acc = add_fp4_unit(acc, w, s, x[4 * i if COLUMNS == 1 else 0 :], o_t, u, COLUMNS)
        if i + 1 < BLOCKS:
            p_w = held_back(p_w, acc[2 * COLUMNS - 1], zero)
            p_s = held_back(p_s, acc[2 * COLUMNS - 1], zero)
            p_x = held_back(p_x, acc[2 * COLUMNS - 1], zero)
            w = w[16:]
            s = s[4:]
    return acc


@triton.jit
def shared_by_lanes(
    p_w,
    p_s,
    p_x,
    o_t,
    zero,
    UP: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OLDER: tl.constexpr,
):
    """The same for the shared expert, half a block at a time. `p_s`: the gate's scales; the up's lie UP further."""
    # a program that starts early may share a processor with older ones: its rows must not come from their L1
    CACHE: tl.constexpr = ".cg" if OLDER else KEEP
    acc = no_chains(32 * WARPS, COLUMNS)
    w = load_lanes(p_w, 4, 512, STREAM)
    if DEPENDENT and not OLDER:
        gdc_wait()
        gdc_launch_dependents()
    if COLUMNS == 1:
        x = load_lanes(p_x, BLOCKS, 512 * WARPS, CACHE)
    for i in tl.static_range(2 * BLOCKS):
        if COLUMNS > 1:
            x = load_lanes(p_x + (i // 2 * WARPS * 2 + i % 2) * (256 * COLUMNS), COLUMNS // 2, 512, CACHE)
        if i + 1 < 2 * BLOCKS:
            w_next = load_lanes(p_w + ((i + 1) // 2 * WARPS * 2 + (i + 1) % 2) * 2048, 4, 512, STREAM)
        p_w = after_loads(p_w)
        b_gate = tl.load(p_s + (i // 2 * WARPS * 2 + i % 2)).to(tl.int32, bitcast=True)
        b_up = tl.load(p_s + (UP + i // 2 * WARPS * 2 + i % 2)).to(tl.int32, bitcast=True)
        for u in tl.static_range(4):
            x_half = x[i // 2 * 4 if COLUMNS == 1 else 0 :]
            acc = add_fp8_unit(acc, w, b_gate, b_up, x_half, o_t, i % 2 * 4 + u, COLUMNS)
        if i + 1 < 2 * BLOCKS:
            p_w = held_back(p_w, acc[2 * COLUMNS - 1], zero)
            p_x = held_back(p_x, acc[2 * COLUMNS - 1], zero)
            w = w_next
    if DEPENDENT and OLDER:  # before the lines are written: an earlier layer may still read its own there
        gdc_wait()
        gdc_launch_dependents()
    return acc


@triton.jit
def routed_plainly(p_w, p_even, p_odd, o_g, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """The same without PTX. `p_w`: uint8 pointers to the warp's first block; STRIDE: from unit to unit of a row."""
    acc = no_chains(32 * WARPS, 8)
    for i in range(BLOCKS):
        p_codes = p_w + i * (WARPS * 2176) + o_g * 64
        p_scales = p_w + i * (WARPS * 2176) + 2048 + o_g * 16
        for u in tl.static_range(8):
            o_x = (i * WARPS * 8 + u) * STRIDE
            acc = add_fp4_unit_plainly(acc, p_codes, p_scales, p_even + o_x, p_odd + o_x, u)
    return acc


@triton.jit
def shared_plainly(
    p_w, p_s, p_even, p_odd, o_g, UP: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr
):
    acc = no_chains(32 * WARPS, 8)
    for i in range(BLOCKS):
        p_codes = p_w + i * (WARPS * 4096) + o_g * 64
        for u in tl.static_range(8):
            o_x = (i * WARPS * 8 + u) * STRIDE
            p_scale = p_s + i * (WARPS * 2) + u // 4
            s_gate = tl.load(p_scale)
            s_up = tl.load(p_scale + UP)
            acc = add_fp8_unit_plainly(acc, p_codes, s_gate, s_up, p_even + o_x, p_odd + o_x, u)
    return acc


@triton.jit
def swiglu(b_gate, b_up, limit):
    b_gate = tl.minimum(b_gate, limit)
    b_exp = tl.exp(-tl.abs(b_gate))  # never overflows
    b_silu = tl.where(b_gate < 0.0, b_gate * b_exp, b_gate) / (1.0 + b_exp)
    return b_silu * tl.minimum(tl.maximum(b_up, -limit), limit)
