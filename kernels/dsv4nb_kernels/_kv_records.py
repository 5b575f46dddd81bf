"""Key/value rows as records: bytes of e4m3 under a power of two for each 64 of them, and the rotated tail as bfloat16.

A record of a row of hd elements, of which the last rd are rotated, is

    hd - rd bytes        e4m3 values
    2 rd bytes           bfloat16 values
    (hd - rd) / 64 bytes e8m0 scales, and nothing up to a multiple of 16 bytes

592 bytes for 512 and 64, of which 584 hold something, instead of 1024. A program reads the values of many rows at any
places, so each lane's 16 bytes must begin on 16 bytes; and the scales of a row in one load.

What a record stands for is the row that passed through e4m3 (`reference.round_fp8`), bit for bit in bfloat16: a value
of e4m3 has four significant bits, its scale is a power of two from 2^-22 on, and the least product, 2^-31, is far from
the end of bfloat16. At its other end, from 255 · 2^120 on, both are infinite. A record of zeros is a row of zeros.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._e8m0 import pow2_at_least, pow2_inverse
from dsv4nb_kernels._fp8 import LARGEST, decode_e4m3, encode_e4m3, round_e4m3
from dsv4nb_kernels._launch import Limits, cdiv, require, require_tensor, runs_ptx

KV_BLOCK = 64  # elements of a row that share a scale
UNPACKED_ROWS = 32  # of one program
WARPS = 4
LIMITS = Limits(registers=64, shared_bytes=4 * 1024)

_BLOCK = tl.constexpr(KV_BLOCK)
_PEAK_FLOOR = tl.constexpr(1e-4)  # blocks that are all but zero keep a finite scale
_ALIGNMENT = 16  # bytes

# four values; impure, so that the compiler does not find bytes behind the operands of a product: for bytes it would
# take the channels in another order, and the sums would have other bits
_DECODE = tl.constexpr("""{
.reg .b16 c<2>, h<4>;
.reg .b32 p<2>;
.reg .f32 f<4>;
mov.b32 {c0,c1}, $2;
cvt.rn.f16x2.e4m3x2 p0, c0;
cvt.rn.f16x2.e4m3x2 p1, c1;
mov.b32 {h0,h1}, p0;
mov.b32 {h2,h3}, p1;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
cvt.f32.f16 f2, h2;
cvt.f32.f16 f3, h3;
mul.rn.f32 f0, f0, $3;
mul.rn.f32 f1, f1, $4;
mul.rn.f32 f2, f2, $5;
mul.rn.f32 f3, f3, $6;
cvt.rn.bf16x2.f32 $0, f1, f0;
cvt.rn.bf16x2.f32 $1, f3, f2;
}""")


@triton.constexpr_function
def record_bytes(width: int, tail: int) -> int:
    """Return the bytes of a record of `width` elements, of which the last `tail` are rotated."""
    plain = width - tail
    return -(-(plain + 2 * tail + plain // KV_BLOCK) // _ALIGNMENT) * _ALIGNMENT


def require_cache(cache: Tensor, name: str, width: int, tail: int, records: bool, device: torch.device) -> None:
    """Refuse a cache that holds no rows of `width` elements in the form that is asked for.

    Args:
        cache: [C, R] uint8 records, or [C, hd] bfloat16.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit, or no record has such a tail.
    """
    if not records:
        require_tensor(cache, name, (cache.shape[0], width), torch.bfloat16, device)
        return
    plain = width - tail
    fits = plain > 0 and plain % KV_BLOCK == 0 and plain <= 8 * KV_BLOCK and tail % KV_BLOCK == 0
    require(fits, f"{name}: of a record up to 512 elements and the tail are multiples of {KV_BLOCK}", (plain, tail))
    require_tensor(cache, name, (cache.shape[0], record_bytes(width, tail)), torch.uint8, device)


@triton.jit
def store_record(p_record, b_x, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Write [WIDTH] float32, values of bfloat16, as a record."""
    PLAIN: tl.constexpr = WIDTH - TAIL
    o_d = tl.arange(0, WIDTH)
    o_block = tl.arange(0, WIDTH // _BLOCK)
    b_blocks = tl.reshape(b_x, [WIDTH // _BLOCK, _BLOCK])
    s_x = pow2_at_least(tl.maximum(tl.max(tl.abs(b_blocks), axis=1), _PEAK_FLOOR) * (1 / LARGEST))
    b_codes = encode_e4m3(round_e4m3(b_blocks * pow2_inverse(s_x)[:, None])).to(tl.uint8)
    tl.store(p_record + o_d, tl.reshape(b_codes, [WIDTH]), mask=o_d < PLAIN)
    p_tail = (p_record + PLAIN).to(tl.pointer_type(tl.bfloat16))
    tl.store(p_tail + (o_d - PLAIN), b_x.to(tl.bfloat16), mask=o_d >= PLAIN)
    b_scales = (s_x.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(p_record + (PLAIN + 2 * TAIL) + o_block, b_scales, mask=o_block < PLAIN // _BLOCK)


@triton.jit
def _values_of(b_codes, s_x, PTX: tl.constexpr):
    """[R, 64] bfloat16 of bytes and scales."""
    if PTX:
        b_x = tl.inline_asm_elementwise(_DECODE, "=r,=r,r,r,r,r,r", [b_codes, s_x], tl.bfloat16, is_pure=False, pack=4)
    else:
        b_byte = b_codes.to(tl.int32)
        b_x = tl.where((b_byte & 0x7F) == 0x7F, float("nan"), decode_e4m3(b_byte))
        b_x = (b_x * s_x).to(tl.bfloat16)
    return b_x


@triton.jit
def load_records(p_cache, i_row, m_row, WIDTH: tl.constexpr, TAIL: tl.constexpr, PTX: tl.constexpr):
    """Rows `i_row` [R] int64 of a cache of records where `m_row`, else zeros: a tuple of [R, 64] bfloat16."""
    PLAIN: tl.constexpr = WIDTH - TAIL
    RECORD: tl.constexpr = record_bytes(WIDTH, TAIL)
    o_d = tl.arange(0, _BLOCK)
    p_codes = p_cache + i_row[:, None] * RECORD + o_d[None, :]
    p_scales = p_cache.to(tl.pointer_type(tl.int64)) + i_row * (RECORD // 8) + (PLAIN + 2 * TAIL) // 8
    p_tail = p_cache.to(tl.pointer_type(tl.bfloat16)) + i_row[:, None] * (RECORD // 2) + (PLAIN // 2 + o_d)[None, :]
    codes = ()
    tails = ()
    for c in tl.static_range(PLAIN // _BLOCK):
        codes = codes + (tl.load(p_codes + c * _BLOCK, mask=m_row[:, None], other=0),)
    b_scales = tl.load(p_scales, mask=m_row, other=0)
    for c in tl.static_range(TAIL // _BLOCK):
        tails = tails + (tl.load(p_tail + c * _BLOCK, mask=m_row[:, None], other=0.0),)
    parts = ()
    for c in tl.static_range(PLAIN // _BLOCK):
        s_x = (((b_scales >> (8 * c)) & 0xFF).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        parts = parts + (_values_of(codes[c], s_x[:, None], PTX),)
    return parts + tails


@triton.jit
def _unpack_kernel(
    first_ptr,  # [C, R] uint8
    second_ptr,  # [E, R] uint8
    first_out_ptr,  # [C, hd] bfloat16
    second_out_ptr,  # [E, hd] bfloat16
    first_rows,  # int, C
    second_rows,  # int, E
    first_programs,  # int
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    PTX: tl.constexpr,
):
    i_program = tl.program_id(0)
    p_cache = first_ptr
    p_out = first_out_ptr
    rows = first_rows
    if i_program >= first_programs:
        i_program -= first_programs
        p_cache = second_ptr
        p_out = second_out_ptr
        rows = second_rows
    o_row = (i_program * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_row = o_row < rows
    parts = load_records(p_cache, o_row, m_row, WIDTH, TAIL, PTX)
    p_parts = p_out + o_row[:, None] * WIDTH + tl.arange(0, _BLOCK)[None, :]
    for c in tl.static_range(WIDTH // _BLOCK):
        tl.store(p_parts + c * _BLOCK, parts[c], mask=m_row[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """A cache, and room for its rows.

    Attributes:
        records: [C, R] uint8.
        rows: [C, hd] bfloat16.
    """

    records: Tensor
    rows: Tensor


def unpack_records(first: Unpacked, second: Unpacked | None, *, tail: int) -> None:
    """Write the rows that the records of one cache or two stand for, in one launch.

    Args:
        first, second: of rows of one width, a multiple of 64.
        tail: elements at the end of a row that are rotated.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    device, width = first.records.device, first.rows.shape[-1]
    other = first if second is None else second
    for name, each in (("first", first), ("second", other)):
        require_cache(each.records, f"{name}.records", width, tail, True, device)
        require_tensor(each.rows, f"{name}.rows", (each.records.shape[0], width), torch.bfloat16, device)
    programs = cdiv(first.records.shape[0], UNPACKED_ROWS)
    more = 0 if second is None else cdiv(second.records.shape[0], UNPACKED_ROWS)
    is_ptx = runs_ptx(device)
    _direct.call(
        _unpack_kernel, (programs + more,),
        first.records, other.records, first.rows, other.rows,
        first.records.shape[0], other.records.shape[0], programs,
        **unpack_constants(width, tail, is_ptx),
        **({"num_warps": WARPS} if is_ptx else {}),
    )  # fmt: skip


def unpack_constants(width: int, tail: int, ptx: bool = True) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {"WIDTH": width, "TAIL": tail, "ROWS": UNPACKED_ROWS, "PTX": ptx}
