"""The product's promises, checked on a loaded model on the machine at hand.

    report = examine(model)
    report.ok

What is promised: speculation changes no text, a row of logits is the same bits in any batch, a rejected draft leaves
nothing behind, a cached prompt is the prompt computed anew, the sampler draws what it always drew, and a recipe gives
its reply again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dsv4nb.doctor.caches import PLAN as CACHED
from dsv4nb.doctor.machine import facts
from dsv4nb.doctor.plan import carry_out
from dsv4nb.doctor.replies import REPLAYS, SPECULATION
from dsv4nb.doctor.report import Check, Report
from dsv4nb.doctor.rows import BATCHES, REJECTIONS
from dsv4nb.doctor.sampling import PLAN as SAMPLER
from dsv4nb.errors import ModelClosed, RequestError
from dsv4nb.handle import Model

__all__ = ["SECONDS", "Check", "Report", "examine", "facts"]

SECONDS = 50.0

_PLANS = (SAMPLER, BATCHES, REJECTIONS, CACHED, SPECULATION, REPLAYS)


def examine(model: Model, *, seconds: float = SECONDS, on_check: Callable[[Report], object] | None = None) -> Report:
    """Check what is promised of `model`, and report it; a promise that does not hold is a line of the report.

    Requests of others are served between the comparisons, in their order. The model is left as it was: nothing stays
    cached, and no seed is drawn; `timings` tells of the doctor's last request. An interrupt stops at once and is
    raised.

    Args:
        seconds: after them no comparison is started. The checks share them by weight, and one that ends early leaves
            the rest to those behind it; what is slow, or waits for others, compares less, and says how much.
        on_check: called after each check with the report so far.

    Raises:
        RequestError: `seconds` is no number above 0.
        ModelClosed: after `close`.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise RequestError(f"seconds is {seconds!r}; it must be a number above 0", param="seconds")
    if model.is_closed:
        raise ModelClosed(model.name)
    began = time.monotonic()
    checks: tuple[Check, ...] = ()
    machine = facts()
    for i, plan in enumerate(_PLANS):
        now = time.monotonic()
        share = plan.weight / sum(later.weight for later in _PLANS[i:])
        checks += (carry_out(plan, model, now + max(0.0, began + seconds - now) * share),)
        elapsed = time.monotonic() - began
        report = Report(model=model.name, checks=checks, planned=len(_PLANS), seconds=elapsed, machine=machine)
        if on_check is not None:
            on_check(report)
    return report
