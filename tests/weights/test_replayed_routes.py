"""Routes with the unions of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.errors import RequestError
from dsv4nb.weights.replayed_routes import (
    MEASURED_UNIONS,
    mean_unions,
    measured_unions,
    replayed_routes,
    replayed_tables,
)


@given(st.integers(0, 10**9), st.integers(6, 600), st.sampled_from([36, 160, 256]))
@settings(max_examples=40, deadline=None)
def test_the_unions_are_the_measured_ones(seed: int, positions: int, n_experts: int) -> None:
    table = replayed_routes(positions, n_experts, MEASURED_UNIONS, seed=seed)
    for n, (found, wanted) in enumerate(zip(mean_unions(table), MEASURED_UNIONS, strict=True), 1):
        assert abs(found - wanted) < 10 * n / positions


@pytest.mark.parametrize("stride", range(1, 7))
def test_a_round_that_always_keeps_as_many_tokens_meets_the_same_unions(stride: int) -> None:
    table = replayed_routes(20_000, 256, MEASURED_UNIONS)
    windows = [len(np.unique(table[start : start + 6])) for start in range(0, 19_994, stride)]
    # five times the deviation of a mean of that many
    assert np.mean(windows) == pytest.approx(20.4, abs=5 * np.std(windows) / len(windows) ** 0.5)


def test_a_row_is_distinct_experts_in_order_and_all_are_used_alike() -> None:
    table = replayed_routes(20_000, 256, MEASURED_UNIONS)
    assert table.shape == (20_000, 6) and table.dtype == np.int32
    assert (np.diff(table, axis=1) > 0).all() and table.min() == 0 and table.max() == 255
    visits = np.bincount(table.ravel(), minlength=256) / table.size * 256
    assert visits.min() > 0.6 and visits.max() < 1.4  # five deviations


def test_counts_a_union_as_written_by_hand() -> None:
    table = np.array([[0, 1], [1, 2], [1, 2], [5, 6]], np.int32)
    assert mean_unions(table, 4) == pytest.approx((2, (3 + 2 + 4) / 3, (3 + 4) / 2, 5))


def test_independent_tokens_and_faithful_ones_can_be_made_too() -> None:
    same = replayed_routes(50, 18, (6, 6, 6))
    assert (same == same[0]).all()
    assert mean_unions(replayed_routes(50, 18, (6, 12, 18)), 3) == (6, 12, 18)


def test_every_block_has_a_table_of_its_own_and_a_seed_decides_all() -> None:
    config = from_hf(hf_config("flash-0731", {"num_hidden_layers": 3}))
    tables = replayed_tables(config, 40, seed=4)
    assert list(tables) == ["layers.0", "layers.1", "layers.2", "mtp.0", "mtp.1", "mtp.2"]
    assert len({table.tobytes() for table in tables.values()}) == 6
    again, other = replayed_tables(config, 40, seed=4), replayed_tables(config, 40, seed=5)
    assert all((again[block] == table).all() for block, table in tables.items())
    assert all((other[block] != table).any() for block, table in tables.items())
    assert list(replayed_tables(from_hf(hf_config("tiny", {"n_routed_experts": 16})), 3)) == [
        f"layers.{i}" for i in range(7)
    ]


def test_fewer_choices_share_alike() -> None:
    assert measured_unions(6) == MEASURED_UNIONS
    assert measured_unions(2) == pytest.approx((2, 3.2333, 4.2667, 5.1667, 6, 6.8), abs=1e-4)


@pytest.mark.parametrize(
    ("unions", "n_experts", "param", "message"),
    [
        ((6.5, 8), 256, "unions", "unions are 6.5, 8; the first must be a whole number"),
        ((6, 5), 256, "unions", "no fewer than none"),
        ((6, 7, 9), 256, "unions", "no more than the one before"),
        ((0, 0), 256, "unions", "the first must be a whole number"),
        (MEASURED_UNIONS, 35, "n_experts", "n_experts is 35; 6 positions of 6 experts each need 36"),
    ],
)
def test_unions_that_cannot_be_are_refused(unions: Sequence[float], n_experts: int, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        replayed_routes(10, n_experts, unions)
    assert refused.value.param == param
