"""Rejection sampling of drafts (Leviathan, Chen; dspark.md 3.4 B): the model's distribution, not its plain text.

Three uses of chance, three streams: the draft, the test whether it is taken, and what stands in its place. A stream
that served two of them would bend the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.protocol import Row
from dsv4nb.engine.sampler import Ids, Weights, keep, philox, race, require_finite

DRAFT_STREAM, TEST_STREAM, REST_STREAM = 1, 2, 3
NO_MASS = 1e-8  # less is left over by rounding alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A draft, and the distribution that it was drawn from.

    Attributes:
        ids: what the filters kept, ascending; probs: [n] float64, of each.
    """

    token: int
    ids: Ids
    probs: Weights

    def prob(self, ids: Ids) -> Weights:
        """Return the probability of each of `ids`, 0 for those that the filters dropped."""
        return _look_up(self.ids, self.probs, ids)


def distribution(row: Row, config: SamplerConfig) -> tuple[Ids, Weights]:
    """Return what the filters keep of a processed row, ascending, and its probabilities, which sum to 1.

    Raises:
        EngineError: the row holds a NaN or +inf, or no finite logit.
    """
    require_finite(row.max())
    ids, log_weights = keep(row, config)
    probs = np.exp(log_weights)
    return ids, probs / probs.sum()


def draw(row: Row, config: SamplerConfig, position: int) -> Drawn:
    """Draw a draft for `position` from the drafter's processed row [V]."""
    ids, probs = distribution(row, config)
    return Drawn(token=_drawn(ids, probs, row.shape[0], config, position, DRAFT_STREAM), ids=ids, probs=probs)


def decide(row: Row, config: SamplerConfig, position: int, drawn: Drawn | None) -> int:
    """Return the token at `position`: the draft, or what the model draws in its place.

    Args:
        row: [V] processed logits of the model.
        drawn: the draft for this position, None behind the last one.

    Raises:
        EngineError: as `distribution`.
    """
    ids, probs = distribution(row, config)
    rest = probs
    if drawn is not None:
        one = np.array([drawn.token])
        if uniform(config.seed, position) * drawn.prob(one)[0] < _look_up(ids, probs, one)[0]:
            return drawn.token
        rest = np.maximum(probs - drawn.prob(ids), 0.0)
        if rest.sum() <= NO_MASS:
            rest = probs
    return _drawn(ids, rest, row.shape[0], config, position, REST_STREAM)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that a draft at `position` is tested with: 32 bits."""
    return int(philox(np.zeros(1, np.int64), seed, position, TEST_STREAM)[0, 0]) / 2**32


def _drawn(ids: Ids, weights: Weights, vocab: int, config: SamplerConfig, position: int, stream: int) -> int:
    """Draw one of `ids` by weights that need not sum to 1."""
    ids, weights = ids[weights > 0], weights[weights > 0]
    return race(ids, np.log(weights / weights.max()), vocab, config.seed, position, stream)


def _look_up(ids: Ids, probs: Weights, wanted: Ids) -> Weights:
    places = np.minimum(np.searchsorted(ids, wanted), ids.shape[0] - 1)
    found: Weights = np.where(ids[places] == wanted, probs[places], 0.0)
    return found
