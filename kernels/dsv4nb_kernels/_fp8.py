"""e4m3 in kernels: round float32 to it, and multiply a tile that is stored in it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels._e8m0 import pow2_at_most

LARGEST = tl.constexpr(448.0)

# rows g and g + 8 of a lane's weights are A, its activations are B; the pair of products starts from zero
_UNIT_PRODUCT = tl.constexpr("""{
.reg .b16 h<8>;
.reg .b32 a<4>, b<4>;
.reg .f32 d<4>, z;
mov.f32 z, 0f00000000;
mov.b32 {h0,h1}, $4;
mov.b32 {h2,h3}, $5;
mov.b32 {h4,h5}, $6;
mov.b32 {h6,h7}, $7;
cvt.rn.f16x2.e4m3x2 a0, h0;
cvt.rn.f16x2.e4m3x2 a1, h1;
cvt.rn.f16x2.e4m3x2 a2, h2;
cvt.rn.f16x2.e4m3x2 a3, h3;
cvt.rn.f16x2.e4m3x2 b0, h4;
cvt.rn.f16x2.e4m3x2 b1, h5;
cvt.rn.f16x2.e4m3x2 b2, h6;
cvt.rn.f16x2.e4m3x2 b3, h7;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0,d1,d2,d3}, {a0,b0,a1,b1}, {$8,$9}, {z,z,z,z};
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0,d1,d2,d3}, {a2,b2,a3,b3}, {$10,$11}, {d0,d1,d2,d3};
mov.f32 $0, d0;
mov.f32 $1, d1;
mov.f32 $2, d2;
mov.f32 $3, d3;
}""")


@triton.jit
def round_e4m3(b_x):
    """Round float32 within ±448 to the nearest e4m3 value, ties to even, as float32."""
    # adding and taking away 1.5 * 2^23 steps leaves whole steps: three mantissa bits, 2^-9 below the normals
    b_magic = tl.maximum(pow2_at_most(b_x), 0.015625) * 1572864.0
    return (b_x + b_magic) - b_magic


@triton.jit
def decode_e4m3(b_byte):
    """The float32 values of e4m3 bytes, given as int32."""
    # the same bits a place lower in float16 mean 2^-8 of the value, subnormals included
    b_half = ((b_byte & 0x80) << 8) | ((b_byte & 0x7F) << 7)
    return b_half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def encode_e4m3(b_x):
    """The e4m3 bytes of float32 values that are on its grid, as int32; inverse of `decode_e4m3`."""
    b_half = (b_x * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return ((b_half >> 8) & 0x80) | ((b_half >> 7) & 0x7F)


@triton.jit
def unit_product(b_low, b_high, b_x):
    """The product of 16 rows x 32 k with eight token columns.

    `b_low`: 8 codes of row g (2 registers); `b_high`: of row g + 8; `b_x`: the lane's 8 float16 activations of one
    token (4 registers). Returns row g at columns 2t and 2t + 1, then row g + 8 at the same: 4 float32 registers.
    """
    return tl.inline_asm_elementwise(
        _UNIT_PRODUCT,
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r",
        b_low + b_high + b_x,
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
