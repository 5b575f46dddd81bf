"""The two rotary tables (model.md 3.2): plain for window-only layers, YaRN for layers with a compressor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig

ROWS = 1024  # positions computed at a time, always from a multiple of it, so that an angle is computed one way


class Turn(NamedTuple):
    """Angles of some positions, each standing twice; the sine of an even element is negated.

    Attributes:
        cos, sin: [R, rd].
    """

    cos: Tensor
    sin: Tensor

    @property
    def back(self) -> Turn:
        """The inverse rotation."""
        return Turn(self.cos, -self.sin)

    def rows(self, which: slice) -> Turn:
        """The angles of some of the rows."""
        return Turn(self.cos[which], self.sin[which])


def frequencies(config: ModelConfig, *, is_compressed: bool) -> Tensor:
    """Return the angle per position of each pair, [rd / 2] float32."""
    width = config.qk_rope_head_dim
    theta = float(config.compress_rope_theta if is_compressed else config.rope_theta)
    pair = torch.arange(width // 2, dtype=torch.float32)
    plain = 1.0 / theta ** (2 * pair / width)
    if not is_compressed:
        return plain

    def pair_that_turns(times: float) -> float:
        """Index of the pair that turns `times` times over the original context."""
        length = config.original_max_position_embeddings / (2 * math.pi * times)
        return width * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(config.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(config.beta_slow)), width - 1)
    share = ((pair - first) / (last - first or 0.001)).clamp(0, 1)
    return plain / config.rope_factor * share + plain * (1 - share)


class RotaryTable:
    """Angles by position, computed in blocks as positions are first asked for."""

    def __init__(self, config: ModelConfig, *, is_compressed: bool) -> None:
        self._frequencies = frequencies(config, is_compressed=is_compressed)
        empty = torch.empty(0, config.qk_rope_head_dim)
        self._table = Turn(empty, empty)

    def at(self, start: int, stop: int, step: int = 1) -> Turn:
        """Return the angles of positions start, start + step, … before `stop`."""
        if self._table.cos.shape[0] < stop:
            self._extend(stop)
        return Turn(self._table.cos[start:stop:step], self._table.sin[start:stop:step])

    def _extend(self, stop: int) -> None:
        blocks = [self._table]
        for start in range(self._table.cos.shape[0], stop, ROWS):
            angle = torch.outer(torch.arange(start, start + ROWS, dtype=torch.float32), self._frequencies)
            cos, sin = angle.cos(), angle.sin()
            blocks.append(Turn(cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)))
        self._table = Turn(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))
