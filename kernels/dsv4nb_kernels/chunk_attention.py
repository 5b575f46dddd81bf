"""Attention of the rows of a prompt's chunk to their window and entries. Twin: `reference.chunk_attention`.

Work       of each row and head 4·hd operations a key, and 2·hd more, since probabilities come in two bfloat16 halves:
           bound by the tensor cores, and nearly so by the L2, from which each program gathers its own row's keys
Grid       (H / heads, T), the rows with most keys first
Equality   no program sees two rows, and what it adds up, in which order, follows from the row's position and list
           alone: on one kind of GPU a row has the same bits in every chunk. They are not those of `sparse_attention`,
           which adds in other blocks

Keys stand in the rows of the products, heads in the columns, so that 32 heads waste nothing of an instruction of 64
rows; the sums of a program, [hd, heads], take half of its registers. A tile of more rows would share keys, of the
window and of entries that all rows see; but it had to hold the sums of more rows, and there is no room for them.

On Hopper the products are `_chunk_attention_lanes`; the plain form here serves other GPUs and the interpreter.
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

from dsv4nb_kernels import _chunk_attention_lanes as lanes_form
from dsv4nb_kernels import _direct
from dsv4nb_kernels._dots import dot_bf16
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, require, require_few, require_tensor, runs_ptx, runs_wgmma
from dsv4nb_kernels._rotary import require_angles
from dsv4nb_kernels._rounded_rows import round_bf16

# of the plain form, and of that for Hopper
LIMITS = {
    "plain": Limits(registers=255, shared_bytes=64 * 1024),
    "lanes": Limits(registers=255, shared_bytes=106 * 1024),
}

_LOWEST = tl.constexpr(-3.0e38)  # stands for the maximum of no keys: finite, so that nothing minus nothing is no NaN
_LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the plain form is cut; no part of it may depend on the number of rows.

    Attributes:
        keys: of one product.
        heads: heads of one program.
        part: channels of one product.
        warps: of one program.
        stages: tiles of keys that are there or on their way at a time.
    """

    keys: int = 32
    heads: int = 16
    part: int = 128
    warps: int = 4
    stages: int = 2

    def __str__(self) -> str:
        first = f"{self.keys} keys x {self.heads} heads in {self.part} channels"
        return f"{first}, {self.warps} warps, {self.stages} stages"


HEADS, KEYS = lanes_form.HEADS, lanes_form.KEYS
LANES = Tuning(keys=KEYS, heads=HEADS, part=lanes_form.PART, warps=lanes_form.WARPS, stages=1)
PLAIN = Tuning()  # fits every GPU that the engine knows; not measured on those that run it


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The last keys that each row sees, its own among them.

    Attributes:
        ring: [C, hd] bfloat16, the key of position p in row p mod C; C at least T + width - 1, so that the keys of a
            chunk do not push out what its first rows see.
        width: how many keys a row sees, a multiple of 64.
    """

    ring: Tensor
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Compressed entries, of which a row at position p sees the first (p + 1) / ratio.

    Attributes:
        cache: [E, hd] bfloat16; as many as the last row sees.
        ratio: positions of an entry.
        places: [T, N] int32, what each row chose, as `top_entries` leaves it: of a row that sees v entries the first
            min(v, N) places count, a negative one among them is hidden; N a multiple of 64. None: a row attends to all
            that it sees.
    """

    cache: Tensor
    ratio: int
    places: Tensor | None = None


@triton.jit
def _add_keys(b_keys, b_raised, acc, TENSOR_CORES: tl.constexpr):
    """acc + keys transposed · probabilities, of which 16 bits take part, in two products."""
    if TENSOR_CORES:
        b_high = b_raised.to(tl.bfloat16)
        acc = tl.dot(tl.trans(b_keys), (b_raised - b_high.to(tl.float32)).to(tl.bfloat16), acc)
        return tl.dot(tl.trans(b_keys), b_high, acc)
    else:
        return tl.dot(tl.trans(b_keys).to(tl.float32), b_raised, acc, input_precision="ieee")


