"""The experts' down projections of a chunk and their sum. Twin: `reference.expert_down_chunk`, act_fp8=True.

Arithmetic T·(K+1)·I·D products of the tensor cores in float16; each product of a row and an expert is written and read
           once more, T·(K+1)·D float32, because rows of one expert are anywhere among those of another
Grid       D/256 products for each 64 rows of the shared expert, and for each tile of the plan: on Hopper one program a
           multiprocessor takes them in turn, so that copies of the next run on while one is stored; elsewhere a
           program each. Then (T, D/1024) that add up
Equality   the shared expert, then the chosen ones by ascending id, as in `expert_down`. A row's result does not depend
           on the rows beside it, but the order of the sums along I is not that of `expert_down`: 128 k at a time by the
           tensor cores, from zero, and those sums in ascending order in float32

The weights are those of `expert_down`, in the same packing; on Hopper they are decoded in registers (`_chunk_lanes`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4nb_kernels import _chunk_lanes, _direct
from dsv4nb_kernels._chunk_lanes import (
    COLUMNS,
    COPIED_ROWS,
    FIRST,
    OTHER_REGISTERS,
    OTHER_WARPS,
    ROWS,
    SECOND,
    STAGES,
    copy,
    first_scales,
    fp4_peaks,
    fp4_scales,
    multiply_from,
    ring,
    row_pointers,
    words_of,
)
from dsv4nb_kernels._chunk_plain import fp4_sum, fp8_sum
from dsv4nb_kernels._chunk_plan import CHOICES_MAX, Plan, require_peaks, require_plan
from dsv4nb_kernels._chunk_plan import ROWS as TILE_ROWS
from dsv4nb_kernels._expert_rows import INNER_SCALE
from dsv4nb_kernels._expert_weights import DownWeights
from dsv4nb_kernels._fp4 import BLOCK, TILE, WORDS
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, cdiv, power_of_two, require, require_tensor, runs_wgmma

SUMMED = 1024  # columns of a program that adds up
PLAIN_COLUMNS = 128
PLAIN_OPTIONS = {"num_warps": 8, "num_stages": 1}
LIMITS = {
    "lanes": Limits(registers=168, stack_bytes=8, shared_bytes=196808),
    "plain": Limits(registers=196, shared_bytes=16384),
    "sum": Limits(registers=44),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the product is cut on Hopper.

    Attributes:
        rows: tiles of 128 rows of the matrix in one program.
    """

    rows: int = 2

    def __str__(self) -> str:
        return f"{128 * self.rows} x 64"


TUNING = Tuning()


@gluon.jit
def _tile(ends_ptr, tile_experts_ptr, tile_places_ptr, T, i_m, CHOICES: gl.constexpr, ROUTED: gl.constexpr):
    """The expert of a program's lines, the first of them and the one after the last."""
    if ROUTED:
        i_expert = gl.load(tile_experts_ptr + i_m)
        return i_expert, gl.load(tile_places_ptr + i_m), gl.load(ends_ptr + gl.maximum(i_expert, 0))
    else:
        return 0, T * CHOICES + i_m * 64, T * (CHOICES + 1)


