"""Activations as the experts read them: rounded to e4m3 in blocks of 128, spread out to float16."""

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
from dsv4nb_kernels._launch import ROWS_MAX, columns, power_of_two, require, require_tensor, runs_ptx

BLOCK = 128  # columns that share a scale

PEAK_FLOOR = tl.constexpr(1e-4)  # blocks that are all but zero keep a finite scale
# inner rows are stored 2^7 times as large: then float16 holds every step of the smallest scale, 2^-31, and 511
INNER_SCALE = tl.constexpr(2.0**-7)
_ROW_SHARE = tl.constexpr(2.0**-7)  # of a row's largest scale: 448 · 2^7 is the largest that float16 is asked to hold


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """The rows of one step for `expert_up`.

    Attributes:
        values: [D/32, C, 32] float16, C the number of rows rounded up to 1, 2, 4 or 8; what lies past T is not used.
        scales: [8] float32, what to multiply each row with; what lies past T is not used.
        count: T.
    """

    values: Tensor
    scales: Tensor
    count: int

    @classmethod
    def empty(cls, count: int, width: int, device: torch.device) -> ExpertRows:
        """Return room for `count` rows of `width` columns."""
        return cls(
            values=torch.zeros(width // 32, columns(count), 32, dtype=torch.float16, device=device),
            scales=torch.zeros(ROWS_MAX, dtype=torch.float32, device=device),
            count=count,
        )


@triton.jit
def share_scale(b_codes, s_x, FP8: tl.constexpr = True):
    """Put a row's blocks [B, 128] of codes under one scale: exact but for values below 2^-40 of the row's largest."""
    s_row = tl.max(s_x, axis=0)
    if FP8:
        s_row *= _ROW_SHARE
    return (b_codes.to(tl.float32) * (s_x * pow2_inverse(s_row))[:, None]).to(tl.float16), s_row


@triton.jit
def _round_kernel(
    x_ptr,  # [R, W] float32 or bfloat16
    values_ptr,  # float16: column k of row r at r · ROW + k // 32 · UNIT + k % 32
    scales_ptr,  # [8] float32
    W,  # int, multiple of 128
    ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARED_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_k = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b_x = tl.load(x_ptr + i_row * W + o_k, mask=o_k < W, other=0.0).to(tl.float32)
    b_peak = tl.max(tl.abs(b_x), axis=1)
    s_x = pow2_at_least(tl.maximum(b_peak, PEAK_FLOOR) * (1 / LARGEST))
    b_codes = round_e4m3(b_x * pow2_inverse(s_x)[:, None])
    if SHARED_SCALE:
        b_values, s_row = share_scale(b_codes, s_x)
        tl.store(scales_ptr + i_row, s_row)
    else:
        b_values = (b_codes * (s_x * (1 / INNER_SCALE))[:, None]).to(tl.float16)
    tl.store(values_ptr + i_row * ROW + o_k // 32 * UNIT + o_k % 32, b_values, mask=o_k < W)


_PEAK = tl.constexpr("""{
.reg .f32 t;
shfl.sync.bfly.b32 t, $1, 1, 31, 0xffffffff;
max.f32 $0, $1, t;
shfl.sync.bfly.b32 t, $0, 2, 31, 0xffffffff;
max.f32 $0, $0, t;
shfl.sync.bfly.b32 t, $0, 8, 31, 0xffffffff;
max.f32 $0, $0, t;
shfl.sync.bfly.b32 t, $0, 16, 31, 0xffffffff;
max.f32 $0, $0, t;
}""")


@triton.constexpr_function
def _round_asm():
    lines = ["{", ".reg .f32 f<8>;", ".reg .b16 h<4>;", ".reg .b32 s;", "cvt.rn.f16x2.f32 s, $13, $13;"]
    for i in range(8):
        lines += [f"mov.b32 f{i}, ${4 + i};", f"mul.rn.f32 f{i}, f{i}, $12;"]
    for i in range(4):
        lines.append(f"cvt.rn.satfinite.e4m3x2.f32 h{i}, f{2 * i + 1}, f{2 * i};")
    for i in range(4):
        lines += [f"cvt.rn.f16x2.e4m3x2 ${i}, h{i};", f"mul.rn.f16x2 ${i}, ${i}, s;"]
    return "\n".join([*lines, "}"])


@triton.jit
def round_lane(x):
    """Round a lane's 8 float32 (8 registers) as `round_inner` does; lanes 1, 2, 8 and 16 apart hold one block."""
    b_peak = tl.abs(x[0].to(tl.float32, bitcast=True))
    for i in tl.static_range(1, 8):
        b_peak = tl.maximum(b_peak, tl.abs(x[i].to(tl.float32, bitcast=True)))
    b_peak = tl.inline_asm_elementwise(_PEAK, "=f,f", [b_peak], tl.float32, is_pure=False, pack=1)
    s_x = pow2_at_least(tl.maximum(b_peak, PEAK_FLOOR) * (1 / LARGEST))
    return tl.inline_asm_elementwise(
        _round_asm(),
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,f,f",
        x + (pow2_inverse(s_x), s_x * (1 / INNER_SCALE)),  # noqa: RUF005 - kernels have no starred tuples
        (tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


def round_rows(x: Tensor, *, out: ExpertRows | None = None, dependent: bool = False) -> ExpertRows:
    """Round the rows of a step for `expert_up`.

    Args:
        x: [T, D] float32 or bfloat16, T from 1 to 8, D a multiple of 128.
        out: destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `x` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(x.ndim == 2 and 1 <= x.shape[0] <= ROWS_MAX, f"x must be [T, D], T from 1 to {ROWS_MAX}", tuple(x.shape))
    require(x.dtype in (torch.float32, torch.bfloat16), "x must be float32 or bfloat16", x.dtype)
    rows, width = x.shape
    require(width > 0 and width % BLOCK == 0, f"x must have a multiple of {BLOCK} columns", width)
    require_tensor(x, "x", (rows, width), x.dtype)
    if out is None:
        out = ExpertRows.empty(rows, width, x.device)
    require_rows(out, rows, width, x.device)
    _round(x, out.values, out.scales, row=32, unit=32 * columns(rows), shared_scale=True, dependent=dependent)
    return out


def round_inner(inner: Tensor, *, out: Tensor | None = None, dependent: bool = False) -> Tensor:
    """Round what `expert_up` wrote for `expert_down`.

    Args:
        inner: [R, I] float32 within ±511, I a multiple of 128.
        out: [R, I] float16 destination, for graph capture; allocated when None.
        dependent: start before `expert_up` has ended, and wait for it inside.

    Returns:
        [R, I] float16, 2^7 times the rounded values.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(inner.ndim == 2, "inner must be [R, I]", tuple(inner.shape))
    rows, width = inner.shape
    require(width > 0 and width % BLOCK == 0, f"inner must have a multiple of {BLOCK} columns", width)
    require_tensor(inner, "inner", (rows, width), torch.float32)
    if out is None:
        out = torch.empty(rows, width, dtype=torch.float16, device=inner.device)
    require_tensor(out, "out", (rows, width), torch.float16, inner.device)
    _round(inner, out, out, row=width, unit=32, shared_scale=False, dependent=dependent)
    return out


def _round(
    x: Tensor, values: Tensor, scales: Tensor, *, row: int, unit: int, shared_scale: bool, dependent: bool
) -> None:
    is_dependent = dependent and runs_ptx(x.device)
    _direct.call(
        _round_kernel,
        (x.shape[0],),
        x,
        values,
        scales,
        x.shape[1],
        ROW=row,
        UNIT=unit,
        BLOCKS=power_of_two(x.shape[1] // BLOCK),
        SHARED_SCALE=shared_scale,
        DEPENDENT=is_dependent,
        **({"num_warps": 8, "launch_pdl": True} if is_dependent else {"num_warps": 8}),
    )


def require_rows(rows: ExpertRows, count: int, width: int, device: torch.device) -> None:
    """Refuse rows that were made for another step or width.

    Raises:
        ValueError: the number of rows, a shape, dtype, stride, device or alignment does not fit.
    """
    require(rows.count == count, f"rows must be {count}", rows.count)
    require_tensor(rows.values, "values", (width // 32, columns(count), 32), torch.float16, device)
    require_tensor(rows.scales, "scales", (ROWS_MAX,), torch.float32, device)
