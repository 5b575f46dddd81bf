"""Attention of each row to its own lists of keys, which are also the values. Twin: `reference.sparse_attention`.

Traffic    reads the rows' keys once for each group of heads, from the L2 where rows share them; writes and reads again
           T·S·H·hd float32 of partial sums: latency-bound
Grid       (S, H / heads, T) for the splits, then (H, T) to add them up
Equality   no program sees two rows; a split is a place in a row's list, and the splits are added in the list's order,
           eight at a time: row i of a step is bitwise the row alone, and hidden keys at a list's end change no bit

The second kernel adds the sink, rotates back, rounds to bfloat16 and leaves the rows as `fp8_rows` reads them.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._dots import dot_bf16, dot_float
from dsv4nb_kernels._kv_records import KV_BLOCK, load_records, require_cache
from dsv4nb_kernels._launch import ROWS_MAX, Limits, require, require_tensor, runs_ptx
from dsv4nb_kernels._rotary import angles_of, require_angles, turn_tail
from dsv4nb_kernels._rounded_rows import RoundedRows, codes_of, require_rows, round_bf16
from dsv4nb_kernels._turns import take_turn

# of the splits over records and over bfloat16 rows, and of their sum
LIMITS = {
    "records": Limits(registers=80, shared_bytes=45 * 1024),
    "rows": Limits(registers=148, shared_bytes=32 * 1024),
    "combine": Limits(registers=234, stack_bytes=8, shared_bytes=1024),
}

_LOWEST = tl.constexpr(-3.0e38)  # stands for the maximum of no keys: finite, so that nothing minus nothing is no NaN
_LOG2_E = tl.constexpr(math.log2(math.e))
_TOGETHER = tl.constexpr(8)  # splits that are added at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the attention is cut; no part of it may depend on the number of rows.

    Attributes:
        keys: places of a list in one split.
        heads: heads of one program.
        warps: of a program of the first and of the second kernel.
        eager: whether a kernel lets the next one start before it has waited itself.
    """

    keys: int = 32
    heads: int = 16
    warps: tuple[int, int] = (4, 2)
    eager: bool = False

    def __str__(self) -> str:
        first, second = self.warps
        return f"{self.keys} keys x {self.heads} heads, {first} and {second} warps" + (", eager" if self.eager else "")


