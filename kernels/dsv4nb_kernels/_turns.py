"""When a kernel waits for the one before it, and lets the next one start (programmatic dependent launch)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_turn(DEPENDENT: tl.constexpr, EAGER: tl.constexpr):
    """Wait for all that the kernel before has written.

    The next kernel may start before the wait (EAGER), so that its weights are on their way, or after it, so that its
    programs do not take the places of ours. It waits for our end in either case.
    """
    if DEPENDENT:
        if EAGER:
            gdc_launch_dependents()
        gdc_wait()
        if not EAGER:
            gdc_launch_dependents()
