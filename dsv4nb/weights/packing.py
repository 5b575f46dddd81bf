"""Number formats of the checkpoint files ↔ float32 (model.md 2.1, 2.4, 4.3).

    e2m1    4 bits: sign, then 0 ½ 1 1½ 2 3 4 6; two in a byte, the even column in the low nibble
    e4m3    8 bits, largest value 448, 0x7F and 0xFF are NaN
    e8m0    8 bits: a power of two, 2 ** (byte - 127); 0xFF is NaN and never a scale

    FP4     e2m1 with one e8m0 per 32 columns of a row
    FP8     e4m3 with one e8m0 or float32 per 128x128 tile; tiles at the edges may be smaller
    NVFP4   e2m1 with one e4m3 per 16 columns and one float32 for the matrix

A scale is reinterpreted, never converted: converting the number 120 gives 120, not 2 ** -7 (T23).
Packing chooses the smallest power of two that lets the largest element of a block fit. So what
is exactly representable comes back bit for bit, and packing what was unpacked changes no value.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

FP4_BLOCK = 32
NVFP4_BLOCK = 16
FP8_TILE = 128

FP4_MAX = 6.0
FP8_MAX = 448.0

E8M0_NAN = 0xFF

# an all-zero block needs some scale; that of the official files is not known, any is right
_ZERO_BLOCK_AMAX = 1e-12

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# halfway between code i and code i + 1; what lies exactly there goes to the even one of the two
_E2M1_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e8m0_to_float(scale: Tensor, name: str = "scale") -> Tensor:
    """Read scale bytes as powers of two, float32.

    Args:
        scale: uint8 or float8_e8m0fnu, any shape.
        name: tensor to name in an error.

    Raises:
        ValueError: a byte is 0xFF, which is no scale, or the dtype is neither of the two.
    """
    bits = _e8m0_bytes(scale, name)
    if bool((bits == E8M0_NAN).any()):
        count = int((bits == E8M0_NAN).sum())
        raise ValueError(f"{name} holds {count} bytes 0xFF, which is no power of two; fetch its file again")
    exponent = bits.to(torch.int32)
    # 2 ** -127 is the only subnormal: the exponent field would be 0
    field = torch.where(exponent == 0, 1 << 22, exponent << 23)
    return field.view(torch.float32)


def float_to_e8m0(x: Tensor, name: str = "scale") -> Tensor:
    """Write powers of two as scale bytes, uint8.

    Raises:
        ValueError: an element is not a power of two in [2 ** -127, 2 ** 127].
    """
    field = x.to(torch.float32).contiguous().view(torch.int32)
    is_lowest = field == 1 << 22
    is_power = (field > 0) & (field & 0x7FFFFF == 0) & (field >> 23 < 255)
    if not bool((is_power | is_lowest).all()):
        bad = x.flatten()[~(is_power | is_lowest).flatten()][0].item()
        raise ValueError(f"{name} holds {bad!r}; it must be a power of two from 2**-127 to 2**127")
    return torch.where(is_lowest, 0, field >> 23).to(torch.uint8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Read bytes of two codes each as float32, without a scale.

    Args:
        packed: [..., K/2], int8 or uint8.

    Returns:
        [..., K]; column 2j is the low nibble of byte j.
    """
    if packed.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"packed is {packed.dtype}; FP4 codes are int8 or uint8")
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packed.device)
    codes = packed.view(torch.uint8).to(torch.int64)
    return values[torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)]


