"""The next token of one row: filters, then a draw that depends on logits, position and seed alone (dspark.md 6).

Every filter keeps the beginning of one list, sorted by logit and then by id. The draw is a race: each kept token gets
an exponential arrival time from a counter-based generator, divided by its probability, and the earliest wins. Nothing
is remembered between draws, so a draw is the same in any batch, order and run.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import EngineError

TARGET_STREAM = 0  # draws of the model itself; drafts that must agree with it use the same stream

Words = npt.NDArray[np.uint32]
Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

_LARGEST_U = np.float32(1 - 2.0**-24)
# -ln of an arrival time lies in [-2.82, 22.88]: what is further behind the best than their distance cannot win
_REACH = 26.0
_BINS, _DEPTH = 1024, 20.0  # histogram of the log-weights down to e^-20; what is below shares the last bin


def choose(row: Row, config: SamplerConfig, position: int, stream: int = TARGET_STREAM) -> int:
    """Return the id of the token at `position`.

    Args:
        row: [V] logits that predict `position`; not changed.
        position: absolute place of the chosen token, the prompt counted.

    Raises:
        EngineError: the row holds a NaN, or no finite logit.
    """
    if config.is_greedy:
        best = int(row.argmax())  # the first of equals
        _require_finite(float(row[best]))
        return best
    _require_finite(float(row.max()))
    ids, log_weights = keep(row, config)
    return _winner(ids, log_weights, row.shape[0], config.seed, position, stream)


def keep(row: Row, config: SamplerConfig) -> tuple[Ids, Weights]:
    """Return the tokens that pass the filters, ascending, and their log-weights, 0 for the best."""
    ids = _top(row, config.top_k) if 0 < config.top_k < row.shape[0] else np.arange(row.shape[0])
    scaled = row[ids].astype(np.float64) if ids.shape[0] < row.shape[0] else row.astype(np.float64)
    scaled -= scaled.max()
    scaled /= config.temperature
    if config.top_p == 1 and not config.min_p:
        return ids, scaled
    kept = np.ones(ids.shape[0], np.bool_) if config.top_p == 1 else _holds_mass(scaled, config.top_p)
    if config.min_p:
        kept &= scaled >= math.log(config.min_p)
    places = np.flatnonzero(kept)
    return ids[places], scaled[places]


def _top(row: Row, n: int) -> Ids:
    """The ids of the `n` best, ascending; of equals at the border, the lowest."""
    border = np.partition(row, row.shape[0] - n)[row.shape[0] - n]
    better, equal = np.flatnonzero(row > border), np.flatnonzero(row == border)
    return np.sort(np.concatenate((better, equal[: n - better.shape[0]])))


def _holds_mass(scaled: Weights, top_p: float) -> npt.NDArray[np.bool_]:
    """Whether each token is in the shortest beginning of the sorted list that has the share `top_p` of the mass.

    Only the bin of the histogram in which the share is reached is sorted.
    """
    weights = np.exp(scaled)
    depth = min(_DEPTH, -float(scaled.min())) or 1.0
    bins = np.minimum(scaled * (-_BINS / depth), _BINS).astype(np.int64)
    cumulated = np.cumsum(np.bincount(bins, weights, _BINS + 1))
    wanted = top_p * cumulated[-1]
    border = int(np.searchsorted(cumulated, wanted))
    kept: npt.NDArray[np.bool_] = bins < border
    members = np.flatnonzero(bins == border)
    members = members[np.argsort(-scaled[members], kind="stable")]
    before = cumulated[border - 1] if border else 0.0
    needed = int(np.searchsorted(before + np.cumsum(weights[members]), wanted)) + 1
    kept[members[:needed]] = True
    return kept


def _winner(ids: Ids, log_weights: Weights, vocab: int, seed: int, position: int, stream: int) -> int:
    """The id that arrives first; of equals, the lowest."""
    can_win = log_weights >= -_REACH
    if not can_win.all():
        ids, log_weights = ids[can_win], log_weights[can_win]
    score = log_weights.astype(np.float32)
    score -= np.log(arrivals(ids, vocab, seed, position, stream))
    return int(ids[score.argmax()])  # the first of equals


def arrivals(ids: Ids, vocab: int, seed: int, position: int, stream: int = TARGET_STREAM) -> Row:
    """Return the exponential arrival time of each token, float32; a token's does not depend on the others."""
    if 4 * ids.shape[0] < vocab:
        words = philox(ids >> 2, seed, position, stream)[ids & 3, np.arange(ids.shape[0])]
    else:
        words = philox(np.arange((vocab + 3) >> 2), seed, position, stream).T.reshape(-1)
        words = words[:vocab] if ids.shape[0] == vocab else words[ids]
    return exponential(words)


def exponential(words: Words) -> Row:
    """Return the exponential arrival time that each random word stands for: finite and above zero."""
    u: Row = words.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.minimum(u, _LARGEST_U, out=u)
    np.negative(u, out=u)
    np.log1p(u, out=u)  # -ln(u) would give the largest words the time 0, and they would always win
    np.negative(u, out=u)
    return u


def philox(blocks: Ids, seed: int, position: int, stream: int) -> Words:
    """Run Philox-4x32-10 with key `seed` on the counters (position, block, stream, 0); return [4, n] words."""
    counter = np.empty((4, blocks.shape[0]), np.uint32)
    counter[0], counter[1], counter[2], counter[3] = position & _MASK, blocks, stream, 0
    return philox_rounds(counter, (seed & _MASK, seed >> 32))


def philox_rounds(counter: Words, key: tuple[int, int]) -> Words:
    """Apply the ten rounds to counters [4, n], in place; return them."""
    key_0, key_1 = key
    even: npt.NDArray[np.uint64] = np.empty(counter.shape[1], np.uint64)
    odd = np.empty_like(even)
    (even_low, even_high), (odd_low, odd_high) = _halves(even), _halves(odd)
    for _ in range(_ROUNDS):
        np.multiply(counter[0], _MULTIPLIERS[0], out=even, dtype=np.uint64)
        np.multiply(counter[2], _MULTIPLIERS[1], out=odd, dtype=np.uint64)
        np.bitwise_xor(odd_high, counter[1], out=counter[0])
        counter[0] ^= np.uint32(key_0)
        np.bitwise_xor(even_high, counter[3], out=counter[2])
        counter[2] ^= np.uint32(key_1)
        counter[1], counter[3] = odd_low, even_low
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _MASK, (key_1 + _KEY_STEPS[1]) & _MASK
    return counter


def _halves(words: npt.NDArray[np.uint64]) -> tuple[Any, Any]:
    """The low and the high halves of 64-bit words, as views."""
    split = words.view(np.uint32)
    return (split[0::2], split[1::2]) if sys.byteorder == "little" else (split[1::2], split[0::2])


def _require_finite(best: float) -> None:
    if not np.isfinite(best):
        raise EngineError(f"the best logit of the row is {best}; the network's numbers broke")
