from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.rounds import Round, Rounds, SpecTotals, SpecUsage

MakeRound = Callable[..., Round]


def test_every_definition_on_a_case_computed_by_hand(round_of: MakeRound) -> None:
    # verified, accepted: 5/5, 5/2, 3/0, and a plain step
    totals = SpecTotals.of([round_of(5, 5), round_of(5, 2), round_of(3, 0), round_of(0, 0)])
    assert (totals.rounds, totals.verifying, totals.cut) == (4, 3, 0)
    assert (totals.drafted, totals.accepted, totals.not_verified) == (13, 7, 7)
    assert totals.acceptance_rate == 7 / 13
    assert totals.mean_acceptance_length == 1 + 7 / 3
    assert totals.accepts == (1, 0, 1, 0, 0, 1)
    assert totals.position_rates == (2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3)
    assert totals.position_rates_over_proposals == (2 / 3, 2 / 3, 1 / 3, 1 / 2, 1 / 2)
    assert totals.position_rates_conditional == (2 / 3, 1.0, 1 / 2, 1.0, 1.0)
    assert totals.verify_rate == (6 + 3 + 1) / (6 + 6 + 4)
    assert totals.emitted == 11 and totals.tokens_per_round == 11 / 4


@pytest.mark.parametrize("accepts", range(6))
def test_a_rejection_at_each_position(round_of: MakeRound, accepts: int) -> None:
    totals = SpecTotals.of([round_of(5, accepts)])
    assert totals.position_rates == tuple(float(k < accepts) for k in range(5))
    assert totals.position_rates_over_proposals == totals.position_rates
    reached = tuple(1.0 if k < accepts else 0.0 if k == accepts else None for k in range(5))
    assert totals.position_rates_conditional == reached
    assert totals.accepts == tuple(int(a == accepts) for a in range(6))


def test_m33_a_round_cut_by_the_budget_is_no_rejection(round_of: MakeRound) -> None:
    whole, cut = round_of(5, 5), round_of(2, 2, cut=True, stop="budget")
    assert cut.t_batch < cut.t_cap
    totals = SpecTotals.of([whole, cut])
    assert totals.cut == 1 and totals.not_verified == 3
    assert totals.acceptance_rate == 1.0
    assert totals.position_rates_over_proposals == totals.position_rates_conditional == (1.0,) * 5
    # over rounds, what was not run was not accepted either
    assert totals.position_rates == (1.0, 1.0, 0.5, 0.5, 0.5)
    assert totals.verify_rate == 1.0


def test_m33_a_round_cut_to_its_pending_token_counts_in_no_rate(round_of: MakeRound) -> None:
    totals = SpecTotals.of([round_of(5, 3), round_of(0, 0, cut=True, stop="budget")])
    alone = SpecTotals.of([round_of(5, 3)])
    assert (totals.rounds, totals.verifying, totals.cut) == (2, 1, 1)
    assert totals.position_rates == alone.position_rates and totals.accepts == alone.accepts
    assert totals.mean_acceptance_length == 4.0 and totals.tokens_per_round == 5 / 2


def test_m33_drafts_past_the_stop_were_accepted_and_are_no_tokens(round_of: MakeRound) -> None:
    ended = round_of(5, 5, stop="stop_string", emitted=2)
    assert [draft.status for draft in ended.drafts] == ["accepted", "accepted", *["past_stop"] * 3]
    totals = SpecTotals.of([ended])
    assert totals.accepted == 5 and totals.acceptance_rate == 1.0
    assert totals.position_rates_conditional == (1.0,) * 5
    assert totals.emitted == 2 and totals.tokens_per_round == 2.0


def test_no_rounds_and_no_verified_drafts_have_no_rates(round_of: MakeRound) -> None:
    none, plain = SpecTotals.of([]), SpecTotals.of([round_of(0, 0), round_of(0, 0)])
    for totals in (none, plain):
        assert totals.acceptance_rate is totals.mean_acceptance_length is totals.verify_rate is None
        assert totals.tokens_per_s is totals.speed_up is totals.plain_ms is None
    assert none.tokens_per_round is None and none.position_rates == () and none.accepts == (0,)
    assert plain.tokens_per_round == 1.0
    assert plain.position_rates == plain.position_rates_over_proposals == (None,) * 5
    assert Rounds().usage is None and "nothing was speculated" in str(Rounds())