@triton.jit
def _chunk_attention_kernel(
    query_ptr,  # [T, H, hd] bfloat16
    ring_ptr,  # [C, hd] bfloat16
    entries_ptr,  # [E, hd] bfloat16
    places_ptr,  # [T, N] int32
    position_ptr,  # [1] int32
    sink_ptr,  # [H] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    out_ptr,  # [T, H, hd] bfloat16
    held,  # int, C
    most,  # int, N, or E where there are no places
    scale,  # float
    SEEN: tl.constexpr,  # keys of the window
    RATIO: tl.constexpr,  # 0: no entries
    CHOSEN: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    PARTS: tl.constexpr = WIDTH // PART
    i_row = tl.num_programs(1) - 1 - tl.program_id(1)
    o_head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    o_key = tl.arange(0, KEYS)
    o_d = tl.arange(0, PART)
    sink = tl.load(sink_ptr + o_head) * _LOG2_E
    o_out = (i_row * H + o_head)[:, None] * WIDTH + o_d[None, :]
    position = tl.load(position_ptr) + i_row
    query = ()
    acc = ()
    for c in tl.static_range(PARTS):
        query = query + (tl.load(query_ptr + o_out + c * PART),)
        acc = acc + (tl.zeros([PART, HEADS], tl.float32),)
    FIRST: tl.constexpr = SEEN // KEYS
    visible = 0
    if RATIO > 0:
        visible = tl.minimum((position + 1) // RATIO, most)
    b_top = tl.full([HEADS], _LOWEST, tl.float32)
    b_total = tl.zeros([KEYS, HEADS], tl.float32)
    # tiles of the window before the first position have no keys
    for i in tl.range(tl.maximum(SEEN - 1 - position, 0) // KEYS, FIRST + tl.cdiv(visible, KEYS), num_stages=STAGES):
        begin = position - (SEEN - 1) + i * KEYS
        i_key = (begin + held) % held + o_key
        i_key = tl.where(i_key < held, i_key, i_key - held)
        m_key = begin + o_key >= 0
        p_cache = ring_ptr
        if RATIO > 0:
            is_seen = i < FIRST
            i_entry = (i - FIRST) * KEYS + o_key
            m_entry = i_entry < visible
            if CHOSEN:
                i_entry = tl.load(places_ptr + i_row * most + i_entry, mask=m_entry & (i >= FIRST), other=-1)
                m_entry = i_entry >= 0
            i_key = tl.where(is_seen, i_key, i_entry)
            m_key = tl.where(is_seen, m_key, m_entry)
            p_cache = tl.where(is_seen, ring_ptr, entries_ptr)
        p_keys = p_cache + i_key[:, None] * WIDTH + o_d[None, :]
        keys = ()
        for c in tl.static_range(PARTS):
            keys = keys + (tl.load(p_keys + c * PART, mask=m_key[:, None], other=0.0),)
        b_z = tl.zeros([KEYS, HEADS], tl.float32)
        for c in tl.static_range(PARTS):
            b_z = dot_bf16(keys[c], tl.trans(query[c]), b_z, TENSOR_CORES)
        b_z = tl.where(m_key[:, None], b_z * (scale * _LOG2_E), float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_z, axis=0))
        b_raised = tl.exp2(b_z - b_new[None, :])
        b_kept = tl.exp2(b_top - b_new)[None, :]
        b_total = b_total * b_kept + b_raised
        b_top = b_new
        mixed = ()
        for c in tl.static_range(PARTS):
            mixed = mixed + (_add_keys(keys[c], b_raised, acc[c] * b_kept, TENSOR_CORES),)
        acc = mixed
    b_share = 1.0 / (tl.sum(b_total, axis=0) + tl.exp2(tl.minimum(sink - b_top, 126.0)))[None, :]
    for c in tl.static_range(PARTS):
        b_out = tl.trans(acc[c] * b_share)
        if c == PARTS - 1:
            b_left, b_right = tl.split(tl.reshape(b_out, [HEADS, PART // 2, 2]))
            b_crossed = tl.reshape(tl.join(b_right, b_left), [HEADS, PART])
            m_tail = o_d >= PART - TAIL
            o_turn = i_row * TAIL + o_d - (PART - TAIL)
            b_cos = tl.load(cos_ptr + o_turn, mask=m_tail, other=1.0)[None, :]
            b_sin = tl.load(sin_ptr + o_turn, mask=m_tail, other=0.0)[None, :]
            b_out = tl.where(m_tail[None, :], b_out * b_cos + b_crossed * b_sin, b_out)
        tl.store(out_ptr + o_out + c * PART, round_bf16(b_out).to(tl.bfloat16))


def chunk_attention(
    query: Tensor,
    position: Tensor,
    window: Window,
    entries: Entries | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend, rotate back and round to bfloat16.

    Args:
        query: [T, H, hd] bfloat16, T from 1 to 4096, H a multiple of 32, hd 128, 256 or 512; normalised and rotated.
        position: [1] int32, of the first row; the others follow it.
        window: the keys of the last positions, those of the chunk already written.
        entries: of the layer's compressor, those that the chunk ends already written.
        sink: [H] float32; it takes part in the denominator only.
        cos, sin: [T, rd] float32, the angles back: each stands twice, the sine of an even element negated.
        scale: factor of query · key.
        out: [T, H, hd] bfloat16 destination, for graph capture; allocated when None.

    Returns:
        [T, H, hd] bfloat16. A row's bits are those of the row in any other chunk, not those of `sparse_attention`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    shape = tuple(query.shape)
    require(query.ndim == 3 and shape[1] % HEADS == 0, f"query must have a multiple of {HEADS} heads", shape)
    require(window.width % KEYS == 0, f"window.width must be a multiple of {KEYS}", window.width)
    if entries is not None and entries.places is not None:
        columns = entries.places.shape[-1]
        require(columns % KEYS == 0, f"entries.places must have a multiple of {KEYS} columns", columns)
    return launch(query, position, window, entries, sink, cos, sin, PLAIN, scale=scale, out=out)


def launch(
    query: Tensor,
    position: Tensor,
    window: Window,
    entries: Entries | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    cut: Tuning,
    *,
    scale: float,
    out: Tensor | None = None,
    lanes: bool | None = None,
    tensor_cores: bool | None = None,
) -> Tensor:
    """`chunk_attention` with another cut or form: for benches and tests. The form for Hopper has no other cut."""
    by_lanes = runs_wgmma(query.device) if lanes is None else lanes
    if by_lanes:
        cut = LANES
    require(query.ndim == 3, "query must be [T, H, hd]", tuple(query.shape))
    rows, heads, width = query.shape
    device = query.device
    require(1 <= rows <= CHUNK_ROWS_MAX, f"query must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require(heads > 0 and heads % cut.heads == 0, f"query must have a multiple of {cut.heads} heads", heads)
    require(width in (128, 256, 512), "query must be 128, 256 or 512 wide", width)
    require_tensor(query, "query", (rows, heads, width), torch.bfloat16)
    require_few(query.numel(), "query")
    require_tensor(position, "position", (1,), torch.int32, device)
    require_tensor(sink, "sink", (heads,), torch.float32, device)
    tail = require_angles(cos, sin, rows, width, device)
    seen, held = window.width, window.ring.shape[0]
    require(seen > 0 and seen % cut.keys == 0, f"window.width must be a multiple of {cut.keys}", seen)
    require(held >= rows + seen - 1, f"window.ring must have at least {rows + seen - 1} rows", held)
    require_tensor(window.ring, "window.ring", (held, width), torch.bfloat16, device)
    require_few(window.ring.numel(), "window.ring")
    if entries is not None:
        _require_entries(entries, rows, width, cut, device)
    if out is None:
        out = torch.empty_like(query)
    require_tensor(out, "out", (rows, heads, width), torch.bfloat16, device)
    cache = window.ring if entries is None else entries.cache
    places = None if entries is None else entries.places
    ratio = 0 if entries is None else entries.ratio
    arguments = (
        query, window.ring, cache, position if places is None else places, position, sink, cos, sin, out,
        held, cache.shape[0] if places is None else places.shape[1], scale,
    )  # fmt: skip
    grid = (heads // cut.heads, rows)
    if by_lanes:
        _direct.call(
            lanes_form.chunk_attention_lanes_kernel,
            grid,
            *arguments,
            **lane_constants(seen, ratio, places is not None, heads, width, tail),
            num_warps=cut.warps,
        )
        return out
    is_ptx = runs_ptx(device)
    by_cores = is_ptx if tensor_cores is None else tensor_cores
    _direct.call(
        _chunk_attention_kernel, grid,
        *arguments, **constants(cut, seen, ratio, places is not None, heads, width, tail, by_cores),
        **({"num_warps": cut.warps} if is_ptx else {}),
    )  # fmt: skip
    return out


def lane_constants(seen: int, ratio: int, chosen: bool, heads: int, width: int, tail: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of the form for Hopper."""
    return {"SEEN": seen, "RATIO": ratio, "CHOSEN": chosen, "H": heads, "WIDTH": width, "TAIL": tail}


def constants(
    cut: Tuning,
    seen: int,
    ratio: int,
    chosen: bool,
    heads: int,
    width: int,
    tail: int,
    tensor_cores: bool = True,
) -> dict[str, int | bool]:
    """Return the compile-time arguments of the plain form."""
    return {
        "SEEN": seen,
        "RATIO": ratio,
        "CHOSEN": chosen,
        "H": heads,
        "WIDTH": width,
        "TAIL": tail,
        "KEYS": cut.keys,
        "HEADS": cut.heads,
        "PART": min(cut.part, width),
        "STAGES": cut.stages + chosen,  # places are asked for before their keys
        "TENSOR_CORES": tensor_cores,
    }


def _require_entries(entries: Entries, rows: int, width: int, cut: Tuning, device: torch.device) -> None:
    require(entries.ratio > 0, "entries.ratio must be positive", entries.ratio)
    require_tensor(entries.cache, "entries.cache", (entries.cache.shape[0], width), torch.bfloat16, device)
    require_few(entries.cache.numel(), "entries.cache")
    if entries.places is not None:
        require(entries.places.ndim == 2, "entries.places must be [T, N]", tuple(entries.places.shape))
        count = entries.places.shape[1]
        require(
            count > 0 and count % cut.keys == 0, f"entries.places must have a multiple of {cut.keys} columns", count
        )
        require_tensor(entries.places, "entries.places", (rows, count), torch.int32, device)
