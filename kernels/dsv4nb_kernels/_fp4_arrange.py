"""Checkpoint bytes of FP4 matrices → the words of `_fp4`, in one pass on a GPU; `pack_fp4` says what goes where."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._launch import TILE, Limits

_BLOCK = 256  # columns of a program
_WORDS = 544  # that it writes: 512 of codes, 32 of scales
WARPS = 4
LIMITS = Limits(registers=40)


@triton.jit
def _pair(b_word, FROM: tl.constexpr, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    """The two codes at bits FROM … FROM + 7, the even one in the low half."""
    b_even = ((b_word >> (FROM + 3)) & 1) << SIGN | ((b_word >> FROM) & 7) << MAGNITUDE
    b_odd = ((b_word >> (FROM + 7)) & 1) << SIGN | ((b_word >> (FROM + 4)) & 7) << MAGNITUDE
    return b_even | b_odd << 16


@triton.jit
def _arrange_fp4_kernel(
    codes_ptr,  # [N, K/8] int32, eight codes each
    scales_ptr,  # [N, K/128] int32, four e8m0 bytes each
    words_ptr,  # [N/16, K/256, 544] int32
    K,  # multiple of 256, the same kernel for all
):
    i_tile, i_block = tl.program_id(0), tl.program_id(1)
    p_out = words_ptr + (i_tile.to(tl.int64) * (K // 256) + i_block) * 544
    # [chunk 2][half 2][g 8][t 4][unit 4]
    o = tl.arange(0, 512)
    i_row = i_tile.to(tl.int64) * 16 + o // 128 % 2 * 8 + o // 16 % 8
    b_word = tl.load(codes_ptr + i_row * (K // 8) + i_block * 32 + o // 256 * 16 + o % 4 * 4 + o // 4 % 4)
    b_low = _pair(b_word, 0, 15, 9) | _pair(b_word, 8, 12, 6)
    b_high = _pair(b_word, 16, 14, 3) | _pair(b_word, 24, 13, 0)
    tl.store(p_out + o, b_low | b_high)
    # [g 8][chunk 2][half 2]
    o = tl.arange(0, 32)
    i_row = i_tile.to(tl.int64) * 16 + o % 2 * 8 + o // 4
    b_scale = tl.load(scales_ptr + i_row * (K // 128) + i_block * 2 + o // 2 % 2)
    tl.store(p_out + 512 + o, b_scale + 0x0E0E0E0E)


def arrange_fp4(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    """Return what `pack_fp4` returns, which has checked the arguments.

    Args:
        codes: [N, K/2] bytes, contiguous.
        scale_bytes: [N, K/32] uint8, none above 240.
    """
    n, k = codes.shape[0], codes.shape[1] * 2
    words = torch.empty((n // TILE, k // _BLOCK, _WORDS), dtype=torch.int32, device=codes.device)
    with torch.cuda.device_of(codes):
        _direct.call(
            _arrange_fp4_kernel,
            (n // TILE, k // _BLOCK),
            codes.view(torch.int32),
            scale_bytes.view(torch.int32),
            words,
            k,
            num_warps=WARPS,
        )
    return words
