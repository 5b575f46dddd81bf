"""What the drafter looks at: one context row per stage and committed position (dspark.md 1.5, 2.4).

A forward leaves the taps of its rows, provisionally like everything else, in a ring with slack: what a rejected row
left is never read. Context rows are made of the taps of committed positions, and only when somebody needs them: a
draft, a snapshot, a digest. So the plain route pays for the taps alone, and no position is written twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.engine.cache import tap_width, window_rows

MakeRows = Callable[[Tensor, int], Tensor]  # taps [n, K·D] of the positions from `first` on -> rows [S, n, hd]


class DraftRings:
    """The rings of one sequence; the row of position p lies in slot p mod their length.

    Args:
        make_rows: of the drafter.

    Attributes:
        taps: [C, K·D].
        rows: [S, C, hd].
        upto: the rows of the window's positions below it are there; never past the committed ones.
    """

    def __init__(self, config: ModelConfig, make_rows: MakeRows) -> None:
        length = window_rows(config)
        self.taps = torch.empty(length, tap_width(config))
        self.rows = torch.empty(DSPARK_STAGES, length, config.head_dim)
        self.upto = 0
        self._window, self._make_rows = config.sliding_window, make_rows

    def put(self, slots: Tensor, taps: Tensor) -> None:
        """Keep the taps of a forward's rows: [T] and [T, K·D]."""
        self.taps.index_copy_(0, slots, taps)

    def catch_up(self, pos: int) -> None:
        """Make the rows of the window before `pos` that are not there yet.

        Args:
            pos: committed positions.
        """
        first = max(self.upto, pos - self._window)
        if first < pos:
            with torch.inference_mode():
                slots = torch.arange(first, pos) % self.taps.shape[0]
                self.rows[:, slots] = self._make_rows(self.taps[slots], first)
            self.upto = pos

    def seen(self, pos: int) -> Tensor:
        """Return the slots of the positions that a block at `pos` sees, oldest first."""
        return torch.arange(max(pos - self._window, 0), pos) % self.taps.shape[0]