TUNING = Tuning()  # measured on an H200, see kernels/README.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the rows of a step see of one cache.

    Attributes:
        cache: [C, R] uint8 records (`_kv_records`), or [C, hd] bfloat16; both caches of a step are the same.
        places: [T, N] int32, rows of `cache`; a negative place is hidden. N is a multiple of the tuning's keys.
    """

    cache: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """What the splits leave for the second kernel.

    Attributes:
        mixed: [T, S, H, hd] float32, Σ e^(z - top) key; not written for splits without keys.
        tops: [T, S, H] float32, the largest z in units of log 2.
        totals: [T, S, H] float32, Σ e^(z - top); 0 for splits without keys.
    """

    mixed: Tensor
    tops: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, rows: int, splits: int, heads: int, width: int, device: torch.device) -> Partials:
        """Return room for the splits of a step."""
        return cls(
            mixed=torch.empty(rows, splits, heads, width, dtype=torch.float32, device=device),
            tops=torch.empty(rows, splits, heads, dtype=torch.float32, device=device),
            totals=torch.empty(rows, splits, heads, dtype=torch.float32, device=device),
        )


@triton.jit
def _load_keys(
    p_cache, i_place, m_key, WIDTH: tl.constexpr, TAIL: tl.constexpr, RECORDS: tl.constexpr, PTX: tl.constexpr
):
    """Keys by their places, zeros where hidden: a tuple of [KEYS, PART] bfloat16, all asked for before any is used."""
    i_row = i_place.to(tl.int64)
    if RECORDS:
        keys = load_records(p_cache, i_row, m_key, WIDTH, TAIL, PTX)
    else:
        p_keys = p_cache + i_row[:, None] * WIDTH + tl.arange(0, 128)[None, :]
        keys = ()
        for c in tl.static_range(WIDTH // 128):
            keys = keys + (tl.load(p_keys + c * 128, mask=m_key[:, None], other=0.0),)
    return keys


@triton.jit
def _attend_kernel(
    query_ptr,  # [T, H, hd] bfloat16
    window_ptr,  # [Cw, hd] bfloat16, or [Cw, R] uint8 records
    window_places_ptr,  # [T, Nw] int32
    entries_ptr,  # [Ce, hd] or [Ce, R] likewise
    entries_places_ptr,  # [T, Ne] int32
    mixed_ptr,  # [T, S, H, hd] float32
    tops_ptr,  # [T, S, H] float32
    totals_ptr,  # [T, S, H] float32
    scale,  # float
    WINDOW: tl.constexpr,  # splits of the window
    ENTRIES: tl.constexpr,  # splits of the entries
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    RECORDS: tl.constexpr,
    PART: tl.constexpr,  # channels of one product
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_head = tl.program_id(1) * HEADS
    i_row = tl.program_id(2)
    o_head = i_head + tl.arange(0, HEADS)
    o_key = tl.arange(0, KEYS)
    o_d = tl.arange(0, PART)
    p_places = window_places_ptr + (i_row * WINDOW + i_split) * KEYS
    p_cache = window_ptr
    if i_split >= WINDOW:
        p_places = entries_places_ptr + (i_row * ENTRIES + i_split - WINDOW) * KEYS
        p_cache = entries_ptr
    p_query = query_ptr + (i_row * H + o_head[:, None]) * WIDTH + o_d[None, :]
    take_turn(DEPENDENT, EAGER)
    query = ()
    for c in tl.static_range(WIDTH // PART):
        query = query + (tl.load(p_query + c * PART),)
    i_place = tl.load(p_places + o_key)
    m_key = i_place >= 0
    o_part = (i_row * (WINDOW + ENTRIES) + i_split) * H + o_head
    if tl.max(i_place, axis=0) >= 0:
        keys = _load_keys(p_cache, i_place, m_key, WIDTH, TAIL, RECORDS, TENSOR_CORES)
        b_z = tl.zeros([HEADS, KEYS], tl.float32)
        for c in tl.static_range(WIDTH // PART):
            b_z = dot_bf16(query[c], tl.trans(keys[c]), b_z, TENSOR_CORES)
        b_z = tl.where(m_key[None, :], b_z * (scale * _LOG2_E), float("-inf"))
        b_top = tl.max(b_z, axis=1)
        b_raised = tl.exp2(b_z - b_top[:, None])
        tl.store(tops_ptr + o_part, b_top)
        tl.store(totals_ptr + o_part, tl.sum(b_raised, axis=1))
        p_mixed = mixed_ptr + o_part.to(tl.int64)[:, None] * WIDTH + o_d[None, :]
        for c in tl.static_range(WIDTH // PART):
            b_mixed = dot_float(b_raised, keys[c], tl.zeros([HEADS, PART], tl.float32), TENSOR_CORES)
            tl.store(p_mixed + c * PART, b_mixed)
    else:
        tl.store(tops_ptr + o_part, tl.full([HEADS], _LOWEST, tl.float32))
        tl.store(totals_ptr + o_part, tl.zeros([HEADS], tl.float32))


@triton.jit
def _combine_kernel(
    mixed_ptr,  # [T, S, H, hd] float32
    tops_ptr,  # [T, S, H] float32
    totals_ptr,  # [T, S, H] float32
    sink_ptr,  # [H] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    codes_ptr,  # [T, H · hd] float16
    scales_ptr,  # [H · hd / 128, 8] float32
    S: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_row = tl.program_id(1)
    o_d = tl.arange(0, WIDTH)
    o_split = tl.arange(0, triton.next_power_of_2(S))
    o_eight = tl.arange(0, _TOGETHER)
    sink = tl.load(sink_ptr + i_head) * _LOG2_E
    p_tops = tops_ptr + i_row * S * H + i_head
    p_totals = totals_ptr + i_row * S * H + i_head
    p_mixed = mixed_ptr + (i_row * S * H + i_head).to(tl.int64) * WIDTH
    take_turn(DEPENDENT, EAGER)
    b_cos, b_sin = angles_of(cos_ptr + i_row * TAIL, sin_ptr + i_row * TAIL, WIDTH, TAIL)
    b_mixed = tl.zeros([WIDTH], tl.float32)
    total = 0.0
    if S <= 3 * _TOGETHER:
        parts = ()  # as many as registers hold
        for i in tl.static_range((S + _TOGETHER - 1) // _TOGETHER):
            o_part = i * _TOGETHER + o_eight
            # of splits without keys too, where anything may stand: else they would wait until the totals are there
            p_part = p_mixed + o_part[:, None] * (H * WIDTH) + o_d[None, :]
            parts = parts + (tl.load(p_part, mask=(o_part < S)[:, None], other=0.0),)
        tl.debug_barrier()  # the compiler would ask for them behind the largest
        top = tl.max(tl.load(p_tops + o_split * H, mask=o_split < S, other=_LOWEST), axis=0)
        for i in tl.static_range((S + _TOGETHER - 1) // _TOGETHER):
            o_part = i * _TOGETHER + o_eight
            b_total = tl.load(p_totals + o_part * H, mask=o_part < S, other=0.0)
            b_share = tl.exp2(tl.load(p_tops + o_part * H, mask=o_part < S, other=_LOWEST) - top)
            b_mixed += tl.sum(tl.where((b_total > 0)[:, None], parts[i], 0.0) * b_share[:, None], axis=0)
            total += tl.sum(b_total * b_share, axis=0)
    else:
        top = tl.max(tl.load(p_tops + o_split * H, mask=o_split < S, other=_LOWEST), axis=0)
        for i in range((S + _TOGETHER - 1) // _TOGETHER):
            o_part = i * _TOGETHER + o_eight
            b_total = tl.load(p_totals + o_part * H, mask=o_part < S, other=0.0)
            b_share = tl.exp2(tl.load(p_tops + o_part * H, mask=o_part < S, other=_LOWEST) - top)
            p_part = p_mixed + o_part[:, None] * (H * WIDTH) + o_d[None, :]
            b_parts = tl.load(p_part, mask=(b_total > 0)[:, None], other=0.0)
            b_mixed += tl.sum(b_parts * b_share[:, None], axis=0)
            total += tl.sum(b_total * b_share, axis=0)
    # a row without keys has nothing to divide, and its sink may be far above the lowest maximum
    total += tl.exp2(tl.minimum(sink - top, 126.0))
    b_out = turn_tail(b_mixed / total, b_cos, b_sin, WIDTH, TAIL)
    b_out = tl.reshape(round_bf16(b_out), [WIDTH // 128, 128])
    b_codes, s_out = codes_of(b_out, False)
    o_block = i_head * (WIDTH // 128) + tl.arange(0, WIDTH // 128)
    o_code = o_block[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(codes_ptr + i_row * (H * WIDTH) + o_code, b_codes)
    tl.store(scales_ptr + o_block * 8 + i_row, s_out)


def sparse_attention(
    query: Tensor,
    window: Keys,
    entries: Keys | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    partials: Partials | None = None,
    out: RoundedRows | None = None,
    dependent: bool = False,
) -> RoundedRows:
    """Attend, rotate back and round to bfloat16.

    Args:
        query: [T, H, hd] bfloat16, T from 1 to 8, normalised and rotated; hd a multiple of 128.
        window, entries: the keys of each row, those of `window` first in the order of summation.
        sink: [H] float32; it takes part in the denominator only.
        cos, sin: [T, rd] float32, the angles back: each stands twice, the sine of an even element negated.
        scale: factor of query · key.
        partials: room between the two kernels, for graph capture; allocated when None.
        out: [T, H · hd] destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `query` has ended, and wait for it inside.

    Returns:
        [T, H · hd] for `fp8_rows`; its values are the bfloat16 results. Zeros for a row with every key hidden.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(
        query, window, entries, sink, cos, sin, TUNING, scale=scale, partials=partials, out=out, dependent=dependent
    )


