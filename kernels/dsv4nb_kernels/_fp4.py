"""e2m1 with one power of two per 32: packed for the lanes of a warp, multiplied, and summed row by row.

A block is 16 rows x 256 k, 2048 bytes of codes and 128 of scales, read by one warp. Lane (g, t), g in 0 … 7 and t in
0 … 3, holds rows g and g + 8 (half 0 and 1) and columns 8t … 8t + 7 of each unit of 32:

    codes   [chunk 2][half 2][g 8][t 4][unit 4] words of eight codes; 16 bytes a lane serve one row in four units
    scales  [g 8][chunk 2][half 2][unit 4] bytes; 16 bytes a lane serve both rows in all eight units

In a word the even columns stand in the low half and the odd ones in the high half. Pair p = 0 … 3 has its sign at bit
(15, 12, 14, 13)[p] of each half and its magnitude at bits (11-9, 8-6, 5-3, 2-0)[p]. A code whose sign is at bit 15 and
whose magnitude is at bits 11-9 is the float16 2^-14 times its value, so masks, one shift and two products that move
sign and magnitude together decode eight codes in nine instructions. The stored scale bytes are 14 larger for it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels._e8m0 import require_scale_bytes
from dsv4nb_kernels._fp4_arrange import arrange_fp4
from dsv4nb_kernels._fp8 import decode_e4m3, unit_product
from dsv4nb_kernels._launch import require, require_tensor

TILE = 16  # rows of one tensor-core instruction
GROUP = 32  # columns that share a scale
BLOCK = 256  # columns of a block
WORDS = 544  # int32 words of a block
_CODE_WORDS = 512
_BIAS = 14  # see above

_SIGNS = (15, 12, 14, 13)
_MAGNITUDES = (9, 6, 3, 0)

_EXPONENT = tl.constexpr(0x7F800000)

DECODE = """and.b32 {r}0, {word}, 0x8E008E00;
shl.b32 {r}1, {word}, 3;
and.b32 {r}1, {r}1, 0x8E008E00;
and.b32 {r}2, {word}, 0x40384038;
mul.lo.u32 {r}2, {r}2, 66;
and.b32 {r}2, {r}2, 0x8E008E00;
and.b32 {r}3, {word}, 0x20072007;
mul.lo.u32 {r}3, {r}3, 516;
and.b32 {r}3, {r}3, 0x8E008E00;
"""

# rows g and g + 8 of a lane's weights are A, its activations are B; the pair of products starts from zero
_UNIT_PRODUCT = tl.constexpr(
    "{\n.reg .b32 a<4>, b<4>;\n.reg .f32 d<4>, z;\nmov.f32 z, 0f00000000;\n"
    + DECODE.format(r="a", word="$4")
    + DECODE.format(r="b", word="$5")
    + """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0,d1,d2,d3}, {a0,b0,a1,b1}, {$6,$7}, {z,z,z,z};
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0,d1,d2,d3}, {a2,b2,a3,b3}, {$8,$9}, {d0,d1,d2,d3};
mov.f32 $0, d0;
mov.f32 $1, d1;
mov.f32 $2, d2;
mov.f32 $3, d3;
}"""
)


def pack_fp4(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    """Reorder checkpoint rows for the lanes.

    Args:
        codes: [N, K/2] uint8 or int8, the even column in the low nibble; N a multiple of 16 and K of 256.
        scale_bytes: [N, K/32] uint8, e8m0.

    Returns:
        [N/16, K/256, 544] int32.

    Raises:
        ValueError: a shape or dtype does not fit, or a scale byte is above 240.
    """
    require(codes.ndim == 2 and codes.dtype in (torch.uint8, torch.int8), "codes must be [N, K/2] bytes", codes.dtype)
    n, k = codes.shape[0], codes.shape[1] * 2
    require(n % TILE == 0 and n > 0, f"codes must have a multiple of {TILE} rows", n)
    require(k % BLOCK == 0 and k > 0, f"codes must have a multiple of {BLOCK} columns", k)
    require_tensor(scale_bytes, "scale_bytes", (n, k // GROUP), torch.uint8, codes.device)
    require_scale_bytes(scale_bytes, "scale_bytes")
    if codes.is_cuda:
        return arrange_fp4(codes.contiguous(), scale_bytes)
    pairs = codes.contiguous().view(torch.uint8).view(n, k // 8, 4).to(torch.int32)
    rows = _half(pairs & 0xF) | _half(pairs >> 4) << 16
    # [tile, half, g, chunk, unit, t] -> [tile, chunk, half, g, t, unit]
    lanes = rows.view(n // TILE, 2, 8, k // 128, 4, 4).permute(0, 3, 1, 2, 5, 4)
    # [tile, half, g, block, chunk, unit] -> [tile, block, g, chunk, half, unit]
    scales = (scale_bytes + _BIAS).view(n // TILE, 2, 8, k // BLOCK, 2, 4).permute(0, 3, 2, 4, 1, 5)
    blocks = (n // TILE, k // BLOCK, -1)
    return torch.cat((lanes.reshape(blocks), scales.contiguous().view(torch.int32).view(blocks)), dim=-1)


def unpack_fp4(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the checkpoint's codes, uint8, and scale bytes; inverse of `pack_fp4`."""
    tiles, blocks, _ = words.shape
    n, k = tiles * TILE, blocks * BLOCK
    rows = words[..., :_CODE_WORDS].reshape(tiles, k // 128, 2, 8, 4, 4).permute(0, 2, 3, 1, 5, 4).reshape(n, k // 8)
    codes = _nibbles(rows & 0xFFFF) | _nibbles(rows >> 16 & 0xFFFF) << 4
    stored = words[..., _CODE_WORDS:].contiguous().view(torch.uint8).view(tiles, blocks, 8, 2, 2, 4)
    scale_bytes = stored.permute(0, 4, 2, 1, 3, 5).reshape(n, k // GROUP) - _BIAS
    return codes.view(n, k // 2), scale_bytes


def _half(codes: Tensor) -> Tensor:
    """[..., 4] codes of the even or of the odd columns -> [...] 16 bits."""
    half = torch.zeros_like(codes[..., 0])
    for p in range(4):
        half |= (codes[..., p] >> 3) << _SIGNS[p] | (codes[..., p] & 7) << _MAGNITUDES[p]
    return half


def _nibbles(half: Tensor) -> Tensor:
    """[...] 16 bits -> [..., 4] codes, uint8; inverse of `_half`."""
    codes = [(half >> _SIGNS[p] & 1) << 3 | half >> _MAGNITUDES[p] & 7 for p in range(4)]
    return torch.stack(codes, dim=-1).to(torch.uint8)


@triton.jit
def fp4_product(b_low, b_high, b_x):
    """The product of 16 rows x 32 k with eight token columns, times 2^-14.

    `b_low`: 8 codes of row g (1 register); `b_high`: of row g + 8; `b_x`: the lane's 8 float16 activations of one token
    (4 registers). Returns row g at columns 2t and 2t + 1, then row g + 8 at the same: 4 float32 registers.
    """
    return tl.inline_asm_elementwise(
        _UNIT_PRODUCT,
        "=f,=f,=f,=f,r,r,r,r,r,r",
        (b_low, b_high) + b_x,  # noqa: RUF005 - kernels have no starred tuples
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scale_bits(b_word, J: tl.constexpr):
    """Byte J of four e8m0 bytes where float32 has its exponent; the other bits are noise."""
    if J < 3:
        return b_word << (23 - 8 * J)
    else:
        return b_word >> 1


@triton.jit
def masked_scale(b_bits, o_t, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """The power of two whose exponent is in `b_bits`, and zero in lanes whose columns are not of unit UNIT.

    With fewer than eight tokens the columns of one instruction hold several units of the same tokens, and a lane's
    product is right only in the columns of UNIT. Adding zero times the others changes no bit of a sum.
    """
    if COLUMNS == 8:
        return (b_bits & _EXPONENT).to(tl.float32, bitcast=True)
    elif COLUMNS == 4:
        return (b_bits & tl.where(o_t // 2 == UNIT % 2, _EXPONENT, 0)).to(tl.float32, bitcast=True)
    else:
        return (b_bits & tl.where(o_t == UNIT % 4, _EXPONENT, 0)).to(tl.float32, bitcast=True)


@triton.jit
def add_rows(acc, b_d, s_low, s_high, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the product of unit UNIT (of eight), times the scales of rows g and g + 8, to its chain (see `_reduce`)."""
    if COLUMNS == 1:
        # columns 2t and 2t + 1 hold units t and t + 4
        E: tl.constexpr = UNIT // 4
        return (tl.fma(b_d[E], s_low, acc[0]), tl.fma(b_d[2 + E], s_high, acc[1]))
    elif COLUMNS == 2:
        return _fold(acc, b_d, s_low, s_high)
    elif COLUMNS == 4:
        C4: tl.constexpr = UNIT // 2 % 2 * 4
        return acc[:C4] + _fold(acc[C4 : C4 + 4], b_d, s_low, s_high) + acc[C4 + 4 :]
    else:
        C8: tl.constexpr = UNIT % 4 * 4
        return acc[:C8] + _fold(acc[C8 : C8 + 4], b_d, s_low, s_high) + acc[C8 + 4 :]


@triton.jit
def _fold(acc, b_d, s_low, s_high):
    return (
        tl.fma(b_d[0], s_low, acc[0]),
        tl.fma(b_d[1], s_low, acc[1]),
        tl.fma(b_d[2], s_high, acc[2]),
        tl.fma(b_d[3], s_high, acc[3]),
    )


@triton.jit
def add_fp4_unit(acc, w, s, x, o_t, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Add unit UNIT of a block to its chain.

    `w`: the lane's codes, 8 registers a chunk; `s`: its scales, 2 registers a chunk; `x`: its activations of the eight
    units, COLUMNS / 8 loads of 4 registers a unit.
    """
    C: tl.constexpr = UNIT // 4
    J: tl.constexpr = UNIT % 4
    X: tl.constexpr = UNIT * COLUMNS // 8 * 4
    b_d = fp4_product(w[8 * C + J], w[8 * C + 4 + J], x[X : X + 4])
    s_low = masked_scale(scale_bits(s[2 * C], J), o_t, UNIT, COLUMNS)
    s_high = masked_scale(scale_bits(s[2 * C + 1], J), o_t, UNIT, COLUMNS)
    return add_rows(acc, b_d, s_low, s_high, UNIT, COLUMNS)


@triton.constexpr_function
def _load_if_asm(loads):
    lines = ["{", ".reg .pred p;", f"setp.ne.b32 p, ${4 * loads + 1}, 0;"]
    for i in range(loads):
        registers = ",".join(f"${4 * i + j}" for j in range(4))
        lines.append(f"@p ld.global.L1::no_allocate.v4.b32 {{{registers}}}, [${4 * loads}+{512 * i}];")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _load_if_constraints(loads):
    return "=r," * (4 * loads) + "l,r"


@triton.constexpr_function
def _int32s(count):
    return (tl.int32,) * count


@triton.jit
def load_codes_if(p_lane, b_is, LOADS: tl.constexpr):
    """Codes of an expert if there is one; else arbitrary bits, all of which are finite codes."""
    return tl.inline_asm_elementwise(
        _load_if_asm(LOADS), _load_if_constraints(LOADS), [p_lane, b_is], _int32s(4 * LOADS), is_pure=False, pack=1
    )


@triton.jit
def load_chunk_scales(p_lane):
    """The scales of one chunk: 8 bytes per lane."""
    return tl.inline_asm_elementwise(
        "ld.global.L1::no_allocate.v2.b32 {$0,$1}, [$2];", "=r,=r,l", [p_lane], _int32s(2), is_pure=False, pack=1
    )


@triton.jit
def single(b_v):
    """A tuple to add to another: kernels have no starred ones."""
    return (b_v,)


@triton.jit
def product_plainly(b_low, b_high, p_even, p_odd):
    """What `mma.sync` gives one lane of a unit, without PTX.

    `b_low`, `b_high`: [lanes, 32] float32 weights of rows g and g + 8; `p_even`, `p_odd`: [lanes] pointers to the 32
    float16 activations of tokens 2t and 2t + 1.
    """
    o_k = tl.arange(0, 32)[None, :]
    b_even = tl.load(p_even[:, None] + o_k).to(tl.float32)
    b_odd = tl.load(p_odd[:, None] + o_k).to(tl.float32)
    return (
        tl.sum(b_low * b_even, axis=1),
        tl.sum(b_low * b_odd, axis=1),
        tl.sum(b_high * b_even, axis=1),
        tl.sum(b_high * b_odd, axis=1),
    )


@triton.jit
def decode_plainly(p_row):
    """[lanes, 32] float32, 2^-14 of the values; `p_row`: [lanes] uint8 pointers to a unit's word in lane t = 0."""
    o_k = tl.arange(0, 32)[None, :]
    b_half = tl.load((p_row[:, None] + o_k // 8 * 16).to(tl.pointer_type(tl.int32))) >> (o_k % 2 * 16)
    o_pair = o_k % 8 // 2
    o_sign = tl.where(o_pair == 0, 15, tl.where(o_pair == 1, 12, tl.where(o_pair == 2, 14, 13)))
    b_bits = (b_half >> o_sign & 1) << 15 | (b_half >> (9 - 3 * o_pair) & 7) << 9
    return b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def add_fp4_unit_plainly(acc, p_codes, p_scales, p_even, p_odd, UNIT: tl.constexpr):
    """Add unit UNIT to its chain as `add_fp4_unit` does with eight columns, without PTX.

    `p_codes`, `p_scales`: uint8 pointers to row g's share of a block's codes and scales; `p_even`, `p_odd`: as in
    `product_plainly`.
    """
    p_row = p_codes + (UNIT // 4 * 1024 + UNIT % 4 * 4)
    b_d = product_plainly(decode_plainly(p_row), decode_plainly(p_row + 512), p_even, p_odd)
    p_scale = p_scales + (UNIT // 4 * 8 + UNIT % 4)
    s_low = (tl.load(p_scale).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    s_high = (tl.load(p_scale + 4).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return add_rows(acc, b_d, s_low, s_high, UNIT, 8)


@triton.jit
def add_fp8_unit(acc, w, b_low, b_high, x, o_t, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Add unit UNIT of a block of an FP8 matrix to its chain, in the order of its packing (`fp8_rows.pack`).

    `w`: the lane's codes of the unit's half of the block, 16 registers; `x`: its activations of that half;
    `b_low`, `b_high`: the bits of the scales of rows g and g + 8.
    """
    U: tl.constexpr = UNIT % 4
    W: tl.constexpr = U // 2 * 8 + U % 2 * 2
    X: tl.constexpr = U * COLUMNS // 8 * 4
    b_d = unit_product(w[W : W + 2], w[W + 4 : W + 6], x[X : X + 4])
    s_low = masked_scale(b_low, o_t, UNIT, COLUMNS)
    s_high = masked_scale(b_high, o_t, UNIT, COLUMNS)
    return add_rows(acc, b_d, s_low, s_high, UNIT, COLUMNS)


@triton.jit
def add_fp8_unit_plainly(acc, p_codes, s_low, s_high, p_even, p_odd, UNIT: tl.constexpr):
    """The same without PTX; `p_codes`: uint8 pointers to row g's share of a block."""
    o_k = tl.arange(0, 32)[None, :]
    p_unit = p_codes[:, None] + (UNIT // 2 * 1024 + UNIT % 2 * 8) + o_k // 8 * 16 + o_k % 8
    b_low = decode_e4m3(tl.load(p_unit).to(tl.int32))
    b_high = decode_e4m3(tl.load(p_unit + 512).to(tl.int32))
    return add_rows(acc, product_plainly(b_low, b_high, p_even, p_odd), s_low, s_high, UNIT, 8)


@triton.jit
def sum_warps_plainly(acc, WARPS: tl.constexpr):
    """`_reduce.sum_warps` of four values without PTX, right in every warp."""
    return (
        _sum_plainly(acc[0], WARPS),
        _sum_plainly(acc[1], WARPS),
        _sum_plainly(acc[2], WARPS),
        _sum_plainly(acc[3], WARPS),
    )


@triton.jit
def _sum_plainly(b_v, WARPS: tl.constexpr):
    b_sum = tl.sum(tl.reshape(b_v, [WARPS, 32]), axis=0)
    return tl.reshape(tl.broadcast_to(b_sum[None, :], [WARPS, 32]), [32 * WARPS])


@triton.jit
def held_back(p_lane, b_v, zero):
    """`p_lane`, because `zero` is 0 at run time: the assembler hoists no load from it above what `b_v` is made of."""
    return p_lane + (b_v.to(tl.int32, bitcast=True) & zero)
