"""Whether the drafter's confidences are true: predicted against observed survival of the drafts that were verified.

A draft counts when it was verified. Its confidence speaks of the case that all drafts before it were accepted, so it
counts only there; the product up to it, its survival, counts in every case. Drafts past the stop were accepted.
Which drafts were verified must not depend on what they are: rounds of a window tell of what the window let pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import numpy.typing as npt

from dsv4nb.errors import RequestError
from dsv4nb.rounds.records import Draft, Round
from dsv4nb.tables import Facts, Grid, as_html, as_text, decimal, percent

Floats = npt.NDArray[np.float64]

N_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Predictions in [low, high), the last bin's 1 included.

    Attributes:
        n: how many there are.
        predicted: their mean; `observed` the share of them that came true.
    """

    low: float
    high: float
    n: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Predictions against what came of them.

    Attributes:
        n: how many there are; `hits` those that came true.
        predicted: mean of the predictions, None without any; `observed` the share that came true.
        ece: expected calibration error: distance of a bin's two means, averaged over the predictions; None likewise.
        auc: chance that a hit was given more than a miss, ties counted half; None when either is missing.
        bins: of equal width, the empty ones left out.
    """

    n: int
    hits: int
    predicted: float | None
    observed: float | None
    ece: float | None
    auc: float | None
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How true confidences are. The tuples have an entry per draft of the longest block; [0] is the first draft.

    Attributes:
        conf: that a draft is accepted, given that those before it were; `conf_at` the same by position.
        survival: that a draft and all before it are accepted; `survival_at` the same by position.
        temperatures: what the logits were divided by, by position; None when they are as the drafter gave them.
    """

    conf: Reliability
    conf_at: tuple[Reliability, ...]
    survival: Reliability
    survival_at: tuple[Reliability, ...]
    temperatures: tuple[float, ...] | None

    def rows(self) -> Facts:
        """Return what there is to say before the table, as (label, text)."""
        if self.temperatures is None:
            return [("confidences", "as the drafter gave them")]
        return [("confidences", f"logits divided by {', '.join(f'{t:.3g}' for t in self.temperatures)}")]

    def grid(self) -> Grid:
        """Return the table of both predictions, by position and over all."""
        named = [("confidence", self.conf_at, self.conf), ("survival", self.survival_at, self.survival)]
        table = [["", "drafts", "predicted", "observed", "ECE", "AUC"]]
        for name, at, over_all in named:
            table += [_line(f"{name} of draft {k}", told) for k, told in enumerate(at, 1)]
            table.append(_line(f"{name} of all", over_all))
        return table

    def __str__(self) -> str:
        return as_text(self.rows(), self.grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows(), self.grid())


def _line(name: str, told: Reliability) -> list[str]:
    return [name, str(told.n), *map(percent, (told.predicted, told.observed, told.ece)), decimal(told.auc, 3)]


def calibration_of(
    rounds: Sequence[Round], *, temperatures: Sequence[float] | None = None, bins: int = N_BINS
) -> Calibration:
    """Return how true the confidences of `rounds` are; drafts without one are passed over.

    Args:
        temperatures: by position, what the confidence logits are divided by first, see `fit_temperatures`.

    Raises:
        RequestError: there are fewer temperatures than positions, one is not above 0, or there is no bin.
    """
    block = max((len(round.drafts) for round in rounds), default=0)
    divisors = None if temperatures is None else _divisors(temperatures, block)
    if type(bins) is not int or bins < 1:
        raise RequestError(f"bins is {bins!r}; it must be an integer of 1 or more", param="bins")
    given: list[tuple[list[float], list[bool]]] = [([], []) for _ in range(block)]
    product: list[tuple[list[float], list[bool]]] = [([], []) for _ in range(block)]
    for round in rounds:
        survival = 1.0
        for k, conf in enumerate(_confidences(round, divisors)):
            survival *= conf
            if not math.isnan(conf) and k <= round.accepts:
                _note(given[k], conf, k < round.accepts)
            if not math.isnan(survival):
                _note(product[k], survival, k < round.accepts)
    return Calibration(
        conf=_over_all(given, bins),
        conf_at=tuple(reliability(*pairs, bins=bins) for pairs in given),
        survival=_over_all(product, bins),
        survival_at=tuple(reliability(*pairs, bins=bins) for pairs in product),
        temperatures=divisors,
    )


