"""Choices that a row, its position and the sampler decide alone, which an engine may make where the row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.protocol import Row
from dsv4nb.engine.sampler import choose

GREEDY = SamplerConfig(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainChoice:
    """The plain sampler as a `ChooseDraft`: called, it chooses on the host; what it would choose is told by its values.

    Attributes:
        config: without penalties and bias, and with a draw that is the race, or greedy; see `can_draw`.
        first: position of the draft in slot 0.
    """

    config: SamplerConfig
    first: int

    def __call__(self, row: Row, slot: int, ahead: Sequence[int]) -> int:
        """Return the id of the draft in `slot`."""
        return choose(row, self.config, self.first + slot)


def can_draw(config: SamplerConfig) -> bool:
    """Whether a device chooses as the host does: by the race, or the best."""
    return config.is_greedy or config.sampler == "gumbel"