@gluon.jit
def _copy_part(
    words_ptr, inner_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, total, words_shared, rows_shared, full, empty,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, CHOICES: gl.constexpr, R: gl.constexpr, ROUTED: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = HIDDEN // (128 * R)
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        i_expert, first, end = _tile(ends_ptr, tile_experts_ptr, tile_places_ptr, T, i // TILES, CHOICES, ROUTED)
        i_tile = i_expert * (HIDDEN // 16) + i % TILES * (8 * R)
        o_line = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, COPIED_ROWS)), end - 1)
        p_w = words_of(words_ptr, i_tile, INNER, R, ROUTED)
        copy(p_w, row_pointers(inner_ptr, o_line, INNER), words_shared, rows_shared, full, empty, INNER // 128, ROUTED)


@gluon.jit
def _begin(
    words_ptr, peaks_ptr, scales_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, i,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, CHOICES: gl.constexpr, R: gl.constexpr, ROUTED: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """What a product begins with: its lines, its scales and, of FP4, peaks and the scales of its rows."""
    TILES: gl.constexpr = HIDDEN // (128 * R)
    i_n = i % TILES
    i_expert, first, end = _tile(ends_ptr, tile_experts_ptr, tile_places_ptr, T, i // TILES, CHOICES, ROUTED)
    i_tile = i_expert * (HIDDEN // 16) + i_n * (8 * R)
    if ROUTED:
        p_s = fp4_scales(words_ptr, i_tile + PART * (4 * R), INNER, R)
        s, s_next = first_scales(p_s, R, True)
        b_peaks, s_w = fp4_peaks(peaks_ptr, i_tile + PART * (4 * R), R)
    else:
        o_row = gl.arange(0, 64, ROWS)
        p_s = ()
        for r in gl.static_range(R):
            i_block = (i_n * (2 * R) + PART * R + r) // 2
            p_s = p_s + (scales_ptr + i_block * (INNER // 128) + o_row * 0,)
        s, s_next = first_scales(p_s, R, False)
        b_peaks = s
        s_w = s
    return first, end, p_s, s, s_next, b_peaks, s_w


@gluon.jit
def _product_part(
    words_ptr, peaks_ptr, scales_ptr, parts_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, total,
    words_shared, rows_shared, full, empty,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, CHOICES: gl.constexpr, R: gl.constexpr, ROUTED: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = HIDDEN // (128 * R)
    o_row = gl.arange(0, 64, ROWS)
    o_place = gl.arange(0, 64, COLUMNS)
    i_first = gl.minimum(gl.program_id(0), total - 1)
    first, end, p_s, s, s_next, b_peaks, s_w = _begin(
        words_ptr, peaks_ptr, scales_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, i_first,
        HIDDEN, INNER, CHOICES, R, ROUTED, PART,
    )  # fmt: skip
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        acc = multiply_from(
            p_s, s, s_next, b_peaks, words_shared, rows_shared, full, empty, INNER // 128, PART, R, 1, ROUTED
        )
        o_line = first + o_place
        p_out = parts_ptr + gl.expand_dims(o_line.to(gl.int64) * HIDDEN, 0)
        p_out += gl.expand_dims(i % TILES * (128 * R) + PART * (64 * R) + o_row, 1)
        m_line = gl.expand_dims(o_line < end, 0)
        s_old = s_w
        # what the next product begins with is on its way while this one is stored
        i_next = gl.minimum(i + gl.num_programs(0), total - 1)
        first, end, p_s, s, s_next, b_peaks, s_w = _begin(
            words_ptr, peaks_ptr, scales_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, i_next,
            HIDDEN, INNER, CHOICES, R, ROUTED, PART,
        )  # fmt: skip
        for r in gl.static_range(R):
            if ROUTED:
                gl.store(p_out + r * 64, acc[r] * gl.expand_dims(s_old[r] * INNER_SCALE, 1), mask=m_line)
            else:
                gl.store(p_out + r * 64, acc[r] * INNER_SCALE, mask=m_line)


@gluon.jit(do_not_specialize=["T", "total", "E"])
def _expert_down_chunk_lanes_kernel(
    words_ptr,  # [E, D/16, I/256, 544] int32, or [D/16 · I · 4] of the shared expert
    peaks_ptr,  # [E, D] uint8
    scales_ptr,  # [D/128, I/128] float32, of the shared expert
    inner_ptr,  # [T·(K+1), I] float16
    ends_ptr,  # [E] int32
    tile_experts_ptr,  # [M] int32
    tile_places_ptr,  # [M] int32
    parts_ptr,  # [T·(K+1), D] float32
    T,  # int, 1 … 4096
    counts_ptr,  # [E] int32
    total,  # int, products of the shared expert: tiles of 64 rows times D / 128R
    E,  # int
    HIDDEN: gl.constexpr,
    INNER: gl.constexpr,
    CHOICES: gl.constexpr,
    R: gl.constexpr,
    ROUTED: gl.constexpr,
    EXPERTS: gl.constexpr,  # E or more: a power of two, at least 128
):
    if ROUTED:
        o_expert = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 128], [32], [4], [0]))
        b_counts = gl.load(counts_ptr + o_expert, mask=o_expert < E, other=0)
        total = gl.sum((b_counts + 63) // 64, axis=0) * (HIDDEN // (128 * R))
    words_shared, rows_shared, full, empty = ring(R, 1, ROUTED)
    gl.warp_specialize(
        [
            (
                _product_part,
                (
                    words_ptr, peaks_ptr, scales_ptr, parts_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, total,
                    words_shared, rows_shared, full, empty, HIDDEN, INNER, CHOICES, R, ROUTED, FIRST,
                ),
            ),
            (
                _product_part,
                (
                    words_ptr, peaks_ptr, scales_ptr, parts_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, total,
                    words_shared, rows_shared, full, empty, HIDDEN, INNER, CHOICES, R, ROUTED, SECOND,
                ),
            ),
            (
                _copy_part,
                (
                    words_ptr, inner_ptr, ends_ptr, tile_experts_ptr, tile_places_ptr, T, total,
                    words_shared, rows_shared, full, empty, HIDDEN, INNER, CHOICES, R, ROUTED,
                ),
            ),
        ],
        OTHER_WARPS,
        OTHER_REGISTERS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _expert_down_chunk_kernel(
    routed_ptr,
    shared_ptr,
    shared_scales_ptr,
    inner_ptr,
    ends_ptr,
    tile_experts_ptr,
    tile_places_ptr,
    parts_ptr,
    T,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    N: tl.constexpr,
):
    TILES: tl.constexpr = HIDDEN // N
    i_n = tl.program_id(0) % TILES
    i_m = tl.program_id(0) // TILES
    shared_tiles = (T + 63) // 64
    is_shared = i_m < shared_tiles
    i_tile = tl.maximum(i_m - shared_tiles, 0)
    i_expert = tl.load(tile_experts_ptr + i_tile)
    if is_shared | (i_expert >= 0):
        first = tl.where(is_shared, T * CHOICES + i_m * 64, tl.load(tile_places_ptr + i_tile))
        end = tl.where(is_shared, T * (CHOICES + 1), tl.load(ends_ptr + tl.maximum(i_expert, 0)))
        o_line = first + tl.arange(0, 64)
        p_x = inner_ptr + tl.minimum(o_line, end - 1).to(tl.int64) * INNER
        o_n = i_n * N + tl.arange(0, N)
        if is_shared:
            p_s = shared_scales_ptr + o_n // 128 * (INNER // 128)
            acc = fp8_sum(shared_ptr, o_n, p_s, p_x, INNER)
        else:
            p_expert = routed_ptr + i_expert.to(tl.int64) * (HIDDEN // 16 * (INNER // 256) * 544)
            acc = fp4_sum(p_expert, o_n, p_x, INNER)
        p_out = parts_ptr + o_line.to(tl.int64)[None, :] * HIDDEN + o_n[:, None]
        tl.store(p_out, acc * INNER_SCALE, mask=(o_line < end)[None, :])


@triton.jit(do_not_specialize=["T"])
def _add_kernel(
    parts_ptr,  # [T·(K+1), D] float32
    places_ptr,  # [T·K] int32
    out_ptr,  # [T, D] float32
    T,  # int
    HIDDEN: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICES_MAX: tl.constexpr,
    SUMMED: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_d = tl.program_id(1) * SUMMED + tl.arange(0, SUMMED)
    m_d = o_d < HIDDEN
    o_choice = tl.arange(0, CHOICES_MAX)
    NEVER: tl.constexpr = 0x7FFFFFFF
    b_places = tl.load(places_ptr + i_row * CHOICES + o_choice, mask=o_choice < CHOICES, other=NEVER)
    acc = tl.load(parts_ptr + (T * CHOICES + i_row).to(tl.int64) * HIDDEN + o_d, mask=m_d, other=0.0)
    place = -1
    for _ in tl.static_range(CHOICES):
        # places ascend as the experts do
        place = tl.min(tl.where(b_places > place, b_places, NEVER), axis=0)
        acc += tl.load(parts_ptr + place.to(tl.int64) * HIDDEN + o_d, mask=m_d, other=0.0)
    tl.store(out_ptr + i_row.to(tl.int64) * HIDDEN + o_d, acc, mask=m_d)


def expert_down_chunk(
    inner: Tensor,
    plan: Plan,
    down: DownWeights,
    peaks: Tensor,
    *,
    rows: int,
    parts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the lower halves of the chosen experts and of the shared one, and add them up for each row of a chunk.

    Args:
        inner: [T · (K+1), I] float16 from `expert_up_chunk`.
        plan: as given to `expert_up_chunk`.
        down: as `expert_down` takes them, D a multiple of 256 and I of 256.
        peaks: `row_peaks(down.routed)`.
        rows: T, from 1 to 4096.
        parts: [T · (K+1), D] float32, room for each choice's product, for graph capture; allocated when None.
        out: [T, D] float32 destination, for graph capture; allocated when None.

    Returns:
        [T, D] float32.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(inner, plan, down, peaks, TUNING, rows=rows, parts=parts, out=out)


def launch(
    inner: Tensor,
    plan: Plan,
    down: DownWeights,
    peaks: Tensor,
    cut: Tuning,
    *,
    rows: int,
    parts: Tensor | None = None,
    out: Tensor | None = None,
    lanes: bool | None = None,
) -> Tensor:
    """`expert_down_chunk` with another cut or form: for benches and tests."""
    hidden, width, device = down.hidden, down.inner, down.routed.device
    experts = down.routed.shape[0]
    require(1 <= rows <= CHUNK_ROWS_MAX, f"rows must be 1 to {CHUNK_ROWS_MAX}", rows)
    choices = plan.order.shape[0] // rows
    require(1 <= choices <= CHOICES_MAX, f"plan must hold 1 to {CHOICES_MAX} choices a row", choices)
    require_plan(plan, rows, choices, experts, device)
    lines = rows * (choices + 1)
    require_tensor(inner, "inner", (lines, width), torch.float16, device)
    whole = 128 * cut.rows
    require(hidden % whole == 0 and hidden > 0, f"D must be a multiple of {whole}", hidden)
    require(width % BLOCK == 0 and width > 0, f"I must be a multiple of {BLOCK}", width)
    tiles = (hidden // TILE, width // BLOCK, WORDS)
    require_tensor(down.routed, "routed", (experts, *tiles), torch.int32, device)
    require_tensor(down.shared.words, "shared", (hidden * width // 4,), torch.int32, device)
    require_peaks(peaks, experts, hidden, device)
    if parts is None:
        parts = torch.empty(lines, hidden, dtype=torch.float32, device=device)
    require_tensor(parts, "parts", (lines, hidden), torch.float32, device)
    if out is None:
        out = torch.empty(rows, hidden, dtype=torch.float32, device=device)
    require_tensor(out, "out", (rows, hidden), torch.float32, device)
    shape = constants(hidden, width, choices)
    of_rows, of_plan = cdiv(rows, TILE_ROWS), plan.tile_experts.shape[0]
    lines_of = (inner, plan.ends, plan.tile_experts, plan.tile_places, parts, rows)
    if runs_wgmma(device) if lanes is None else lanes:
        for words, tiles_of_rows, routed in ((down.shared.words, of_rows, False), (down.routed, of_plan, True)):
            total = hidden // whole * tiles_of_rows
            _direct.call(
                _expert_down_chunk_lanes_kernel, (programs(total, width, device),),
                words, peaks, down.shared.scales, *lines_of, plan.counts, total, experts,
                **shape, **lane_constants(cut, routed, experts), num_warps=_chunk_lanes.WARPS,
            )  # fmt: skip
    else:
        _direct.call(
            _expert_down_chunk_kernel, (hidden // PLAIN_COLUMNS * (of_rows + of_plan),),
            down.routed, down.shared.words, down.shared.scales, *lines_of,
            **shape, N=PLAIN_COLUMNS, **PLAIN_OPTIONS,
        )  # fmt: skip
    add_parts(parts, plan, out)
    return out


def add_parts(parts: Tensor, plan: Plan, out: Tensor) -> None:
    """Add up the products of each row: `parts` [T · (K+1), D] float32 in the plan's order, `out` [T, D]."""
    rows, hidden = out.shape
    _direct.call(
        _add_kernel, (rows, cdiv(hidden, SUMMED)),
        parts, plan.places, out, rows,
        HIDDEN=hidden, CHOICES=parts.shape[0] // rows - 1, CHOICES_MAX=CHOICES_MAX, SUMMED=SUMMED,
    )  # fmt: skip


def programs(total: int, inner: int, device: torch.device) -> int:
    """Return how many programs take `total` products on Hopper.

    One a multiprocessor, which stays for all of its products. Their ring must then stand at its start after each:
    for other widths than multiples of 1024 a program has one product.
    """
    if inner % (2 * STAGES.value * 128):
        return total
    return min(total, torch.cuda.get_device_properties(device).multi_processor_count)


def lane_constants(cut: Tuning, routed: bool, experts: int) -> dict[str, int]:
    """Return the compile-time arguments that only the form for Hopper has."""
    return {"R": cut.rows, "ROUTED": routed, "EXPERTS": max(128, power_of_two(experts))}


def constants(hidden: int, inner: int, choices: int) -> dict[str, int]:
    """Return the compile-time arguments that both forms of the kernel have."""
    return {"HIDDEN": hidden, "INNER": inner, "CHOICES": choices}