def reliability(predicted: Sequence[float], came_true: Sequence[bool], *, bins: int = N_BINS) -> Reliability:
    """Return how predictions, in [0, 1], compare with what came of them, one each."""
    p, hit = np.asarray(predicted, dtype=np.float64), np.asarray(came_true, dtype=np.bool_)
    n, sums, hits = _binned(p, hit, bins)
    return Reliability(
        n=len(p),
        hits=int(hit.sum()),
        predicted=float(p.mean()) if len(p) else None,
        observed=float(hit.mean()) if len(p) else None,
        ece=ece(p, hit, bins),
        auc=auc(p, hit),
        bins=tuple(
            Bin(
                low=i / bins,
                high=(i + 1) / bins,
                n=int(n[i]),
                predicted=float(sums[i] / n[i]),
                observed=float(hits[i] / n[i]),
            )
            for i in np.flatnonzero(n).tolist()
        ),
    )


def ece(predicted: Floats, hit: npt.NDArray[np.bool_], bins: int = N_BINS) -> float | None:
    """Return the expected calibration error over bins of equal width, None without predictions."""
    _, sums, hits = _binned(predicted, hit, bins)
    return float(np.abs(sums - hits).sum() / len(predicted)) if len(predicted) else None


def auc(predicted: Floats, hit: npt.NDArray[np.bool_]) -> float | None:
    """Return the area under the ROC curve, ties counted half; None when there is no hit or no miss."""
    values, which = np.unique(predicted, return_inverse=True)
    hits = np.bincount(which[hit], minlength=len(values))
    misses = np.bincount(which[~hit], minlength=len(values))
    pairs = int(hits.sum()) * int(misses.sum())
    below = np.cumsum(misses) - misses
    return float((hits * (below + misses / 2)).sum() / pairs) if pairs else None


def sigmoid(logits: Floats) -> Floats:
    """Return 1 / (1 + exp(-logits)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


def _binned(predicted: Floats, hit: npt.NDArray[np.bool_], bins: int) -> tuple[Floats, Floats, Floats]:
    """By bin: how many predictions, their sum, how many hits."""
    at = np.clip((predicted * bins).astype(np.int64), 0, bins - 1)
    n, hits = np.bincount(at, minlength=bins), np.bincount(at[hit], minlength=bins)
    sums = np.bincount(at, weights=predicted, minlength=bins)
    return n.astype(np.float64), sums.astype(np.float64), hits.astype(np.float64)


def _confidences(round: Round, divisors: Sequence[float] | None) -> Iterator[float]:
    """Of the judged drafts, NaN for those without one."""
    for k, draft in enumerate(round.drafts[: round.judged]):
        if divisors is None:
            yield math.nan if draft.conf is None else draft.conf
        else:
            yield float(sigmoid(np.asarray(logit_of(draft) / divisors[k])))


def logit_of(draft: Draft) -> float:
    """Return the confidence logit, NaN when there is none."""
    return math.nan if draft.conf_logit is None else draft.conf_logit


def _note(pairs: tuple[list[float], list[bool]], predicted: float, came_true: bool) -> None:
    pairs[0].append(predicted)
    pairs[1].append(came_true)


def _over_all(by_position: Sequence[tuple[list[float], list[bool]]], bins: int) -> Reliability:
    predicted = [p for pairs in by_position for p in pairs[0]]
    came_true = [hit for pairs in by_position for hit in pairs[1]]
    return reliability(predicted, came_true, bins=bins)


def _divisors(temperatures: Sequence[float], block: int) -> tuple[float, ...]:
    if len(temperatures) < block:
        raise RequestError(
            f"temperatures has {len(temperatures)} values; the rounds draft {block}, give one each",
            param="temperatures",
        )
    for value in temperatures:
        if not isinstance(value, Real) or not 0 < value < math.inf:
            limit = "numbers above 0; 1 leaves a position as it is"
            raise RequestError(f"temperatures has {value!r}; it must hold {limit}", param="temperatures")
    return tuple(map(float, temperatures))
