"""What a round takes, and how many of its drafts are worth verifying (dspark.md 4.3, 4.4). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4nb.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a round takes, in ms, on one machine.

    Attributes:
        draft: of drafting, which a round does whatever its window.
        verify: [i]: of a verify forward of i + 1 rows.
        other: of all else in a round: choosing, commit, the host.

    Raises:
        RequestError: a number is negative or not finite, or there is no forward.
    """

    draft: float
    verify: tuple[float, ...]
    other: float = 0.0

    def __post_init__(self) -> None:
        # a list is somebody else's; nobody holds this value yet
        object.__setattr__(self, "verify", tuple(self.verify))
        if not self.verify:
            raise RequestError("verify is empty; it must say what a forward of 1 row takes", param="verify")
        for name, value in [("draft", self.draft), ("other", self.other), *(("verify", ms) for ms in self.verify)]:
            if not 0 <= value < math.inf:
                raise RequestError(f"{name} is {value!r}; it must be milliseconds, 0 or more", param=name)

    @classmethod
    def measured(cls, draft: float, verify: Sequence[float]) -> Costs:
        """Return the table of measured times, in which more rows never take less."""
        risen, highest = [], 0.0
        for ms in verify:
            highest = max(highest, ms)
            risen.append(highest)
        return cls(draft=draft, verify=tuple(risen))

    def tokens_per_ms(self, survivals: Sequence[float], drafts: int) -> float:
        """Return what a round that verifies so many drafts promises."""
        took = self.draft + self.other + self.verify[min(drafts, len(self.verify) - 1)]
        return (1 + sum(survivals[:drafts])) / took if took else math.inf

    def best(self, survivals: Sequence[float], *, looks_ahead: bool = True) -> int:
        """Return how many drafts to verify.

        Args:
            survivals: probability that a draft and all before it are accepted, one per draft.
            looks_ahead: compare all counts; else stop at the first draft that does not pay, so that whether a draft
                is verified depends on nothing that was computed from it (dspark.md 4.5).
        """
        if looks_ahead:
            return max(range(len(survivals) + 1), key=lambda n: (self.tokens_per_ms(survivals, n), -n))
        n = 0
        while n < len(survivals) and self.tokens_per_ms(survivals, n + 1) > self.tokens_per_ms(survivals, n):
            n += 1
        return n


def leading(conf_logits: Sequence[float], tau: float) -> int:
    """Return the length of the leading run of logits whose sigmoid is at least `tau`; a NaN ends it."""
    border = math.log(tau) - math.log1p(-tau)
    for n, logit in enumerate(conf_logits):
        if not logit >= border:
            return n
    return len(conf_logits)
