"""How likely the model found a chosen token, and what it would rather or also have said."""

from __future__ import annotations

import math

import numpy as np

from dsv4nb.engine.protocol import Row
from dsv4nb.engine.sampler import best, require_finite
from dsv4nb.errors import RequestError
from dsv4nb.events import TokenLogprob

MAX_LOGPROBS = 20  # alternatives; what the OpenAI API serves
_NO_WEIGHT = -800.0  # e^-800 is 0 in float64


def probability_of(row: Row, token: int) -> float:
    """Return the softmax of a row [V] at `token`, for show: summed in float32. NaN where the row holds one."""
    return float(1.0 / np.exp(row - row[token]).sum(dtype=np.float32)) if row[token] > -np.inf else 0.0


def margin_of(row: Row) -> float:
    """Return how far the best logit of a row [V] stands above the second."""
    second, first = np.partition(row, row.shape[0] - 2)[-2:]
    return float(first - second)


def logprob_of(row: Row, chosen: int, n: int) -> TokenLogprob:
    """Return the log-softmax at `chosen` and at the `n` best tokens, and the entropy of the whole row.

    It is taken from the raw row, before mask, bias, penalties and temperature. So it tells what the model thinks,
    however the sampler is set, and is the same on every route, since a row has the same bits in any batch.

    Args:
        row: [V] float32 logits of the model; the sum runs in float64.
        chosen: an id, 0 <= chosen < V.
        n: alternatives, 0 <= n <= MAX_LOGPROBS, the chosen token among them where it belongs; a logit of -inf is none.

    Raises:
        RequestError: `n` is outside its range.
        EngineError: the row holds a NaN or +inf, or no finite logit.
    """
    if not 0 <= n <= MAX_LOGPROBS:
        raise RequestError(f"logprobs is {n}; 0 to {MAX_LOGPROBS} alternatives are reported", param="logprobs")
    assert 0 <= chosen < row.shape[0], chosen
    peak = row.max()
    require_finite(peak)
    below = row.astype(np.float64)
    below -= peak
    weights = np.exp(below)
    total = weights.sum()
    log_total = math.log(total)
    np.maximum(below, _NO_WEIGHT, out=below)  # what weighs nothing adds nothing, -inf included
    below *= weights  # a dot product would wait for the library's other threads, on a busy machine for milliseconds
    entropy = log_total - float(below.sum()) / total

    def logprob(token: int) -> float:
        return float(row[token]) - float(peak) - log_total

    ids = best(row, min(n, row.shape[0])).tolist() if n else []
    top = sorted((token for token in ids if row[token] > -np.inf), key=lambda token: (-row[token], token))
    before = np.count_nonzero(row > row[chosen]) + np.count_nonzero(row[:chosen] == row[chosen])
    return TokenLogprob(
        id=chosen,
        logprob=logprob(chosen),
        rank=1 + int(before),
        entropy=max(0.0, float(entropy)),
        top=tuple((token, logprob(token)) for token in top),
    )
