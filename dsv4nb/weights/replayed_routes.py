"""Routes as a text has them, for measuring on random weights: which experts each position visits.

Consecutive tokens of a text share experts, and a step of several rows reads each shared one once. Random gates share
next to none: six rows visit 34 of 256 experts, in a text 20. So a table that is replayed names the experts of every
position instead of the gate, and its unions over consecutive positions are those that were measured.

How a table enters an engine: as the table of a hash-routed layer with the position in the place of the token id. In a
step at `pos`, row t visits `table[(pos + t) % len(table)]`, on every layer, hash-routed or not. Weights of the choice
come from the layer's own scores, as on a hash-routed layer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.errors import RequestError

Table = npt.NDArray[np.int32]  # [positions, K], each row ascending

# experts that 1 … 6 consecutive tokens visit, of 6 each: measured on text for 1 … 5 tokens at 160 experts, scaled to
# 256, the last one extrapolated
MEASURED_UNIONS = (6.0, 9.7, 12.8, 15.5, 18.0, 20.4)

_REPAID = 0.1  # of what is owed, each position

_WARM_UP = 64  # positions before the first, so that it has a past like any other


def measured_unions(k: int) -> tuple[float, ...]:
    """Return `MEASURED_UNIONS` for tokens that visit `k` experts each."""
    return tuple(union * (k / MEASURED_UNIONS[0]) for union in MEASURED_UNIONS)


def replayed_tables(config: ModelConfig, positions: int, *, seed: int = 0) -> dict[str, Table]:
    """Return a table for every block, by its name: "layers.0" …, "mtp.0" … of a DSpark drafter; no two alike.

    Raises:
        RequestError: as `replayed_routes`.
    """
    blocks = [f"layers.{layer}" for layer in range(config.num_hidden_layers)]
    blocks += [f"mtp.{stage}" for stage in range(DSPARK_STAGES if config.dspark is not None else 0)]
    k = config.num_experts_per_tok
    return {
        block: replayed_routes(positions, config.n_routed_experts, measured_unions(k), seed=f"{seed} {block}")
        for block in blocks
    }


def replayed_routes(positions: int, n_experts: int, unions: Sequence[float], *, seed: int | str = 0) -> Table:
    """Choose the experts of each position such that n consecutive ones visit `unions[n - 1]` experts on average.

    Over all windows of n positions the mean misses `unions[n - 1]` by less than 10 n / positions.

    Args:
        unions: the first is K, a whole number.

    Raises:
        RequestError: `unions` cannot be, or there are too few experts for them.
    """
    k, back = _shares(unions, n_experts)
    rng = random.Random(seed)
    # recent[i]: the experts that were last visited i + 1 positions ago; owed[i]: how many of them are missing so far
    recent: list[list[int]] = [[] for _ in back]
    owed = [0.0] * len(back)
    rows = []
    for _ in range(_WARM_UP + positions):
        chosen: list[int] = []
        for i, share in enumerate(back):
            # drawn afresh each time, so no rhythm meets that of an engine's rounds; what was too few or too many is
            # made up for slowly, so no mean drifts
            due = max(0, math.floor(share + _REPAID * owed[i] + rng.random()))
            taken = rng.sample(recent[i], min(due, len(recent[i]), k - len(chosen)))
            owed[i] += share - len(taken)
            chosen += taken
        barred = {expert for group in recent for expert in group}
        chosen += rng.sample([expert for expert in range(n_experts) if expert not in barred], k - len(chosen))
        recent = [chosen, *([e for e in group if e not in chosen] for group in recent[:-1])]
        rows.append(sorted(chosen))
    return np.array(rows[_WARM_UP:], np.int32).reshape(positions, k)


def mean_unions(table: Table, longest: int = len(MEASURED_UNIONS)) -> tuple[float, ...]:
    """Return how many experts 1 … `longest` consecutive positions visit, the mean over all of them."""
    means = []
    for n in range(1, longest + 1):
        windows = np.lib.stride_tricks.sliding_window_view(table, n, axis=0)
        ordered = np.sort(windows.reshape(len(windows), -1), axis=1)
        means.append(1 + float((np.diff(ordered, axis=1) != 0).sum(1).mean()))
    return tuple(means)


def _shares(unions: Sequence[float], n_experts: int) -> tuple[int, list[float]]:
    """Return K, and how many of a position's experts were last visited 1, 2, … positions ago, on average."""
    fresh = [unions[0], *(b - a for a, b in pairwise(unions))]
    falls = all(a >= b for a, b in pairwise(fresh))
    k = int(unions[0])
    if k != unions[0] or k < 1 or not falls or fresh[-1] < 0:
        raise RequestError(
            f"unions are {', '.join(f'{u:g}' for u in unions)}; the first must be a whole number of experts, "
            "and each further token must add no fewer than none and no more than the one before",
            param="unions",
        )
    if n_experts < k * len(unions):
        raise RequestError(
            f"n_experts is {n_experts}; {len(unions)} positions of {k} experts each need {k * len(unions)}. "
            "Take more experts, or fewer unions.",
            param="n_experts",
        )
    return k, [a - b for a, b in pairwise(fresh)]
