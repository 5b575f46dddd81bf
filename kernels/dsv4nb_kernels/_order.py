"""float32 as integers that compare alike, so that a maximum is one instruction of a warp."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(-0x80000000)  # below every number's key


@triton.jit
def ordered(b_x):
    """int32 that compare as the float32 do; the two zeros are one."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
