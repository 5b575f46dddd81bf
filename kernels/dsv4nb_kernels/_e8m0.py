"""Powers of two as scales: their bytes on the host, their float32 bits in a kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels._launch import require

BIAS = 127
LARGEST_BYTE = 240  # the FP4 layout adds 14 to a byte; one limit for both formats
MISSING_BYTE = 255  # e8m0's NaN
_SUBNORMAL = 0x0040_0000  # 2^-127, the one e8m0 value without a normal float32


def require_scale_bytes(scales: Tensor, name: str) -> None:
    """Refuse bytes that no kernel can read.

    Raises:
        ValueError: a byte is above 240; `name`, the byte and the limit are in the message.
    """
    largest = int(scales.max()) if scales.numel() else 0
    require(
        largest <= LARGEST_BYTE, f"{name}: an e8m0 byte is at most {LARGEST_BYTE}, 2^{LARGEST_BYTE - BIAS}", largest
    )


def scales_of(scale_bytes: Tensor) -> Tensor:
    """Return the float32 powers of two of e8m0 bytes, exactly."""
    words = scale_bytes.to(torch.int32) << 23
    return torch.where(words == 0, _SUBNORMAL, words).view(torch.float32)


def bytes_of(scales: Tensor) -> Tensor:
    """Return the e8m0 bytes of float32 powers of two; inverse of `scales_of`."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


@triton.jit
def pow2_at_least(b_x):
    """The smallest power of two >= x, for positive normal float32."""
    # a non-zero mantissa carries into the exponent, a zero one does not
    return ((b_x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def pow2_at_most(b_x):
    """The largest power of two <= |x|, for normal float32; 0 stays 0."""
    return (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def pow2_inverse(b_x):
    """1 / x, exactly, for powers of two from 2^-126 to 2^126; a division may be approximate on a GPU."""
    return (0x7F000000 - b_x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