def test_times_are_of_the_rounds_that_measured_them(round_of: MakeRound) -> None:
    first = round_of(5, 3, ms={"draft": 2.0, "verify": 10.0, "commit": 1.0, "total": 14.0}, plain_ms=6.0)
    second = round_of(5, 1, ms={"draft": 4.0, "verify": 10.0, "total": 16.0}, plain_ms=9.0)
    totals = SpecTotals.of([first, second, round_of(5, 5)])
    assert totals.ms == {"draft": 3.0, "verify": 10.0, "commit": 1.0, "total": 15.0}
    assert totals.tokens_per_s == 1000 * (4 + 2) / (14 + 16)
    assert totals.plain_ms == 7.5
    assert totals.speed_up == (4 * 6 + 2 * 9) / (14 + 16)


def test_the_speed_up_is_not_guessed_where_the_plain_route_was_not_measured(round_of: MakeRound) -> None:
    timed = round_of(5, 3, ms={"total": 14.0})
    assert SpecTotals.of([timed]).speed_up is None and SpecTotals.of([timed]).tokens_per_s == 4000 / 14
    compared = round_of(5, 1, ms={"total": 10.0}, plain_ms=8.0)
    assert SpecTotals.of([timed, compared]).speed_up == 2 * 8 / 10


def test_m33_drafts_past_the_stop_make_nothing_faster(round_of: MakeRound) -> None:
    ended = round_of(5, 5, stop="eos", emitted=2, ms={"total": 10.0}, plain_ms=8.0)
    assert SpecTotals.of([ended]).speed_up == 2 * 8 / 10 and SpecTotals.of([ended]).tokens_per_s == 200.0


FATES = st.integers(0, 5).flatmap(lambda verified: st.tuples(st.just(verified), st.integers(0, verified)))


@settings(max_examples=60)
@given(st.lists(FATES, min_size=1, max_size=12))
def test_m31_totals_agree_with_the_records_and_with_themselves(
    round_of: MakeRound, fates: list[tuple[int, int]]
) -> None:
    rounds = Rounds(round_of(verified, accepts) for verified, accepts in fates)
    totals, usage = rounds.totals, rounds.usage
    assert usage == SpecUsage(rounds=totals.rounds, drafted=totals.drafted, accepted=totals.accepted)
    assert totals.accepted <= totals.drafted <= totals.drafted + totals.not_verified
    assert totals.emitted == sum(a + 1 for _, a in fates)
    if totals.mean_acceptance_length is not None:
        lengths = [accepts + 1 for verified, accepts in fates if verified]
        assert totals.mean_acceptance_length == pytest.approx(sum(lengths) / len(lengths))
        assert 1 + sum(totals.position_rates) == pytest.approx(totals.mean_acceptance_length)
        assert sum(totals.accepts) == totals.verifying
        curves = (totals.position_rates, totals.position_rates_over_proposals, totals.position_rates_conditional)
        for one, other in itertools.pairwise(curves):
            assert all(b is None or a <= b for a, b in zip(one, other, strict=True))


def test_totals_are_shown_as_a_table_that_needs_no_kernel(round_of: MakeRound) -> None:
    rounds = Rounds([round_of(5, 2, ms={"draft": 2.0, "total": 12.0}, plain_ms=8.0), round_of(3, 3, cut=True)])
    text = str(rounds)
    assert text == repr(rounds)
    assert text.splitlines() == [
        "rounds      2, 2 with verified drafts, 1 cut by the budget",
        "drafts      5 of 8 verified accepted (62.5 %), 2 not verified",
        "length      3.50 tokens, mean acceptance length",
        "rows        70.0 % of the rows of these rounds were kept",
        "tokens      7, 3.50 a round",
        "speed       250.0 tokens/s",
        "ms a round  draft 2.00, total 12.00",
        "speed-up    2.00 times the plain route (8.00 ms a token), estimated",
        "draft                  none        1        2       3      4      5",
        "accepted, of rounds          100.0 %  100.0 %  50.0 %  0.0 %  0.0 %",
        "of verified                  100.0 %  100.0 %  50.0 %  0.0 %  0.0 %",
        "of reached                   100.0 %  100.0 %  50.0 %      –      –",
        "rounds that end there     0        0        1       1      0      0",
    ]
    html = rounds._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 2 and "62.5 %" in html and "<script" not in html
