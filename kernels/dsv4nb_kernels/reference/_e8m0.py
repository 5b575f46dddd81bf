"""Powers of two as scales (model.md 4.2): the smallest one that is large enough."""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA = 0x007F_FFFF
_EXPONENT = 0x7F80_0000


def pow2_at_least(x: Tensor) -> Tensor:
    """Return the smallest power of two >= x, elementwise, for positive normal float32."""
    # a non-zero mantissa carries into the exponent, a zero one does not
    return ((x.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)


def pow2_at_most(x: Tensor) -> Tensor:
    """Return the largest power of two <= |x|, elementwise, for normal float32; 0 stays 0."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)
