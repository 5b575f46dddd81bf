"""Activations as FP8 products read them: summed, rounded by blocks of 128, scales apart.

The codes are float16, which holds every e4m3 value: the product needs no decoding on this side. Unrounded bfloat16 rows
take the same form, for matrices whose input the contract leaves alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4nb_kernels import _direct
from dsv4nb_kernels._e8m0 import pow2_at_least, pow2_inverse
from dsv4nb_kernels._fp8 import LARGEST, round_e4m3
from dsv4nb_kernels._launch import ROWS_MAX, cdiv, require, require_tensor, runs_ptx

BLOCK = 128  # columns that share a scale
PROGRAM_BLOCKS = 8  # of one row in one program
REGISTERS_MAX = 44
SHARED_BYTES_MAX = 128

_PEAK_FLOOR = tl.constexpr(1e-4)  # blocks that are all but zero keep a finite scale
_UNROUNDED_LARGEST = tl.constexpr(32768.0)  # float16 then holds every bfloat16 within 2^-32 of the block's peak
_UNROUNDED_FLOOR = tl.constexpr(2.0**-111)
# the interpreter's cast rounds ties up; and the sum of bits that serves there would make -0 of a NaN of all ones
_CAST_IS_EVEN = tl.constexpr(not triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows:
    """Activations as the kernel reads them: codes in float16, times one power of two for 128 columns.

    Attributes:
        codes: [T, W] float16.
        scales: [W/128, 8] float32; column t belongs to row t, those from T on are read and not used.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> RoundedRows:
        """Return room for `rows` rows of `width` columns."""
        return cls(
            codes=torch.empty(rows, width, dtype=torch.float16, device=device),
            scales=torch.zeros(width // BLOCK, ROWS_MAX, dtype=torch.float32, device=device),
        )


@triton.jit
def round_bf16(b_x):
    """Round float32 to bfloat16, ties to even, as float32; NaN stays NaN."""
    if _CAST_IS_EVEN:
        return b_x.to(tl.bfloat16).to(tl.float32)
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_rounded = ((b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(b_x == b_x, b_rounded, b_x)


@triton.jit
def codes_of(b_x, FP8: tl.constexpr):
    """Blocks [B, 128] of bfloat16 values, given as float32, as float16 codes and one scale for each block."""
    b_peak = tl.max(tl.abs(b_x), axis=1)
    if FP8:
        s_x = pow2_at_least(tl.maximum(b_peak, _PEAK_FLOOR) * (1 / LARGEST))
        b_codes = round_e4m3(b_x * pow2_inverse(s_x)[:, None])
    else:
        s_x = pow2_at_least(tl.maximum(b_peak, _UNROUNDED_FLOOR) * (1 / _UNROUNDED_LARGEST))
        b_codes = b_x * pow2_inverse(s_x)[:, None]
    return b_codes.to(tl.float16), s_x


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [S, T, K] float32 or bfloat16
    codes_ptr,  # [T, K] float16
    scales_ptr,  # [K/128, 8] float32
    K,  # int, multiple of 128
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    o_k = o_block[:, None] * 128 + tl.arange(0, 128)[None, :]
    m_k = o_k < K
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b_x = tl.load(x_ptr + i_row * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SPLITS):
        b_x += tl.load(x_ptr + (i * tl.num_programs(0) + i_row) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_x = round_bf16(b_x)  # what every FP8 product of the contract reads
    b_codes, s_x = codes_of(b_x, FP8)
    tl.store(codes_ptr + i_row * K + o_k, b_codes, mask=m_k)
    tl.store(scales_ptr + o_block * 8 + i_row, s_x, mask=o_block * 128 < K)


def round_rows(x: Tensor, *, act_fp8: bool, out: RoundedRows | None = None, dependent: bool = False) -> RoundedRows:
    """Add up the splits of the last product, round to bfloat16 and prepare the rows for the next one.

    Args:
        x: [S, T, W] float32, or [T, W] bfloat16; T from 1 to 8, W a multiple of 128.
        act_fp8: round to e4m3, as the twin does; else the codes are the bfloat16 values themselves, exact down to
            2^-32 of the largest of a block.
        out: destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `x` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    splits = x if x.ndim == 3 else x[None]
    require(splits.ndim == 3, "x must be [S, T, W] or [T, W]", tuple(x.shape))
    require_tensor(splits, "x", splits.shape, torch.float32 if x.ndim == 3 else torch.bfloat16)
    count, rows, width = splits.shape
    require(1 <= rows <= ROWS_MAX, f"x must have 1 to {ROWS_MAX} rows", rows)
    require(
        count > 0 and width > 0 and width % BLOCK == 0, f"x must have a multiple of {BLOCK} columns", tuple(x.shape)
    )
    if out is None:
        out = RoundedRows.empty(rows, width, x.device)
    require_rows(out, rows, width, x.device)
    ptx = runs_ptx(x.device)
    _direct.call(
        _round_rows_kernel, (rows, cdiv(width, PROGRAM_BLOCKS * BLOCK)),
        x, out.codes, out.scales, width, SPLITS=count, BLOCKS=PROGRAM_BLOCKS, FP8=act_fp8, DEPENDENT=dependent and ptx,
        **({"launch_pdl": dependent} if ptx else {}),
    )  # fmt: skip
    return out


def require_rows(rows: RoundedRows, count: int, width: int, device: torch.device) -> None:
    """Refuse rows that are not [count, width] on `device`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require_tensor(rows.codes, "codes", (count, width), torch.float16, device)
    require_tensor(rows.scales, "scales", (width // BLOCK, ROWS_MAX), torch.float32, device)
