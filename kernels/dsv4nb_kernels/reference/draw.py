"""The next token of each row: bias, penalties, filters and the position-keyed draw (dspark.md 5.1, 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4nb_kernels.reference import _fixed

NOBODY = -1  # the id of a row without a finite best logit
GREEDY_BELOW = 1e-5  # a temperature that is not sampled with
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one row is drawn from.

    Attributes:
        temperature: below 1e-5 the best is taken.
        top_k: keep the k best, 0 = off; 1 takes the best.
        top_p: keep the shortest prefix with this mass, in (0, 1].
        min_p: drop what is less likely than min_p times the best, in [0, 1).
        repetition, frequency, presence: penalties of ids with a count; 1, 0 and 0 are off.
        seed: key of the draw, 0 <= seed < 2^64.
        position: place of the drawn token; stream: which of the independent draws there.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    seed: int = 0
    position: int = 0
    stream: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


class Drawn(NamedTuple):
    """What was drawn from each row.

    Attributes:
        ids: [T] int64; -1 where the best of the processed row is not finite.
        log_probs: [T], log-softmax of the row as given at the id, temperature 1; NaN where there is none.
    """

    ids: Tensor
    log_probs: Tensor


def draw(logits: Tensor, rules: Sequence[Rule], *, bias: Tensor | None = None, counts: Tensor | None = None) -> Drawn:
    """Draw one token of each row.

    Args:
        logits: [T, V] float32; not changed.
        rules: of each row.
        bias: [T, V] float64, added; -inf bans an id, as a mask does.
        counts: [T, V], how often each id stands in the window of the penalties.
    """
    ids, log_probs = [], []
    for i, (row, rule) in enumerate(zip(logits, rules, strict=True)):
        chosen = draw_row(
            process(row, rule, None if bias is None else bias[i], None if counts is None else counts[i]), rule
        )
        ids.append(chosen)
        log_probs.append(math.nan if chosen == NOBODY else row.double().log_softmax(0)[chosen].item())
    return Drawn(torch.tensor(ids), torch.tensor(log_probs))


def process(row: Tensor, rule: Rule, bias: Tensor | None, counts: Tensor | None) -> Tensor:
    """Return the row [V] with bias and penalties; each of the two steps rounds once to float32."""
    if bias is not None:
        row = (row.double() + bias).float()
    if counts is not None:
        wide = row.double()
        wide = torch.where(wide > 0, wide / rule.repetition, wide * rule.repetition)
        wide = wide - rule.frequency * counts.double()
        wide = wide - rule.presence
        row = torch.where(counts > 0, wide.float(), row)
    return row


def draw_row(row: Tensor, rule: Rule) -> int:
    """Draw from one processed row [V]."""
    best = row.amax()
    if not best.isfinite():
        return NOBODY
    # the sorted list: by logit, then by id
    values, order = row.sort(descending=True, stable=True)
    if rule.is_greedy:
        return int(order[0])
    log_weights = ((values.double() - best.double()) / rule.temperature).numpy()
    n = int((values > -math.inf).sum())
    if rule.top_k:
        n = min(n, rule.top_k)
    if rule.top_p < 1:
        mass = _fixed.masses(log_weights[:n])
        n = int(np.searchsorted(mass.cumsum(), _fixed.reaching(int(mass.sum()), rule.top_p))) + 1
    if rule.min_p:
        n = min(n, int((log_weights >= math.log(rule.min_p)).sum()))
    ids = order[:n].numpy()
    scores = _fixed.scores(log_weights[:n], _fixed.times(random_words(ids, rule)))
    return int(ids[scores == scores.max()].min())


def random_words(ids: np.ndarray[tuple[int], np.dtype[np.int64]], rule: Rule) -> _fixed.Words:
    """Return the word of each id: Philox-4x32-10 of the counter (position, id div 4, stream, 0), word id mod 4."""
    counter = [np.full(ids.shape, n & _MASK, np.uint64) for n in (rule.position, 0, rule.stream, 0)]
    counter[1] = (ids >> 2).astype(np.uint64)
    key = [rule.seed & _MASK, rule.seed >> 32]
    for _ in range(_ROUNDS):
        even, odd = counter[0] * np.uint64(_MULTIPLIERS[0]), counter[2] * np.uint64(_MULTIPLIERS[1])
        counter = [
            (odd >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            odd & np.uint64(_MASK),
            (even >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            even & np.uint64(_MASK),
        ]
        key = [(word + step) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True)]
    words: _fixed.Words = np.stack(counter)[ids & 3, np.arange(ids.shape[0])].astype(np.uint32)
    return words
