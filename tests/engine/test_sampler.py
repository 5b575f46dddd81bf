"""Filters and the position-keyed draw of one row."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.sampler import arrivals, best, choose, exponential, keep, philox, philox_rounds, uniform
from dsv4nb.errors import EngineError

# counter, key, result: the known answers that Random123 publishes for philox4x32-10
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def listed(logits: list[float], config: SamplerConfig) -> tuple[list[int], list[float]]:
    """The kept tokens in the order of the sorted list and the mass up to each, by the words of dspark.md 6.2."""
    ranked = sorted((i for i, x in enumerate(logits) if x > -INF), key=lambda i: (-logits[i], i))
    ranked = ranked[: config.top_k or None]
    weights = [math.exp((logits[i] - logits[ranked[0]]) / config.temperature) for i in ranked]
    cumulated = list(itertools.accumulate(weights))
    # neither side is asked about a border that rounding decides
    assume(config.top_p == 1 or all(abs(c / cumulated[-1] - config.top_p) > 1e-9 for c in cumulated))
    assume(not config.min_p or all(abs(w / config.min_p - 1) > 1e-9 for w in weights))
    n_p = 1 + bisect.bisect_left(cumulated, config.top_p * cumulated[-1]) if config.top_p < 1 else len(ranked)
    n = min(n_p, sum(w >= config.min_p for w in weights))
    return ranked[:n], cumulated[:n]


INF = math.inf
LOGITS = st.lists(
    st.one_of(st.sampled_from([-INF, 0.0, 1.0, 1.5]), st.floats(-20, 20, width=32)), min_size=1, max_size=8
).filter(lambda logits: max(logits) > -INF)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.integers(0, 9),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    }
)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    counters = np.array([words(counter)] * 3, np.uint32).T.copy()
    low, high = words(key)
    assert philox_rounds(counters, (low, high)).T.tolist() == [words(result)] * 3


def test_philox_takes_the_seed_as_two_words_and_the_place_as_counter() -> None:
    counter = np.array([[7], [5], [2], [0]], np.uint32)
    expected = philox_rounds(counter, (0x89ABCDEF, 0x01234567))
    assert philox(np.array([5]), 0x0123456789ABCDEF, 7, 2).tolist() == expected.tolist()


class TestGreedy:
    def test_m41_a_tie_goes_to_the_lowest_id(self) -> None:
        assert choose(row(1, 3, 3, 2, 3), SamplerConfig(temperature=0), 0) == 1

    @pytest.mark.parametrize("temperature", [-1.0, 0.0, 9e-6])
    def test_m23_no_temperature_is_greedy(self, temperature: float) -> None:
        assert choose(row(0, 1, 2), SamplerConfig(temperature=temperature, top_k=5), 3) == 2

    def test_a17_one_candidate_is_greedy_at_any_temperature(self) -> None:
        assert {choose(row(5, 1, 5), SamplerConfig(temperature=9, top_k=1, seed=s), 3) for s in range(50)} == {0}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_broken_row_is_refused(self, temperature: float, bad: float) -> None:
        with pytest.raises(EngineError, match="broke"):
            choose(row(0, bad, -np.inf), SamplerConfig(temperature=temperature), 0)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_without_any_candidate_is_refused(self, temperature: float) -> None:
        with pytest.raises(EngineError, match="best logit"):
            choose(row(-np.inf, -np.inf), SamplerConfig(temperature=temperature), 0)


class TestFilters:
    # probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625 in scrambled places
    ROW = np.log(np.array([0.0625, 0.5, 0.125, 0.25, 0.0625])).astype(np.float32)

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"top_k": 2}, [1, 3]),
            ({"top_k": 4}, [0, 1, 2, 3]),  # of the two equals at the border, the lowest id
            ({"top_k": 99}, [0, 1, 2, 3, 4]),
            ({"top_p": 0.01}, [1]),
            ({"top_p": 0.6}, [1, 3]),
            ({"top_p": 0.9}, [0, 1, 2, 3]),
            ({"min_p": 0.3}, [1, 3]),
            ({"min_p": 0.99}, [1]),
            ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # 0.75 of 0.875 is more than 0.8
            ({"top_p": 0.9, "min_p": 0.2}, [1, 2, 3]),
            ({"top_p": 0.8, "temperature": 0.5}, [1, 3]),  # 16 : 4 : 1 …
            ({"top_k": 1, "top_p": 0.9, "min_p": 0.9}, [1]),
        ],
        ids=str,
    )
    def test_m34_the_beginning_of_the_sorted_list_is_kept(self, options: dict[str, float], kept: list[int]) -> None:
        ids, weights = keep(self.ROW, SamplerConfig(**options))  # type: ignore[arg-type]
        assert ids.tolist() == kept
        assert weights.max() == 0

    @pytest.mark.parametrize(
        ("logits", "options", "kept"),
        [
            # equal tokens have masses that floats add exactly: a border that is hit exactly needs no further token
            ((0, 0, 0, 0), {"top_p": 0.5}, [0, 1]),
            ((0, 0, 0, 0), {"top_p": 0.5000001}, [0, 1, 2]),
            ((0, 9, 9, 0, 9, 9), {"top_p": 0.25, "temperature": 0.01}, [1]),
            ((0, 9, 9, 0, 9, 9), {"top_p": 0.75, "temperature": 0.01}, [1, 2, 4]),
            ((2, 5, 5, 5), {"top_k": 2}, [1, 2]),
            ((2, 5, 5, 5), {"top_k": 3, "top_p": 0.5}, [1, 2]),
            ((2, 5, 5, 5), {"min_p": 0.99}, [1, 2, 3]),
            # what a mask or a ban took away stays away
            ((-INF, 1, -INF, 2), {}, [1, 3]),
            ((-INF, 1, -INF, 2), {"top_k": 3}, [1, 3]),
            ((-INF, 1, -INF, 2), {"top_k": 9}, [1, 3]),
            ((-INF, 1, -INF, 2), {"top_k": 3, "top_p": 1 - 2**-53}, [1, 3]),
            ((-INF, 1, -INF, 2), {"min_p": 5e-324}, [1, 3]),
            ((-INF, -3, -INF), {"top_p": 0.1, "min_p": 0.5, "top_k": 2}, [1]),
        ],
        ids=str,
    )
    def test_m34_borders_ties_and_bans(
        self, logits: tuple[float, ...], options: dict[str, Any], kept: list[int]
    ) -> None:
        ids, weights = keep(row(*logits), SamplerConfig(**options))
        assert ids.tolist() == kept
        assert np.isfinite(weights).all()

    @settings(max_examples=200, deadline=None)
    @given(logits=LOGITS, options=FILTERS)
    def test_m34_agrees_with_the_sorted_list(self, logits: list[float], options: dict[str, Any]) -> None:
        config = SamplerConfig(**options)
        ranked, cumulated = listed(logits, config)
        assume(not config.is_greedy)
        ids, log_weights = keep(row(*logits), config)
        assert ids.tolist() == sorted(ranked)
        weights = dict(zip(ids.tolist(), np.exp(log_weights).tolist(), strict=True))
        assert list(itertools.accumulate(weights[i] for i in ranked)) == pytest.approx(cumulated, rel=1e-12)

    @settings(max_examples=100, deadline=None)
    @given(logits=LOGITS, options=FILTERS)
    def test_m34_m40_min_p_commutes_with_the_other_filters(self, logits: list[float], options: dict[str, Any]) -> None:
        both, _ = keep(row(*logits), SamplerConfig(**options))
        without, _ = keep(row(*logits), SamplerConfig(**options | {"min_p": 0.0}))
        alone, _ = keep(row(*logits), SamplerConfig(**options | {"top_k": 0, "top_p": 1.0}))
        assert both.tolist() == sorted(set(without.tolist()) & set(alone.tolist()))

    @settings(max_examples=100, deadline=None)
    @given(levels=st.lists(st.integers(0, 3), min_size=1, max_size=9), data=st.data())
    def test_m34_the_best_are_those_of_a_stable_sort(self, levels: list[int], data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(levels)))
        ranked = sorted(range(len(levels)), key=lambda i: (-levels[i], i))
        assert best(row(*levels), n).tolist() == sorted(ranked[:n])

    @pytest.mark.parametrize("top_p", [2**-12, 0.25, 0.5, 0.75, 1 - 2**-12])
    def test_m34_a_border_that_is_hit_exactly_in_a_wide_row(self, top_p: float) -> None:
        ids, _ = keep(np.zeros(4096, np.float32), SamplerConfig(top_p=top_p))
        assert ids.tolist() == list(range(int(4096 * top_p)))

    def test_m34_the_mass_agrees_with_a_full_sort(self) -> None:
        random = np.random.default_rng(5)
        for width in (1, 3, 500, 5000):
            logits = (random.normal(0, 4, width)).round(1).astype(np.float32)  # with many ties
            for top_p in (0.1, 0.5, 0.9, 0.999):
                order = np.lexsort((np.arange(width), -logits))
                p = np.exp((logits[order] - logits.max()).astype(np.float64))
                n = int(np.searchsorted(np.cumsum(p), top_p * p.sum() * (1 - 1e-12))) + 1
                ids, _ = keep(logits, SamplerConfig(top_p=top_p))
                assert ids.tolist() == sorted(order[:n].tolist()), (width, top_p)

    @pytest.mark.parametrize(
        "options", [{}, {"top_p": 0.99}, {"top_k": 3}, {"top_k": 2, "min_p": 0.1}, {"sampler": "inverse_cdf"}], ids=str
    )
    def test_a_logit_of_minus_infinity_is_never_drawn(self, options: dict[str, Any]) -> None:
        drawn = {choose(row(0, -INF, 0, -INF), SamplerConfig(seed=s, **options), 1) for s in range(100)}
        assert drawn == {0, 2}

    @pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e300])
    def test_logits_at_the_end_of_float32_are_no_trouble(self, temperature: float) -> None:
        for logits, winners in ((row(*[-3.4e38] * 3, 3.4e38, 1), {3}), (row(-3.4e38, 3.4e38, 3.4e38, 1), {1, 2})):
            drawn = {choose(logits, SamplerConfig(seed=s, temperature=temperature), 1) for s in range(40)}
            assert drawn == (winners if temperature <= 1 else set(range(len(logits))))


class TestDraw:
    @pytest.mark.parametrize(
        ("options", "n", "expected"),
        [
            ({}, 5_000, [0.4, 0.3, 0.2, 0.1]),
            ({"temperature": 2.0}, 3_000, np.sqrt([0.4, 0.3, 0.2, 0.1]) / np.sqrt([0.4, 0.3, 0.2, 0.1]).sum()),
            ({"top_k": 3}, 3_000, [4 / 9, 3 / 9, 2 / 9, 0.0]),
            ({"sampler": "inverse_cdf"}, 3_000, [0.4, 0.3, 0.2, 0.1]),
        ],
        ids=["plain", "temperature", "top_k", "inverse_cdf"],
    )
    def test_frequencies_are_the_probabilities(self, options: dict[str, float], n: int, expected: list[float]) -> None:
        logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
        counts = np.zeros(4)
        for seed in range(n):
            counts[choose(logits, SamplerConfig(seed=seed, **options), 17)] += 1  # type: ignore[arg-type]
        wanted = np.asarray(expected) * n
        possible = wanted > 0
        assert counts[~possible].sum() == 0
        chi_square = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum()
        assert chi_square < 16.27  # 3 degrees of freedom, one in a thousand; the seeds are fixed

    def test_frequencies_hold_over_positions_too(self) -> None:
        logits, n = np.zeros(5, np.float32), 3_000
        counts = np.bincount([choose(logits, SamplerConfig(seed=3), m) for m in range(n)], minlength=5)
        assert ((counts - n / 5) ** 2 / (n / 5)).sum() < 18.47  # 4 degrees of freedom, one in a thousand

    def test_seed_and_position_decide(self) -> None:
        logits = np.zeros(1000, np.float32)

        def drawn(seed: int) -> list[int]:
            return [choose(logits, SamplerConfig(seed=seed), m) for m in range(20)]

        assert drawn(2**63) == drawn(2**63)
        assert len(set(drawn(2**63))) > 15
        assert drawn(1) != drawn(2)
        assert drawn(1) != drawn(1 + 2**32)  # the upper word counts

    def test_a_drawn_token_does_not_depend_on_the_others_kept(self) -> None:
        few, many = np.array([3, 900, 4001]), np.arange(5000)
        assert arrivals(few, 5000, 7, 9).tolist() == arrivals(many, 5000, 7, 9)[few].tolist()

    def test_the_largest_and_smallest_bits_give_finite_positive_times(self) -> None:
        times = exponential(np.array([0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1], np.uint32))
        assert times.dtype == np.float32
        assert (times > 0).all() and np.isfinite(times).all()
        assert times[0] == pytest.approx(2.0**-33) and times[1] == pytest.approx(1.5 * 2.0**-32)
        assert times[2] == pytest.approx(np.log(2))
        # float32 has no number between the largest u and 1
        assert times[-1] == times[-2] == pytest.approx(24 * np.log(2))

    def test_times_of_many_draws_are_exponential(self) -> None:
        times = np.concatenate([arrivals(np.arange(4096), 4096, seed, 1) for seed in range(20)])
        assert (times > 0).all()
        assert times.mean() == pytest.approx(1.0, abs=0.02)
        assert np.median(times) == pytest.approx(np.log(2), abs=0.02)

    def test_what_is_cut_for_speed_could_not_have_won(self) -> None:
        random = np.random.default_rng(11)
        for seed in range(50):
            logits = random.normal(0, 12, 300).astype(np.float32)
            full = (logits - logits.max()) - np.log(arrivals(np.arange(300), 300, seed, 4))
            assert choose(logits, SamplerConfig(seed=seed), 4) == int(full.argmax())

    def test_m27_a_librarys_logarithms_only_narrow_the_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = np.random.default_rng(5).normal(0, 2, (40, 300)).astype(np.float32)
        drawn = [choose(logits, SamplerConfig(seed=seed), 4) for seed, logits in enumerate(rows)]
        monkeypatch.setattr("dsv4nb.engine.sampler._DOUBT", np.inf)
        assert [choose(logits, SamplerConfig(seed=seed), 4) for seed, logits in enumerate(rows)] == drawn

    def test_m27_a_near_race_is_decided_by_what_every_machine_rounds_alike(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = np.random.default_rng(5).normal(0, 2, (40, 300)).astype(np.float32)
        drawn = [choose(logits, SamplerConfig(seed=seed), 4) for seed, logits in enumerate(rows)]
        log = np.log

        def poor_log(x: Any, **options: Any) -> Any:
            return log(x, **options) + np.float32(3e-4) * (np.arange(x.size) % 2).astype(x.dtype)

        monkeypatch.setattr("dsv4nb.engine.sampler.np.log", poor_log)
        assert [choose(logits, SamplerConfig(seed=seed), 4) for seed, logits in enumerate(rows)] == drawn

    def test_the_row_is_not_changed(self) -> None:
        logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
        before = logits.copy()
        choose(logits, SamplerConfig(top_p=0.5, min_p=0.1), 0)
        assert (logits == before).all()


class TestInverseCdf:
    @pytest.mark.parametrize(
        ("seed", "position", "u"),
        [
            (0, 0, 0.8833108082136426),
            (0, 1, 0.43550389312347204),
            (0, 2, 0.5371701282200345),
            (7, 0, 0.3898297483912715),
            (7, 160, 0.7839042818505566),
            (20260822, 1, 0.48337457467992573),
        ],
    )
    def test_the_uniform_number_has_the_published_values(self, seed: int, position: int, u: float) -> None:
        assert uniform(seed, position) == u

    @pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
    def test_the_uniform_number_stays_below_one(self, seed: int) -> None:
        drawn = [uniform(seed, m) for m in range(2000)]
        assert 0 <= min(drawn) < 0.01 and 0.99 < max(drawn) < 1

    @pytest.mark.parametrize(
        ("position", "token"),
        # u is 0.883, 0.436 and 0.537; the list is 1 (to 0.4), 3 (to 0.7), 0 (to 0.9), 2
        [(0, 0), (1, 3), (2, 3)],
    )
    def test_m34_known_answers(self, position: int, token: int) -> None:
        logits = np.log(np.array([0.2, 0.4, 0.1, 0.3])).astype(np.float32)
        assert choose(logits, SamplerConfig(sampler="inverse_cdf"), position) == token

    # seeds whose uniform number at position 0 is this; splitmix64 can be run backwards
    HALF, LARGEST = 3453682501520545093, 17685126244420568887

    def test_m34_a_border_that_is_hit_exactly_is_passed(self) -> None:
        assert uniform(self.HALF, 0) == 0.5
        config = SamplerConfig(sampler="inverse_cdf", seed=self.HALF)
        assert choose(row(7, 7, 7, 7), config, 0) == 2
        assert choose(np.zeros(4096, np.float32), config, 0) == 2048

    def test_m34_the_last_token_is_taken_when_rounding_leaves_the_mass_short(self) -> None:
        assert uniform(self.LARGEST, 0) == 1 - 2**-53
        config, short = SamplerConfig(sampler="inverse_cdf", seed=self.LARGEST), 0
        for logits in np.random.default_rng(2).normal(0, 1, (50, 1000)).astype(np.float32):
            weights = np.exp(logits.astype(np.float64) - logits.max())
            short += np.cumsum(np.sort(weights)[::-1])[-1] <= weights.sum() * (1 - 2**-53)
            assert choose(logits, config, 0) == logits.argmin()
        assert short > 0

    def test_m34_equals_are_walked_by_id(self) -> None:
        # four equal tokens: token 0 owns [0, 1/4), token 1 [1/4, 1/2) …
        for seed in range(64):
            config = SamplerConfig(sampler="inverse_cdf", seed=seed)
            assert choose(row(7, 7, -INF, 7, 7), config, 5) == [0, 1, 3, 4][int(4 * uniform(seed, 5))]

    @settings(max_examples=300, deadline=None)
    @given(logits=LOGITS, options=FILTERS, seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
    def test_m34_agrees_with_the_walk(
        self, logits: list[float], options: dict[str, Any], seed: int, position: int
    ) -> None:
        config = SamplerConfig(**options, sampler="inverse_cdf", seed=seed)
        ranked, cumulated = listed(logits, config)
        wanted = uniform(seed, position) * cumulated[-1]
        assume(all(abs(c - wanted) > 1e-9 for c in cumulated))
        expected = next(i for i, c in zip(ranked, cumulated, strict=True) if c > wanted)
        assert choose(row(*logits), config, position) == (ranked[0] if config.is_greedy else expected)

    @pytest.mark.parametrize("spread", [0.01, 3.0])
    @pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 2500}], ids=str)
    def test_m34_a_wide_row_agrees_with_a_full_sort(self, spread: float, options: dict[str, Any]) -> None:
        logits = np.random.default_rng(2).normal(0, spread, 5000).round(3).astype(np.float32)  # with ties
        for seed in range(40):
            config = SamplerConfig(sampler="inverse_cdf", seed=seed, **options)
            ids, log_weights = keep(logits, config)
            order = np.lexsort((ids, -logits[ids]))
            cumulated = np.cumsum(np.exp(log_weights[order]))
            place = int(np.searchsorted(cumulated, uniform(seed, 3) * cumulated[-1], "right"))
            assert choose(logits, config, 3) == ids[order][place]

    def test_m40_min_p_narrows_what_is_walked(self) -> None:
        logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
        drawn = {choose(logits, SamplerConfig(sampler="inverse_cdf", min_p=0.5), m) for m in range(100)}
        assert drawn == {0, 1}

    def test_a_greedy_request_draws_nothing(self) -> None:
        config = SamplerConfig(sampler="inverse_cdf", temperature=0)
        assert {choose(row(0, 0.1, 0), config, m) for m in range(20)} == {1}


@pytest.mark.parametrize(
    ("options", "limit_ms"),
    [
        ({"temperature": 0.0}, 3),
        ({}, 8),
        ({"top_p": 0.95}, 8),
        ({"top_k": 50}, 8),
        ({"sampler": "inverse_cdf", "top_p": 0.95}, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_a_row_of_the_real_vocabulary_is_quick(options: dict[str, Any], limit_ms: float, spread: float) -> None:
    logits = np.random.default_rng(1).normal(0, spread, 129_280).astype(np.float32)
    config = SamplerConfig(**options)
    taken = []
    for m in range(15):
        started = time.perf_counter()
        choose(logits, config, m)
        taken.append(time.perf_counter() - started)
    assert min(taken) * 1e3 < limit_ms  # the quickest: others may use the machine
