"""The next token of one processed row: filters, then a draw that needs logits, position and seed alone (dspark.md 6).

Every filter keeps the beginning of one list, sorted by logit and then by id, so a filter is a number of tokens. The
draw of the engine is a race: each kept token gets an exponential arrival time from a counter-based generator, divided
by its probability, and the earliest wins. The compatibility draw walks the sorted list until its mass passes a uniform
number. Nothing is remembered between draws, so a draw is the same in any batch, order and run.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import EngineError
from dsv4nb_kernels.reference import _fixed

TARGET_STREAM = 0  # draws of the model itself; drafts that must agree with it use the same stream

Words = npt.NDArray[np.uint32]
Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF

_LARGEST_U = np.float32(1 - 2.0**-24)
# -ln of an arrival time lies in [-2.82, 22.88]: what is further behind the best than their distance cannot win
_REACH = 26.0
_DOUBT = 1e-3  # far more than the library's float32 logarithms are off
_SORTED = 1024  # halving goes on until so few weights are left; halving on costs more than sorting them


def choose(row: Row, config: SamplerConfig, position: int, stream: int = TARGET_STREAM) -> int:
    """Return the id of the token at `position`.

    Args:
        row: [V] processed logits that predict `position`; not changed. -inf is never chosen.
        position: absolute place of the chosen token, the prompt counted.
        stream: which of the independent draws at this position; the inverse CDF has one.

    Raises:
        EngineError: the row holds a NaN or +inf, or no finite logit.
    """
    if config.is_greedy:
        top = int(row.argmax())  # the first of equals
        require_finite(row[top])
        return top
    require_finite(row.max())
    ids, log_weights = keep(row, config)
    if config.sampler == "inverse_cdf":
        assert stream == TARGET_STREAM, stream
        place = _place(log_weights, uniform(config.seed, position), "right")
        return int(ids[_at(row[ids], place)])
    return race(ids, log_weights, row.shape[0], config.seed, position, stream)


def require_finite(best: np.float32) -> None:
    """Check the largest logit of a row.

    Raises:
        EngineError: it is a NaN or infinite.
    """
    if not np.isfinite(best):
        raise EngineError(f"the best logit of the row is {best}; the network's numbers broke")


def keep(row: Row, config: SamplerConfig) -> tuple[Ids, Weights]:
    """Return the tokens that pass the filters, ascending, and their log-weights, 0 for the best.

    A token of logit -inf passes none, not even when every filter is off.
    """
    possible = row > -np.inf
    if not possible.all():
        ids = np.flatnonzero(possible)
    elif 0 < config.top_k < row.shape[0]:
        ids = best(row, config.top_k)
    else:
        return _keep_mass(row, config)
    places, log_weights = keep(row[ids], config)
    return ids[places], log_weights


def _keep_mass(logits: Row, config: SamplerConfig) -> tuple[Ids, Weights]:
    """`keep` of finite logits without top-k."""
    log_weights = logits.astype(np.float64)
    log_weights -= log_weights.max()
    log_weights /= config.temperature
    n = logits.shape[0]
    if config.top_p < 1:
        n = _place(log_weights, config.top_p, "left") + 1
    if config.min_p:
        n = min(n, int(np.count_nonzero(log_weights >= math.log(config.min_p))))
    if n == logits.shape[0]:
        return np.arange(n), log_weights
    places = best(logits, n)
    return places, log_weights[places]


def best(row: Row, n: int) -> Ids:
    """Return the ids of the `n` largest, ascending, 1 <= n <= V; of equals at the border, the lowest ids."""
    border = _nth(row, n)
    kept = row >= border
    if surplus := int(np.count_nonzero(kept)) - n:
        kept[np.flatnonzero(row == border)[-surplus:]] = False
    return np.flatnonzero(kept)


def _nth(row: Row, n: int) -> np.float32:
    """The n-th largest value, counted from 1."""
    value: np.float32 = np.partition(row, row.shape[0] - n)[row.shape[0] - n]
    return value


def _at(row: Row, place: int) -> int:
    """The index of what stands at `place` of the sorted list, counted from 0."""
    value = _nth(row, place + 1)
    return int(np.flatnonzero(row == value)[place - np.count_nonzero(row > value)])


def _place(log_weights: Weights, share: float, side: Literal["left", "right"]) -> int:
    """The place of the sorted list, counted from 0, where its mass reaches (left) or passes (right) `share` of all.

    Tokens of one logit have one weight, so weights are compared without their ids. Halves that the place is not in
    are summed and never sorted.
    """
    masses = _fixed.masses(log_weights)
    masses = masses[masses > 0]
    wanted = (_fixed.reaching if side == "left" else _fixed.passing)(int(masses.sum()), share)
    place, mass = 0, 0
    while (size := masses.shape[0]) > _SORTED:
        middle = size // 2
        masses.partition(middle)
        upper = mass + int(masses[middle:].sum())
        if upper >= wanted:
            masses = masses[middle:]
        else:
            place, mass, masses = place + size - middle, upper, masses[:middle]
    return place + int(np.searchsorted(mass + np.cumsum(np.sort(masses)[::-1]), wanted))


def race(ids: Ids, log_weights: Weights, vocab: int, seed: int, position: int, stream: int) -> int:
    """Return the id that arrives first; of equals, the lowest.

    Args:
        ids: ascending; log_weights: of each, float64, 0 for the largest.
    """
    can_win = log_weights >= -_REACH
    if 4 * np.count_nonzero(can_win) < vocab:  # with more, `arrivals` draws for all anyway
        ids, log_weights = ids[can_win], log_weights[can_win]
    with np.errstate(over="ignore"):  # beyond float32 is far out of reach
        score = log_weights.astype(np.float32)
    words = random_words(ids, vocab, seed, position, stream)
    times = exponential(words)
    score -= np.log(times, out=times)
    # a library's logarithms differ from machine to machine: where they leave a doubt, these do not
    near = np.flatnonzero(score >= score.max() - _DOUBT)
    ids = ids[near]
    return int(ids[_fixed.scores(log_weights[near], _fixed.times(words[near])).argmax()])  # the first of equals


def uniform(seed: int, position: int) -> float:
    """Return memra's keyed uniform number in [0, 1): splitmix64 of the seed crossed with the position, 53 bits."""
    z = ((seed ^ (position * 0xA24BAED4963EE407)) + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return ((z ^ (z >> 31)) >> 11) / 2**53


def arrivals(ids: Ids, vocab: int, seed: int, position: int, stream: int = TARGET_STREAM) -> Row:
    """Return the exponential arrival time of each token, float32; a token's does not depend on the others."""
    return exponential(random_words(ids, vocab, seed, position, stream))


def random_words(ids: Ids, vocab: int, seed: int, position: int, stream: int = TARGET_STREAM) -> Words:
    """Return the random word of each token; ids ascend, below `vocab`."""
    if 4 * ids.shape[0] < vocab:
        found: Words = philox(ids >> 2, seed, position, stream)[ids & 3, np.arange(ids.shape[0])]
        return found
    words = philox(np.arange((vocab + 3) >> 2), seed, position, stream).T.reshape(-1)
    return words[:vocab] if ids.shape[0] == vocab else words[ids]


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
