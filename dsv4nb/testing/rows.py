"""Rows of logits that have what is known of a distribution: some log-probabilities, a rank, the entropy.

What the told tokens leave over goes to as many others as the entropy asks for, in equal parts. Which ids they are
nobody recorded: the lowest ones that are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dsv4nb.engine.protocol import Row

NOTHING = -80.0  # a logit without weight; the difference of two logits stays in the range of e^x in float32
_CERTAIN = 60.0  # a margin of this many nats is certainty in float32


def row_of(
    told: Sequence[tuple[int, float]],
    ranks: Mapping[int, int],
    entropy: float,
    size: int,
    avoid: Collection[int] = (),
) -> Row:
    """Return a row [size] of log-probabilities.

    Args:
        told: (id, logprob) of different tokens.
        ranks: of some of them; as many others stand above each as it says.
        entropy: nats, of the whole row; kept as far as the rest allows.
        avoid: ids that get nothing of the rest.
    """
    told = sorted(told, key=lambda one: (-one[1], one[0]))
    gaps = list(_gaps(told, ranks))
    left = 1 - sum(math.exp(logprob) for _, logprob in told)
    nats = entropy + sum(math.exp(logprob) * logprob for _, logprob in told)
    most = min((math.exp(logprob) for token, logprob in told if token in ranks), default=1.0)
    available = size - len(told) - len(avoid) - sum(gap.n for gap in gaps)

    room = max(0.98 * left, left - 0.9 * most * available)  # what the gaps can have: the rest goes behind them

    def others(height: float) -> list[float]:
        """The rest, its parts in the gaps of this height."""
        shares = [share for gap in gaps for share in gap.shares(height, room)]
        behind = sum(shares)
        bits = sum(-share * math.log(share) for share in shares)
        return [*shares, *_shares(left - behind, nats - bits, most, available)]

    row = np.full(size, NOTHING, np.float32)
    for token, logprob in told:
        row[token] = logprob
    shares = _closest(others, nats) if gaps else others(0.0)
    for token, share in zip(_free(size, told, avoid), shares, strict=False):
        row[token] = math.log(share)
    return row


@dataclass(frozen=True, slots=True)
class _Gap:
    """Tokens that stand above one that is told, and below another; n of them that nobody told of."""

    n: int
    low: float
    high: float

    def shares(self, height: float, room: float) -> list[float]:
        """Return what each gets; together never more than there is room for.

        Args:
            height: all are as low as can be at 0, and as high at 1; below 0 some are high, more of them towards -1.
        """
        low = self.low * (1 + 1e-4)
        if height >= 0:
            high = max(low, min(self.high, room / self.n))
            return [low * (high / low) ** height] * self.n
        high = self.high * (1 - 1e-4)
        most = min(self.n, max(0.0, room - self.n * low) / (high - low)) if high > low else 0.0
        n_high = -height * most
        between = low + (n_high - int(n_high)) * (high - low)
        return ([high] * int(n_high) + [between] + [low] * self.n)[: self.n]


def _gaps(told: Sequence[tuple[int, float]], ranks: Mapping[int, int]) -> Iterator[_Gap]:
    above, high = 0, 1.0
    for token, logprob in told:
        share = math.exp(logprob)
        if (n := ranks.get(token, 0) - 1 - above) > 0:
            yield _Gap(n, share, high)
            above += n
        above, high = above + 1, share


def _closest(others: Callable[[float], list[float]], nats: float) -> list[float]:
    """Return the parts whose entropy is the wanted one, or comes closest to it."""

    def error(height: float) -> float:
        return sum(-share * math.log(share) for share in others(height)) - nats

    heights = [i / 16 for i in range(-16, 17)]
    errors = [error(height) for height in heights]
    for i in range(32):
        if errors[i] * errors[i + 1] < 0:
            low, high = heights[i], heights[i + 1]
            for _ in range(40):
                middle = (low + high) / 2
                if error(middle) * errors[i] > 0:
                    low = middle
                else:
                    high = middle
            return others(low)
    return others(min(zip(map(abs, errors), heights, strict=True))[1])


def draft_row(
    told: dict[int, float], margin: float, size: int, avoid: Collection[int] = (), height: float = 0.5
) -> Row:
    """Return a row [size] in which tokens have these probabilities, and the best stands `margin` above the second.

    The best is the likeliest of them where that can be, else one that nobody drafted.

    Args:
        told: id -> probability.
        height: of a best one that nobody drafted: from 0, as low as can be, to 1.
    """
    row = np.full(size, NOTHING, np.float32)
    free = iter(_free(size, list(told.items()), avoid))
    margin = min(margin, _CERTAIN)
    best, left = max(told.values()), 1 - sum(told.values())
    available = size - len(told) - len(avoid) - 3
    for token, probability in told.items():
        row[token] = math.log(max(probability, 1e-30))
    if not _can_be_best(told, margin, size):
        lowest = max(best * math.exp(margin), left / (1 + 0.9 * available * math.exp(-margin)), 1e-30)
        highest = max(0.9 * left / (1 + math.exp(-margin)), lowest)
        best = lowest * (highest / lowest) ** height
        _fill(row, free, math.log(best))
        left -= best
    second = max(best * math.exp(-margin), 1e-30)
    if not _has(told, second):
        _fill(row, free, math.log(second))
        left -= second
    # each of the rest stays below the second
    n = min(max(1, math.ceil(left / (0.95 * second))), available) if left > 1e-9 else 0
    for _ in range(n):
        _fill(row, free, math.log(left / n))
    return row


def _can_be_best(told: dict[int, float], margin: float, size: int) -> bool:
    """Whether the likeliest of some tokens can be the best of all with this margin."""
    best = max(told.values())
    second = max(best * math.exp(-margin), 1e-30)
    left = 1 - sum(told.values()) - (0 if _has(told, second) else second)
    behind = [probability for probability in told.values() if probability < best]
    return all(one <= second * 1.001 for one in behind) and -1e-5 <= left <= 0.9 * second * (size - 64)


def _has(told: dict[int, float], probability: float) -> bool:
    return any(abs(one / probability - 1) < 1e-3 for one in told.values())


def _free(size: int, told: Sequence[tuple[int, float]], avoid: Collection[int]) -> Iterator[int]:
    taken = {token for token, _ in told} | set(avoid)
    return (token for token in range(size) if token not in taken)


def _fill(row: Row, free: Iterator[int], logprob: float) -> None:
    token = next(free, None)
    if token is not None:
        row[token] = logprob


def _shares(left: float, nats: float, most: float, available: int) -> list[float]:
    """Divide a mass so that it has this entropy, none of the parts above `most`: equal parts and a smaller one."""
    if left < 1e-7 or available < 1:
        return []
    fewest = max(1, math.ceil(left / (most * (1 - 1e-6))))
    wanted = math.exp(min(nats / left + math.log(left), math.log(available)))
    n = min(max(fewest, int(wanted)), available)
    if n == available or wanted <= n:
        return [left / n] * n
    low, high = 0.0, left / (n + 1)
    for _ in range(40):  # the entropy grows with the smaller part, until it is as large as the others
        middle = (low + high) / 2
        if _entropy(left, n, middle) < nats:
            low = middle
        else:
            high = middle
    return [(left - low) / n] * n + ([low] if low > 1e-12 else [])


def _entropy(left: float, n: int, small: float) -> float:
    part = (left - small) / n
    return -n * part * math.log(part) - (small * math.log(small) if small else 0.0)
