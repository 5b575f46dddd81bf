"""Sequential temperature scaling: confidences made true, a position at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv4nb.rounds.calibration import N_BINS, Floats, ece, logit_of, sigmoid
from dsv4nb.rounds.records import Round
from dsv4nb.tables import Grid, as_html, as_text, decimal, percent

GRID = tuple(2.0 ** (i / 8) for i in range(-24, 25))  # 49 from 1/8 to 8, the same factor apart, 1 in their middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperatures:
    """What the confidence logits are to be divided by. Tuples by position; [0] is the first draft.

    Attributes:
        values: 1 where no round tells.
        n: rounds that each was fitted on.
        ece_before: calibration error of the survival up to there, before; `ece_after` with the temperatures up to
            there. None where no round tells.
    """

    values: tuple[float, ...]
    n: tuple[int, ...]
    ece_before: tuple[float | None, ...]
    ece_after: tuple[float | None, ...]

    def grid(self) -> Grid:
        """Return the table by position."""
        return [
            ["draft", *(str(k + 1) for k in range(len(self.values)))],
            ["temperature", *(decimal(value, 3) for value in self.values)],
            ["rounds", *map(str, self.n)],
            ["ECE before", *map(percent, self.ece_before)],
            ["ECE after", *map(percent, self.ece_after)],
        ]

    def __str__(self) -> str:
        return as_text((), self.grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html((), self.grid())


def fit_temperatures(rounds: Sequence[Round]) -> Temperatures:
    """Fit a temperature per position, the first position first and those before it held.

    Each is the one of `GRID` whose products of confidences, up to its position, have the least expected calibration
    error (20 bins) against "all drafts up to here were accepted"; of equals the one nearest to 1. A round tells of a
    position when it verified its draft and the drafts up to there have confidence logits.

    Fit on 500 rounds or more that verified all drafts (`spec_window="off"`), and judge on others: rounds of a window
    miss the drafts that it cut. Order within a position stays, so an AUC of confidences does not change. The error
    does not reward telling drafts apart: where confidences were true, it hardly depends on the temperature, and a gain
    that small is chance.
    """
    block = max((len(round.drafts) for round in rounds), default=0)
    values: list[float] = []
    counts, before, after = [], [], []
    for k in range(block):
        logits = [[logit_of(draft) for draft in round.drafts[: k + 1]] for round in rounds if round.judged > k]
        z: Floats = np.array(logits, dtype=np.float64).reshape(-1, k + 1)
        hit = np.array([round.accepts > k for round in rounds if round.judged > k], dtype=np.bool_)
        told = ~np.isnan(z).any(axis=1)
        z, hit = z[told], hit[told]
        held = sigmoid(z[:, :k] / np.array(values)).prod(axis=1)
        errors = {t: ece(held * sigmoid(z[:, k] / t), hit, N_BINS) for t in GRID}
        best = min(GRID, key=lambda t: (errors[t] or 0.0, abs(np.log2(t))))
        values.append(best)
        counts.append(len(z))
        before.append(ece(sigmoid(z).prod(axis=1), hit, N_BINS))
        after.append(errors[best])
    return Temperatures(values=tuple(values), n=tuple(counts), ece_before=tuple(before), ece_after=tuple(after))