def launch(
    query: Tensor,
    window: Keys,
    entries: Keys | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    cut: Tuning,
    *,
    scale: float,
    partials: Partials | None = None,
    out: RoundedRows | None = None,
    dependent: bool = False,
    tensor_cores: bool | None = None,
) -> RoundedRows:
    """`sparse_attention` with another cut or form: for benches and tests."""
    require(query.ndim == 3, "query must be [T, H, hd]", tuple(query.shape))
    rows, heads, width = query.shape
    device = query.device
    require(1 <= rows <= ROWS_MAX, f"query must have 1 to {ROWS_MAX} rows", rows)
    require(heads > 0 and heads % cut.heads == 0, f"query must have a multiple of {cut.heads} heads", heads)
    require(width in (128, 256, 512), "query must be 128, 256 or 512 wide", width)
    require_tensor(query, "query", (rows, heads, width), torch.bfloat16)
    require_tensor(sink, "sink", (heads,), torch.float32, device)
    tail = require_angles(cos, sin, rows, width, device)
    records = window.cache.dtype == torch.uint8
    form = rows, width, tail, records
    window_splits = _require_keys(window, "window", *form, cut, device)
    entries_splits = 0 if entries is None else _require_keys(entries, "entries", *form, cut, device)
    splits = window_splits + entries_splits
    if partials is None:
        partials = Partials.empty(rows, splits, heads, width, device)
    require_tensor(partials.mixed, "mixed", (rows, splits, heads, width), torch.float32, device)
    require_tensor(partials.tops, "tops", (rows, splits, heads), torch.float32, device)
    require_tensor(partials.totals, "totals", (rows, splits, heads), torch.float32, device)
    if out is None:
        out = RoundedRows.empty(rows, heads * width, device)
    require_rows(out, rows, heads * width, device)
    is_ptx = runs_ptx(device)
    by_cores = is_ptx if tensor_cores is None else tensor_cores
    seen = window if entries is None else entries
    _direct.call(
        _attend_kernel, (splits, heads // cut.heads, rows),
        query, window.cache, window.places, seen.cache, seen.places, partials.mixed, partials.tops, partials.totals,
        scale,
        **attend_constants(
            cut, window_splits, entries_splits, heads, width, tail, records, dependent and is_ptx, by_cores
        ),
        **({"num_warps": cut.warps[0], "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    _direct.call(
        _combine_kernel, (heads, rows),
        partials.mixed, partials.tops, partials.totals, sink, cos, sin, out.codes, out.scales,
        **combine_constants(cut, splits, heads, width, tail, dependent and is_ptx),
        **({"num_warps": cut.warps[1], "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def attend_constants(
    cut: Tuning,
    window_splits: int,
    entries_splits: int,
    heads: int,
    width: int,
    tail: int,
    records: bool,
    dependent: bool = True,
    tensor_cores: bool = True,
) -> dict[str, int | bool]:
    """Return the first kernel's compile-time arguments."""
    return {
        "WINDOW": window_splits,
        "ENTRIES": entries_splits,
        "H": heads,
        "WIDTH": width,
        "TAIL": tail,
        "RECORDS": records,
        "PART": KV_BLOCK if records else 128,
        "KEYS": cut.keys,
        "HEADS": cut.heads,
        "TENSOR_CORES": tensor_cores,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }


def combine_constants(
    cut: Tuning, splits: int, heads: int, width: int, tail: int, dependent: bool = True
) -> dict[str, int | bool]:
    """Return the second kernel's compile-time arguments."""
    return {"S": splits, "H": heads, "WIDTH": width, "TAIL": tail, "DEPENDENT": dependent, "EAGER": cut.eager}


def _require_keys(
    keys: Keys, name: str, rows: int, width: int, tail: int, records: bool, cut: Tuning, device: torch.device
) -> int:
    """Refuse keys that the kernel would misread; return their splits."""
    require(keys.places.ndim == 2, f"{name}.places must be [T, N]", tuple(keys.places.shape))
    count = keys.places.shape[1]
    require(count > 0 and count % cut.keys == 0, f"{name}.places must have a multiple of {cut.keys} columns", count)
    require_tensor(keys.places, f"{name}.places", (rows, count), torch.int32, device)
    require_cache(keys.cache, f"{name}.cache", width, tail, records, device)
    return count // cut.keys