def pack_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest code, ties to the even one, and write two codes a byte.

    A small negative number rounds to +0; only a -0 that is there already stays -0.

    Args:
        x: [..., K], |x| <= 6, K even.

    Returns:
        [..., K/2] uint8.
    """
    size = x.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower_code, halfway in enumerate(_E2M1_HALFWAY):
        code += size > halfway if lower_code % 2 == 0 else size >= halfway
    has_sign = torch.signbit(x) & ((code > 0) | (size == 0))
    code |= has_sign.to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def unpack_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Dequantise a routed expert's matrix.

    Args:
        packed: [N, K/2] int8 or uint8, or with more leading axes.
        scale: [N, K/32] e8m0 bytes, uint8 or float8_e8m0fnu.

    Returns:
        [N, K] float32, exactly representable in bfloat16.
    """
    values = unpack_e2m1(packed)
    _require_shape("scale", scale, (*values.shape[:-1], values.shape[-1] // FP4_BLOCK), values)
    return values * e8m0_to_float(scale).repeat_interleave(FP4_BLOCK, dim=-1)


def pack_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to FP4 with one power of two per 32 columns.

    Args:
        w: [N, K] float, or with more leading axes; K a multiple of 32.

    Returns:
        Codes [N, K/2] int8 and scale bytes [N, K/32] uint8.
    """
    _require_columns(w, FP4_BLOCK)
    groups = _finite(w).reshape(*w.shape[:-1], w.shape[-1] // FP4_BLOCK, FP4_BLOCK)
    s = _scale(groups.abs().amax(-1), FP4_MAX)
    codes = pack_e2m1((groups / s.unsqueeze(-1)).clamp(-FP4_MAX, FP4_MAX).flatten(-2))
    return codes.view(torch.int8), float_to_e8m0(s)


def unpack_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantise a projection.

    Args:
        weight: [N, K] float8_e4m3fn, or with more leading axes.
        scale: [ceil(N/128), ceil(K/128)]: e8m0 bytes (uint8 or float8_e8m0fnu), or float32.

    Returns:
        [N, K] float32, exactly representable in bfloat16 when the scales are e8m0.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight is {weight.dtype}; FP8 weights are float8_e4m3fn")
    rows, columns = weight.shape[-2:]
    tiles = (-(-rows // FP8_TILE), -(-columns // FP8_TILE))
    _require_shape("scale", scale, (*weight.shape[:-2], *tiles), weight)
    s = scale if scale.dtype == torch.float32 else e8m0_to_float(scale)
    return weight.to(torch.float32) * spread_tiles(s, rows, columns)


def pack_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to FP8 with one power of two per 128x128 tile.

    Args:
        w: [N, K] float.

    Returns:
        [N, K] float8_e4m3fn and scale bytes [ceil(N/128), ceil(K/128)] uint8.
    """
    if w.ndim != 2:
        raise ValueError(f"w has shape {tuple(w.shape)}; FP8 tiles need a matrix")
    rows, columns = w.shape
    x = _finite(w)
    margin = (0, -columns % FP8_TILE, 0, -rows % FP8_TILE)
    padded = torch.nn.functional.pad(x, margin)
    down, across = (n // FP8_TILE for n in padded.shape)
    tiles = padded.reshape(down, FP8_TILE, across, FP8_TILE)
    s = _scale(tiles.abs().amax((1, 3)), FP8_MAX)
    codes = (x / spread_tiles(s, rows, columns)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, float_to_e8m0(s)


def unpack_nvfp4(packed: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """Dequantise a routed expert's matrix of an NVFP4 export.

    Args:
        packed: [N, K/2] uint8 or int8, or with more leading axes.
        weight_scale: [N, K/16] float8_e4m3fn.
        weight_scale_2: one float32.

    Returns:
        [N, K] float32. In the known exports the product of the two scales is a power of two, so
        `pack_fp4` of the result loses nothing.
    """
    values = unpack_e2m1(packed)
    if weight_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight_scale is {weight_scale.dtype}; NVFP4 block scales are float8_e4m3fn")
    _require_shape("weight_scale", weight_scale, (*values.shape[:-1], values.shape[-1] // NVFP4_BLOCK), values)
    if prod(weight_scale_2.shape) != 1:
        raise ValueError(f"weight_scale_2 has shape {tuple(weight_scale_2.shape)}; it must be one number")
    s = weight_scale.to(torch.float32) * weight_scale_2.to(torch.float32).reshape(())
    return values * s.repeat_interleave(NVFP4_BLOCK, dim=-1)


def _scale(amax: Tensor, largest: float) -> Tensor:
    """Smallest power of two >= amax / largest, from 2 ** -127 on; read off the bits of the float32 quotient."""
    amax = torch.where(amax > 0, amax, _ZERO_BLOCK_AMAX)
    field = (amax / largest).view(torch.int32)
    exponent = (field >> 23) + (field & 0x7FFFFF != 0).to(torch.int32)
    # a subnormal quotient rounds up to 2 ** -126, or to 2 ** -127 when that is enough
    exponent = torch.where(field <= 1 << 22, 0, exponent)
    return e8m0_to_float(exponent.to(torch.uint8))


def spread_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Return [rows, columns] whose 128x128 tiles are one element of `tiles` each; those at the edges may be smaller."""
    full = tiles.repeat_interleave(FP8_TILE, dim=-2).repeat_interleave(FP8_TILE, dim=-1)
    return full[..., :rows, :columns]


def _e8m0_bytes(scale: Tensor, name: str) -> Tensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"{name} is {scale.dtype}; e8m0 scales are bytes: uint8 or float8_e8m0fnu")
    return scale.view(torch.uint8)


def _finite(w: Tensor) -> Tensor:
    x = w.to(torch.float32)
    if not bool(x.isfinite().all()):
        raise ValueError("w holds NaN or infinity; neither can be packed")
    return x


def _require_columns(w: Tensor, block: int) -> None:
    if w.ndim < 1 or w.shape[-1] % block:
        raise ValueError(f"w has shape {tuple(w.shape)}; the last axis must be a multiple of {block}")


def _require_shape(name: str, found: Tensor, wanted: tuple[int, ...], matrix: Tensor) -> None:
    if tuple(found.shape) != wanted:
        raise ValueError(f"{name} is {tuple(found.shape)}; a matrix of {tuple(matrix.shape)} needs {wanted}")
