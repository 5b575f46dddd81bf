"""What a person can set: sampler values, their defaults and their validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsv4nb.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """How the next token is chosen; frozen per request and echoed in its result.

    Attributes:
        temperature: <= 0 is greedy; ties go to the lowest id.
        top_k: keep the k best, 0 = off; 1 is greedy.
        top_p: keep the shortest prefix with this mass, in (0, 1].
        min_p: drop what is less likely than min_p times the best, in [0, 1).
        seed: key of the position-keyed draw, 0 <= seed < 2**64.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature), "temperature", self.temperature, "a finite number")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2**64)")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the argmax; below 1e-5 a temperature is not sampled with."""
        return self.temperature < 1e-5 or self.top_k == 1


def _require(holds: bool, param: str, value: object, limit: str) -> None:
    if not holds:
        raise RequestError(f"{param} is {value!r}; it must be {limit}", param=param)
