"""Some measurements of one thing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Middle and ends of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Many measurements of one thing, in ms.

    Attributes:
        p95: that 95 of a hundred samples do not exceed.
    """

    samples: int
    median: float
    p95: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        ordered = sorted(values)
        return cls(
            samples=len(ordered),
            median=statistics.median(ordered),
            p95=ordered[math.ceil(0.95 * len(ordered)) - 1],
            low=ordered[0],
            high=ordered[-1],
        )

    @property
    def tail(self) -> float:
        """p95 by median."""
        return self.p95 / self.median
