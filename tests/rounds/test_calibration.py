from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4nb.errors import RequestError
from dsv4nb.rounds import Round, Rounds, calibration_of
from dsv4nb.rounds.calibration import auc, ece, reliability, sigmoid

MakeRound = Callable[..., Round]


def test_reliability_on_a_case_computed_by_hand() -> None:
    told = reliability([0.1, 0.2, 0.8, 1.0], [False, True, True, True], bins=2)
    assert (told.n, told.hits, told.observed) == (4, 3, 0.75)
    assert told.predicted == pytest.approx(2.1 / 4)
    low, high = told.bins
    assert (low.low, low.high, low.n, low.observed) == (0.0, 0.5, 2, 0.5) and low.predicted == pytest.approx(0.15)
    assert (high.low, high.high, high.n, high.observed) == (0.5, 1.0, 2, 1.0) and high.predicted == pytest.approx(0.9)
    assert told.ece == pytest.approx((2 * 0.35 + 2 * 0.1) / 4)
    assert told.auc == 1.0


def test_a_prediction_on_a_border_falls_into_the_upper_bin() -> None:
    assert [(b.low, b.n) for b in reliability([0.0, 0.5, 1.0], [True] * 3, bins=2).bins] == [(0.0, 1), (0.5, 2)]


def test_ties_count_half_and_a_missing_class_has_no_auc() -> None:
    p = np.array([0.3, 0.3, 0.7, 0.7])
    assert auc(p, np.array([True, False, True, False])) == 0.5
    assert auc(p, np.array([False, False, True, False])) == (2 + 0.5) / 3
    assert auc(p, np.array([True] * 4)) is None and auc(p, np.array([False] * 4)) is None
    assert auc(np.array([]), np.array([], dtype=bool)) is None and ece(np.array([]), np.array([], dtype=bool)) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30))
def test_the_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[int, bool]]) -> None:
    predicted, hit = np.array([p / 6 for p, _ in pairs]), np.array([h for _, h in pairs], dtype=bool)
    won = [1.0 if a > b else 0.5 if a == b else 0.0 for a in predicted[hit] for b in predicted[~hit]]
    assert auc(predicted, hit) == (pytest.approx(sum(won) / len(won)) if won else None)


def test_a_draft_counts_when_it_was_verified_and_those_before_it_were_accepted(round_of: MakeRound) -> None:
    confs = (0.9, 0.8, 0.7, 0.6, 0.5)
    told = calibration_of([round_of(4, 1, confs=confs)])
    # accepted, rejected, unreached, unreached, not verified
    assert [(at.n, at.hits) for at in told.conf_at] == [(1, 1), (1, 0), (0, 0), (0, 0), (0, 0)]
    assert told.conf_at[1].predicted == 0.8
    assert (told.conf.n, told.conf.hits) == (2, 1)
    # of the survival also an unreached draft tells: it did not survive
    assert [(at.n, at.hits) for at in told.survival_at] == [(1, 1), (1, 0), (1, 0), (1, 0), (0, 0)]
    assert told.survival_at[3].predicted == pytest.approx(0.9 * 0.8 * 0.7 * 0.6)
    assert (told.survival.n, told.survival.hits) == (4, 1)


def test_the_survival_is_the_recorded_one(round_of: MakeRound) -> None:
    round = round_of(5, 5, confs=(0.9, 0.8, 0.7, 0.6, 0.5))
    told = calibration_of([round])
    assert [at.predicted for at in told.survival_at] == [draft.survival for draft in round.drafts]


def test_m33_cut_rounds_and_drafts_past_the_stop_are_no_misses(round_of: MakeRound) -> None:
    told = calibration_of([round_of(2, 2, cut=True, stop="budget"), round_of(3, 3, stop="eos", emitted=1)])
    assert [(at.n, at.hits) for at in told.conf_at] == [(2, 2), (2, 2), (1, 1), (0, 0), (0, 0)]
    assert [(at.n, at.hits) for at in told.survival_at] == [(2, 2), (2, 2), (1, 1), (0, 0), (0, 0)]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_drafts_without_a_confidence_are_passed_over(round_of: MakeRound, missing: float | None) -> None:
    told = calibration_of([round_of(3, 3, confs=(0.9, missing, 0.7))])
    assert [at.n for at in told.conf_at] == [1, 0, 1, 0, 0]
    assert [at.n for at in told.survival_at] == [1, 0, 0, 0, 0]


def test_temperatures_divide_the_logits(round_of: MakeRound) -> None:
    rounds = [round_of(2, 2, block=2, confs=(0.9, 0.2))]
    hot = calibration_of(rounds, temperatures=[2.0, 0.5])
    expected = [3 / (3 + 1), 1 / 17]  # odds 9 to the power 1/2, odds 1/4 to the power 2
    assert [at.predicted for at in hot.conf_at] == pytest.approx(expected)
    assert hot.survival_at[1].predicted == pytest.approx(expected[0] * expected[1])
    as_given, same = calibration_of(rounds), calibration_of(rounds, temperatures=[1, 1])
    assert [at.predicted for at in same.conf_at] == pytest.approx([at.predicted for at in as_given.conf_at])


def test_a_sigmoid_does_not_overflow() -> None:
    assert sigmoid(np.array([-1e6, -2.0, 0.0, math.inf])).tolist() == pytest.approx([0, 1 / (1 + math.e**2), 0.5, 1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperatures": [1.0] * 4}, "4 values; the rounds draft 5"),
        ({"temperatures": [1, 1, 0, 1, 1]}, "above 0"),
        ({"temperatures": [1, 1, math.nan, 1, 1]}, "above 0"),
        ({"bins": 0}, "bins is 0"),
    ],
)
def test_bad_settings_are_refused(round_of: MakeRound, given: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        calibration_of([round_of(5, 1)], **given)  # type: ignore[arg-type]


def test_without_rounds_there_is_nothing_to_tell() -> None:
    told = calibration_of([])
    assert (told.conf.n, told.conf.ece, told.conf.auc, told.conf_at, told.conf.bins) == (0, None, None, (), ())


def test_a_calibration_is_shown_as_a_table(round_of: MakeRound) -> None:
    told = Rounds([round_of(1, 1, block=1, confs=[0.75]), round_of(1, 0, block=1, confs=[0.25])]).calibration()
    assert str(told).splitlines() == [
        "confidences as the drafter gave them",
        "                       drafts  predicted  observed     ECE    AUC",
        "confidence of draft 1       2     50.0 %    50.0 %  25.0 %  1.000",
        "confidence of all           2     50.0 %    50.0 %  25.0 %  1.000",
        "survival of draft 1         2     50.0 %    50.0 %  25.0 %  1.000",
        "survival of all             2     50.0 %    50.0 %  25.0 %  1.000",
    ]
    assert told._repr_html_().count("<tr>") == 6
    assert "divided by 2" in str(calibration_of([round_of(1, 1, block=1)], temperatures=[2.0]))
