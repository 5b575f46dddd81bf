"""The sampler against the definitions of dspark.md 6: sorted prefixes, Philox, and the race."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.sampler import arrivals, choose, keep, philox, philox_rounds
from dsv4nb.errors import EngineError

V = 129_280
Row = npt.NDArray[np.float32]


def row_of(n: int, seed: int, *, scale: float = 3.0, steps: float = 0.0) -> Row:
    """Draw logits; with `steps` they are rounded to multiples of it, so that many are equal."""
    row = np.random.default_rng(seed).standard_normal(n) * scale
    return (np.round(row / steps) * steps if steps else row).astype(np.float32)


def sorted_prefix(row: Row, config: SamplerConfig) -> set[int]:
    """The kept ids, from the definition: one sorted list, three lengths, the shortest wins."""
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    order = order[: config.top_k or len(order)]
    weights = [math.exp((float(row[v]) - float(row[order[0]])) / config.temperature) for v in order]
    total, mass, n_p = math.fsum(weights), 0.0, len(order)
    if config.top_p < 1:
        for n_p, weight in enumerate(weights, 1):  # noqa: B007
            mass += weight
            if mass >= config.top_p * total:
                break
    n_m = sum(weight >= config.min_p for weight in weights)
    return set(order[: max(1, min(n_p, n_m))])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    given = np.array(counter, np.uint32).reshape(4, 1)
    assert tuple(int(word) for word in philox_rounds(given, key)[:, 0]) == words


def test_the_counter_is_position_block_stream() -> None:
    seed = 0x299F31D0_A4093822
    blocks = np.array([0, 1, 32_319])
    for column, block in enumerate(blocks):
        one = np.array([[7], [block], [3], [0]], np.uint32)
        expected = philox_rounds(one, (0xA4093822, 0x299F31D0))[:, 0]
        assert (philox(blocks, seed, 7, 3)[:, column] == expected).all()


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.3},
        {"top_p": 0.999, "temperature": 4.0},
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.2, "temperature": 0.7},
        {"top_p": 1e-9},
    ],
    ids=str,
)
@pytest.mark.parametrize(("scale", "steps"), [(3.0, 0.0), (2.0, 0.5), (0.01, 0.0), (0.0, 0.0)])
def test_the_filters_keep_the_shortest_prefix(values: dict[str, Any], scale: float, steps: float) -> None:
    """Plain rows, rows with many ties at every border, nearly flat rows, and one where all are equal."""
    config = SamplerConfig(**values)
    for seed in range(5):
        row = row_of(257, seed, scale=scale, steps=steps)
        ids, log_weights = keep(row, config)
        assert set(ids.tolist()) == sorted_prefix(row, config)
        assert (np.diff(ids) > 0).all() and log_weights.max() == 0


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": 1e-6}, {"top_k": 1}])
def test_greedy_takes_the_lowest_of_equals(values: dict[str, Any]) -> None:
    row = np.zeros(100, np.float32)
    row[[17, 41, 80]] = 5.0
    assert choose(row, SamplerConfig(**values), 3) == 17


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1, "temperature": 2.0}],
    ids=str,
)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    """Chi-square over seeds; 99.99 % of honest samplers pass, and the seeds are fixed."""
    row = row_of(12, 5, scale=1.5)
    n = 4000
    counts = np.zeros(12)
    for seed in range(n):
        counts[choose(row, SamplerConfig(seed=seed, **values), 11)] += 1
    ids, log_weights = keep(row, SamplerConfig(**values))
    p = np.exp(log_weights) / np.exp(log_weights).sum()
    assert counts.sum() == counts[ids].sum()
    statistic = float(((counts[ids] - n * p) ** 2 / (n * p)).sum())
    degrees = len(ids) - 1
    # Wilson and Hilferty's approximation of the 0.9999 quantile
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def test_positions_draw_independently() -> None:
    """Neighbouring positions of one seed agree as often as chance has it: p² + q² of two equal tokens."""
    row = np.zeros(2, np.float32)
    drawn = np.array([choose(row, SamplerConfig(seed=9), position) for position in range(4000)])
    agree = int((drawn[1:] == drawn[:-1]).sum())
    assert abs(agree - 1999.5) < 4 * math.sqrt(1000)
    assert abs(int(drawn.sum()) - 2000) < 4 * math.sqrt(1000)


def test_a_draw_depends_on_seed_position_and_stream_alone() -> None:
    row = row_of(V, 1, scale=1.0)
    config = SamplerConfig(seed=2**64 - 1)
    before = row.copy()
    drawn = [choose(row, config, position) for position in (1, 2, 3)]
    assert [choose(row, config, position) for position in (3, 2, 1)] == drawn[::-1]
    assert (row == before).all()
    assert len(set(drawn)) == 3
    assert choose(row, SamplerConfig(seed=0), 1) != drawn[0]
    assert choose(row, config, 1, stream=1) != drawn[0]


def test_a_token_arrives_when_it_does_whoever_else_races() -> None:
    """Few tokens are drawn alone and many in one sweep; both are the same numbers."""
    whole = arrivals(np.arange(V), V, 5, 160)
    some = np.sort(np.random.default_rng(0).choice(V, 50, replace=False))
    assert (arrivals(some, V, 5, 160) == whole[some]).all()
    most = np.arange(3, V, 2)
    assert (arrivals(most, V, 5, 160) == whole[most]).all()
    assert whole.dtype == np.float32 and whole.min() > 0 and np.isfinite(whole).all()


def test_what_cannot_win_is_left_out_without_changing_the_winner() -> None:
    for position in range(40):
        row = row_of(2000, position, scale=12.0)
        config = SamplerConfig(seed=4)
        ids, log_weights = keep(row, config)
        score = log_weights.astype(np.float32) - np.log(arrivals(ids, 2000, 4, position))
        assert choose(row, config, position) == int(ids[score.argmax()])


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    row = row_of(1000, 3, steps=0.25)
    for values in ({}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20}):
        config = SamplerConfig(seed=1, **values)  # type: ignore[arg-type]
        assert [choose(row, config, i) for i in range(30)] == [choose(row + 8, config, i) for i in range(30)]


def test_the_limits_of_the_filters_are_greedy() -> None:
    row = row_of(1000, 6)
    best = int(row.argmax())
    for config in (SamplerConfig(top_p=1e-12), SamplerConfig(min_p=1 - 1e-9), SamplerConfig(temperature=1e-4)):
        assert {choose(row, config, position) for position in range(20)} == {best}


def test_a_filter_wider_than_the_vocabulary_filters_nothing() -> None:
    row = row_of(64, 2)
    for position in range(20):
        assert choose(row, SamplerConfig(top_k=1000), position) == choose(row, SamplerConfig(), position)


def test_forbidden_tokens_are_never_drawn() -> None:
    row = row_of(300, 8, scale=1.0)
    row[1:] = -np.inf
    for values in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 7}, {"top_k": 7, "top_p": 0.5}):
        assert choose(row, SamplerConfig(**values), 0) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_numbers_are_refused(bad: float, temperature: float) -> None:
    row = row_of(100, 0)
    row[42] = bad
    with pytest.raises(EngineError, match="logit"):
        choose(row, SamplerConfig(temperature=temperature), 0)
    with pytest.raises(EngineError, match="-inf"):
        choose(np.full(100, -np.inf, np.float32), SamplerConfig(temperature=temperature), 0)


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_p": 0.95}, {"top_k": 50, "min_p": 0.05}], ids=str)
def test_a_whole_vocabulary_takes_milliseconds(values: dict[str, Any]) -> None:
    """About 2 ms where nothing else runs; the bound only catches a wrong method."""
    row = row_of(V, 0)
    config = SamplerConfig(**values)
    taken = []
    for position in range(7):
        start = time.perf_counter()
        choose(row, config, position)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.02
