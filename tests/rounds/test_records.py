"""A round by itself: what it shows, and what was judged of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsv4nb.config import SpecConfig
from dsv4nb.rounds import Round, Rounds

MakeRound = Callable[..., Round]


def test_a_round_is_shown_token_by_token(round_of: MakeRound) -> None:
    lines = str(round_of(4, 1)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["10", "11", "12", "13", "14", "15", "12"]
    assert lines[1].endswith("pending") and lines[2].split()[-2:] == ["'d0'", "accepted"]
    assert lines[3].split()[-2:] == ["'n'", "rejected"]
    assert lines[4].endswith("unreached") and lines[6].endswith("not verified")
    assert lines[7].endswith("next, a correction")
    assert round_of(5, 5)._repr_html_().count("<tr>") == 8


@pytest.mark.parametrize(
    ("verified", "accepts", "kind", "judged"), [(5, 2, None, 2), (5, 2, "correction", 5), (5, 5, "bonus", 5)]
)
def test_what_stands_behind_an_end_token_is_not_judged(
    round_of: MakeRound, verified: int, accepts: int, kind: str | None, judged: int
) -> None:
    one = round_of(verified, accepts, kind=kind, stop=None if kind else "eos")
    assert one.judged == judged
    totals = Rounds([one]).totals
    assert [bool(n) for n in totals.proposals] == [k < judged for k in range(5)]
    assert sum(bin.n for bin in Rounds([one]).calibration().conf.bins) == min(judged, accepts + 1)


def test_an_end_token_settles_what_any_window_would_have_given(round_of: MakeRound) -> None:
    ended = Rounds([round_of(5, 2, kind=None, stop="eos", emitted=1)])
    for spec in (SpecConfig(), SpecConfig(depth=6), SpecConfig(depth=2)):
        told = ended.counterfactual(spec)
        assert told.unknown == 0 and told.accepted.low == told.accepted.high == min(2, 1 if spec.depth == 2 else 5)
