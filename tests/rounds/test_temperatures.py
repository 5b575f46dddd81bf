from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from dsv4nb.rounds import Round, Rounds, calibration_of, fit_temperatures
from dsv4nb.rounds.temperatures import GRID

MakeRound = Callable[..., Round]


def test_the_grid_is_49_values_around_one() -> None:
    assert len(GRID) == 49 and GRID[0] == 1 / 8 and GRID[24] == 1.0 and GRID[-1] == 8
    assert all(b / a == pytest.approx(2 ** (1 / 8)) for a, b in itertools.pairwise(GRID))


def _exaggerated(round_of: MakeRound, factors: tuple[float, ...], n: int) -> Rounds:
    """Rounds of a drafter whose logits are `factors` times the true ones."""
    dice = random.Random(7)
    rounds = []
    for _ in range(n):
        true = [dice.uniform(0.3, 0.95) for _ in factors]
        fates = [dice.random() < p for p in true]
        accepts = (*fates, False).index(False)
        told = [1 / (1 + ((1 - p) / p) ** factor) for p, factor in zip(true, factors, strict=True)]
        rounds.append(round_of(len(factors), accepts, block=len(factors), confs=told))
    return Rounds(rounds)


def test_the_exaggeration_of_each_position_is_found_in_turn(round_of: MakeRound) -> None:
    rounds = _exaggerated(round_of, (2.0, 0.5), 3000)
    fitted = rounds.fit_temperatures()
    assert fitted.values[0] == pytest.approx(2.0, rel=0.3) and fitted.values[1] == pytest.approx(0.5, rel=0.3)
    assert fitted.n == (3000, 3000)
    for k in range(2):
        before, after = fitted.ece_before[k], fitted.ece_after[k]
        assert before is not None and after is not None and after < 0.6 * before
    told = calibration_of(rounds, temperatures=fitted.values)
    assert [at.ece for at in told.survival_at] == pytest.approx(fitted.ece_after)
    assert [at.ece for at in calibration_of(rounds).survival_at] == pytest.approx(fitted.ece_before)
    # order stays, so discrimination does
    kept = [at.auc for at in calibration_of(rounds).conf_at]
    assert [at.auc for at in told.conf_at] == pytest.approx(kept)


def test_the_first_temperature_is_never_worse_than_none(round_of: MakeRound) -> None:
    rounds = _exaggerated(round_of, (1.0, 1.0), 60)
    fitted = fit_temperatures(rounds)
    assert fitted.ece_before[0] is not None and fitted.ece_after[0] is not None
    assert fitted.ece_after[0] <= fitted.ece_before[0]


def test_positions_that_no_round_tells_of_stay_as_they_are(round_of: MakeRound) -> None:
    rounds = [round_of(2, 1, block=4, confs=(0.9, 0.9)), round_of(3, 3, block=4, confs=(0.9, None, 0.9))]
    fitted = fit_temperatures(rounds)
    assert fitted.n == (2, 1, 0, 0) and fitted.values[2:] == (1.0, 1.0)
    assert fitted.ece_before[2:] == fitted.ece_after[2:] == (None, None)
    assert fit_temperatures([]).values == ()


def test_temperatures_are_shown_as_a_table(round_of: MakeRound) -> None:
    fitted = fit_temperatures([round_of(0, 0, block=2)])
    assert str(fitted).splitlines() == [
        "draft            1      2",
        "temperature  1.000  1.000",
        "rounds           0      0",
        "ECE before       –      –",
        "ECE after        –      –",
    ]
    assert fitted._repr_html_().startswith("<table>")
