"""What the rows of a draw ask for: on the device, and as the choice of launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4nb_kernels.reference.draw import Rule

NUMBERS = 8  # float64 of a row: temperature, top-p, ln(min-p), repetition, frequency, presence, is greedy
WHOLE = 4  # int64 of a row: top-k, seed, position, stream


class Stages(NamedTuple):
    """Which launches a draw needs; a captured one keeps them.

    Attributes:
        races: a row is not greedy.
        by_number: a row has top-k; by_mass: a row has top-p.
        penalised: a row has penalties and `counts` are given; biased: `bias` is.
    """

    races: bool
    by_number: bool
    by_mass: bool
    penalised: bool
    biased: bool

    @classmethod
    def of(cls, rules: Sequence[Rule], *, biased: bool = False, penalised: bool = False) -> Stages:
        """Return what these rows need."""
        drawn = [rule for rule in rules if not rule.is_greedy]
        return cls(
            races=bool(drawn),
            by_number=any(rule.top_k > 0 for rule in drawn),
            by_mass=any(rule.top_p < 1 for rule in drawn),
            penalised=penalised,
            biased=biased,
        )

    def covers(self, other: Stages) -> bool:
        """Return whether rows that need `other` can be drawn so."""
        return all(own or not needed for own, needed in zip(self, other, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the rows ask for, on the device: numbers [T, 8] float64 and whole [T, 4] int64."""

    numbers: Tensor
    whole: Tensor

    @classmethod
    def of(cls, rules: Sequence[Rule], device: torch.device) -> Settings:
        """Return the settings of so many rows."""
        numbers, whole = _lines(rules)
        return cls(numbers=numbers.to(device), whole=whole.to(device))

    def set(self, rules: Sequence[Rule]) -> None:
        """Change the settings in place, for a captured draw; their stages must cover the rules'."""
        for own, new in zip((self.numbers, self.whole), _lines(rules), strict=True):
            own.copy_(new)


def _lines(rules: Sequence[Rule]) -> tuple[Tensor, Tensor]:
    numbers, whole = [], []
    for rule in rules:
        temperature, low = (
            (1.0 if rule.is_greedy else rule.temperature),
            math.log(rule.min_p) if rule.min_p else -math.inf,
        )
        penalties = rule.repetition, rule.frequency, rule.presence
        numbers.append([temperature, rule.top_p, low, *penalties, float(rule.is_greedy), 0.0])
        seed = rule.seed - (1 << 64) if rule.seed >> 63 else rule.seed
        whole.append([rule.top_k, seed, rule.position, rule.stream])
    return torch.tensor(numbers, dtype=torch.float64), torch.tensor(whole, dtype=torch.int64)
