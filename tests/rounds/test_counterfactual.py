from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.config import SpecConfig
from dsv4nb.errors import RequestError
from dsv4nb.rounds import Bounds, Costs, Round, Rounds, counterfactual_of, slot_drafts, sweep

MakeRound = Callable[..., Round]
OFF = SpecConfig()
COSTS = Costs(draft=2.0, verify=(10.0, 11.0, 12.0, 13.0, 14.0, 15.0), other=1.0)


class World:
    """What would be drafted from each position, and how many of these drafts the model would accept."""

    def __init__(self, fates: Sequence[tuple[int, Sequence[float]]], round_of: MakeRound) -> None:
        self._fates, self._round_of = fates, round_of

    def fate(self, pos: int) -> tuple[int, Sequence[float]]:
        return self._fates[pos % len(self._fates)]

    def rows(self, pos: int, spec: SpecConfig) -> int:
        """Rows that the window and the depth allow."""
        _, confs = self.fate(pos)
        passed = len(confs)
        if spec.window == "slot":
            passed = next((k for k, conf in enumerate(confs) if conf < (spec.tau or 0.5)), len(confs))
            passed = max(passed, spec.floor or 0)
        return min(passed + 1, spec.depth or 99)

    def run(self, spec: SpecConfig, n: int) -> Rounds:
        """Decode n tokens."""
        rounds: list[Round] = []
        pos = 0
        while pos < n:
            survive, confs = self.fate(pos)
            t_cap = self.rows(pos, spec)
            t_batch = min(t_cap, n - pos)
            accepts = min(t_batch - 1, survive)
            stop = "budget" if pos + accepts + 1 >= n else None
            settings: dict[str, Any] = {"start": pos, "number": len(rounds), "stop": stop, "block": len(confs)}
            made = self._round_of(t_batch - 1, accepts, confs=confs, **settings)
            rounds.append(replace(made, t_cap=t_cap, t_batch=t_batch))
            pos += accepts + 1
        return Rounds(rounds)


def _sums(rounds: Rounds) -> tuple[int, int, int]:
    totals = rounds.totals
    return sum(round.t_batch for round in rounds), totals.drafted, totals.accepted


def _sure(survive: int) -> tuple[int, list[float]]:
    """A drafter that knows which of its drafts survive."""
    return survive, [0.9 if k < survive else 0.1 for k in range(5)]


@pytest.mark.parametrize("n", [1, 40, 41, 43, 100])
def test_a_window_that_cuts_what_the_model_refuses_is_told_exactly(round_of: MakeRound, n: int) -> None:
    world = World([_sure(k) for k in (3, 0, 5, 1, 2, 5, 4)], round_of)
    spec = SpecConfig(window="slot", tau=0.5)
    told = world.run(OFF, n).counterfactual(spec)
    truth = world.run(spec, n)
    assert told.is_exact and told.rounds == len(truth)
    assert (told.rows, told.drafted, told.accepted.low) == _sums(truth)
    assert told.tokens == (n, n) and told.accepted.low == told.accepted.high


def test_where_every_place_is_alike_the_estimate_is_the_truth_per_round(round_of: MakeRound) -> None:
    world = World([(4, (0.9, 0.8, 0.7, 0.6, 0.2))], round_of)
    for spec, tokens, rows in [
        (SpecConfig(window="slot", tau=0.75), 3, 3),
        (SpecConfig(window="slot", tau=0.95, floor=1), 2, 2),
        (SpecConfig(depth=4), 4, 4),
        (SpecConfig(depth=1), 1, 1),
    ]:
        # 60 is a whole number of rounds of each, so that no budget cuts one
        told, truth = world.run(OFF, 60).counterfactual(spec), world.run(spec, 60)
        assert told.tokens_per_round == Bounds(tokens, tokens)
        assert truth.totals.tokens_per_round == tokens and {round.t_batch for round in truth} == {rows}
        assert told.rows == rows * told.rounds
        # the others would have started elsewhere; the last would have been followed by one more
        assert told.departures == told.rounds and not told.is_exact


def test_the_window_that_was_recorded_gives_what_was_recorded(round_of: MakeRound) -> None:
    dice = random.Random(3)
    world = World([(dice.randint(0, 5), [dice.random() for _ in range(5)]) for _ in range(97)], round_of)
    for spec in (OFF, SpecConfig(window="slot", tau=0.3), SpecConfig(window="slot", floor=2), SpecConfig(depth=3)):
        rounds = world.run(spec, 200)
        told = rounds.counterfactual(spec)
        assert told.is_exact and told.tokens == (200, 200)
        assert (told.rows, told.drafted, told.accepted.low) == _sums(rounds)


FATE = st.tuples(st.integers(0, 5), st.lists(st.sampled_from([0.1, 0.4, 0.6, 0.9]), min_size=5, max_size=5))
SPECS = st.one_of(
    st.builds(SpecConfig, depth=st.sampled_from([None, 1, 2, 4])),
    st.builds(
        SpecConfig,
        window=st.just("slot"),
        tau=st.sampled_from([0.3, 0.5, 0.7]),
        floor=st.integers(0, 4),
        depth=st.sampled_from([None, 3]),
    ),
)


@settings(max_examples=60)
@given(st.lists(FATE, min_size=1, max_size=8), SPECS, SPECS)
def test_bounds_hold_the_truth_and_meet_when_the_window_was_off(
    round_of: MakeRound, fates: list[tuple[int, list[float]]], recorded: SpecConfig, asked: SpecConfig
) -> None:
    world = World(fates, round_of)
    for spec in (recorded, OFF):
        rounds = world.run(spec, 20)
        told = counterfactual_of(rounds, asked)
        rows = [min(world.rows(round.start, asked), 20 - round.start) for round in rounds]
        truth = sum(min(T - 1, world.fate(round.start)[0]) for T, round in zip(rows, rounds, strict=True))
        assert told.rows == sum(rows) and told.drafted == told.rows - len(rounds)
        assert told.accepted.low <= truth <= told.accepted.high <= told.drafted
        assert (told.unknown > 0) == (told.accepted.low < told.accepted.high)
        if spec is OFF:
            assert told.unknown == 0 and told.accepted.low == told.accepted.high == truth
        if told.is_exact:
            assert (told.rows, told.drafted, told.accepted.low) == _sums(world.run(asked, 20))


def test_what_was_not_run_is_unknown_unless_a_refusal_settled_it(round_of: MakeRound) -> None:
    open_end, settled = round_of(2, 2), round_of(2, 1)
    told = counterfactual_of([open_end, settled], OFF)
    assert told.accepted == Bounds(2 + 1, 5 + 1) and told.tokens == Bounds(3 + 2, 6 + 2)
    assert (told.drafted, told.rows, told.unknown, told.departures) == (10, 12, 1, 0)
    assert told.acceptance_rate == Bounds(0.3, 0.6) and not told.is_exact
    assert told.tokens_per_round == Bounds(2.5, 4.0)


def test_m33_a_round_cut_by_the_budget_stays_cut(round_of: MakeRound) -> None:
    cut, ended = round_of(2, 2, cut=True, stop="budget"), round_of(1, 1, stop="budget")
    told = counterfactual_of([cut, ended], OFF)
    assert told.is_exact and told.drafted == 3 and told.accepted == (3, 3) and told.tokens == (5, 5)
    assert counterfactual_of([round_of(0, 0, cut=True, stop="budget")], OFF).drafted == 0
    # the end of the budget is known from a round that did not reach it, and holds for those before
    before, cut = round_of(1, 1, start=10), round_of(1, 0, cut=True, stop="eos", emitted=1, start=12, number=1)
    assert counterfactual_of([before, cut], OFF).drafted == 3 + 1
    assert counterfactual_of([replace(before, round=1), replace(cut, round=0)], OFF).drafted == 5 + 1
    never_run = replace(round_of(0, 0, cut=True, stop="budget", emitted=0), t_batch=0)
    told = counterfactual_of([never_run], OFF, costs=COSTS)
    assert (told.rows, told.drafted, told.tokens, told.ms) == (0, 0, (0, 0), 3.0)


def test_m33_drafts_past_the_stop_can_be_cut_without_a_loss(round_of: MakeRound) -> None:
    # two tokens and the end token, all drafted; two more were accepted behind it
    ended = round_of(5, 5, stop="eos", emitted=2)
    for depth, tokens, departures in [(6, 2, 0), (4, 2, 0), (3, 2, 0), (2, 2, 1), (1, 1, 1)]:
        told = counterfactual_of([ended], SpecConfig(depth=depth))
        assert told.tokens == (tokens, tokens) and told.departures == departures, depth
    # the end token was the model's own choice
    assert counterfactual_of([round_of(5, 2, stop="eos")], OFF).departures == 0
    # a stop string is completed by a token of the reply
    ended = round_of(5, 5, stop="stop_string", emitted=2)
    assert [counterfactual_of([ended], SpecConfig(depth=rows)).departures for rows in (6, 3, 2, 1)] == [0, 0, 0, 1]


def test_the_end_of_a_reply_bounds_its_tokens(round_of: MakeRound) -> None:
    told = counterfactual_of([round_of(2, 2, stop="eos", emitted=1)], OFF)
    assert told.tokens == (1, 1) and told.accepted == (2, 5) and told.unknown == 1


def test_under_rejection_a_window_that_cuts_a_refused_draft_changes_the_text(round_of: MakeRound) -> None:
    for mode, departures in [("exact", 0), ("rejection", 1)]:
        told = counterfactual_of([round_of(5, 2, mode=mode)], SpecConfig(depth=3))
        assert told.accepted == (2, 2) and told.departures == departures
        assert counterfactual_of([round_of(5, 2, mode=mode)], SpecConfig(depth=4)).departures == 0


@pytest.mark.parametrize(
    ("confs", "tau", "floor", "n"),
    [
        ((0.9, 0.8, 0.4, 0.9, 0.9), 0.5, 0, 2),
        ((0.9, 0.8, 0.4, 0.9, 0.9), 0.5, 4, 4),
        ((0.5, 0.4, 0.9, 0.9, 0.9), 0.5, 0, 1),
        ((0.9,) * 5, 0.89, 0, 5),
        ((0.9,) * 5, 0.91, 0, 0),
        ((0.9, None, 0.9, 0.9, 0.9), 0.5, 0, 1),
        ((0.9, float("nan"), 0.9, 0.9, 0.9), 0.5, 0, 1),
        ((None,) * 5, 0.5, 9, 5),
    ],
)
def test_m29_the_slot_rule(
    round_of: MakeRound, confs: tuple[float | None, ...], tau: float, floor: int, n: int
) -> None:
    assert slot_drafts(round_of(5, 5, confs=confs).drafts, tau, floor) == n


def test_costs_give_the_time_of_a_token(round_of: MakeRound) -> None:
    rounds = [round_of(5, 1), round_of(5, 5)]
    told = counterfactual_of(rounds, SpecConfig(depth=3), costs=COSTS)
    assert told.ms == 2 * (2 + 12 + 1) and told.tokens == (2 + 3, 2 + 3)
    assert told.ms_per_token == Bounds(6.0, 6.0)
    told = counterfactual_of([round_of(1, 1)], OFF, costs=COSTS)
    assert told.ms_per_token == Bounds(18 / 6, 18 / 2)
    assert counterfactual_of(rounds, OFF).ms_per_token is None


def test_a_sweep_has_all_drafts_first_and_then_each_tau(round_of: MakeRound) -> None:
    rounds = Rounds([round_of(5, 2, confs=(0.9, 0.8, 0.6, 0.3, 0.1)), round_of(5, 1, confs=(0.7, 0.4, 0.3, 0.2, 0.1))])
    swept = rounds.sweep([0.2, 0.5, 0.95], costs=COSTS)
    assert [one.spec.tau for one in swept] == [None, 0.2, 0.5, 0.95]
    assert [one.drafted for one in swept] == [10, 8, 4, 0]
    assert [one.accepted.low for one in swept] == [3, 3, 3, 0]
    assert [one.departures for one in swept] == [0, 0, 0, 2]
    assert swept.best is swept[2]
    assert sweep(rounds, [0.5]).best is None
    assert [one.spec.depth for one in rounds.sweep([0.5], depth=2)] == [2, 2]
    assert rounds.sweep([0.95], floor=1)[1].drafted == 2
    many = rounds.sweep()
    assert len(many) == 20 and all(a.rows >= b.rows for a, b in itertools.pairwise(many))


def test_a_sweep_is_shown_as_a_table(round_of: MakeRound, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = sweep([round_of(2, 2, confs=(0.9,) * 5)], [0.5], floor=1, costs=COSTS)
    assert str(swept).splitlines() == [
        "fastest     off",
        "window             rows a round           accepted  tokens a round    ms a token  unknown  departures",
        "off                        6.00  40.0 % to 100.0 %    3.00 to 6.00  3.00 to 6.00        1           0",
        "slot 0.5, floor 1          6.00  40.0 % to 100.0 %    3.00 to 6.00  3.00 to 6.00        1           0",
    ]
    assert swept._repr_html_().count("<table>") == 2

    class Pandas:
        @staticmethod
        def DataFrame(rows: list[dict[str, object]], columns: list[str]) -> Any:
            return rows, columns

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    rows, columns = swept.to_frame()
    assert all(set(row) == set(columns) for row in rows)
    assert (rows[1]["tau"], rows[1]["floor"], rows[1]["tokens_low"], rows[1]["tokens_high"]) == (0.5, 1, 3, 6)
    assert (rows[0]["window"], rows[0]["unknown"], rows[0]["ms_per_token_low"]) == ("off", 1, 3.0)


def test_nothing_recorded_is_nothing_told() -> None:
    told = Rounds().counterfactual(SpecConfig(window="slot"), costs=COSTS)
    assert (told.rows, told.tokens, told.unknown) == (0, (0, 0), 0)
    assert told.acceptance_rate is told.tokens_per_round is told.ms_per_token is None
    assert Rounds().sweep(costs=COSTS).best is None and "window" in str(Rounds().sweep([0.5]))


@pytest.mark.parametrize(
    ("spec", "costs", "says"),
    [
        (SpecConfig(window="auto"), None, "'auto'"),
        (SpecConfig(window="slot"), None, "confidence logits"),
        (OFF, Costs(draft=1.0, verify=(1.0, 2.0)), "what 1 to 6 rows take"),
    ],
)
def test_questions_without_an_answer_are_refused(
    round_of: MakeRound, spec: SpecConfig, costs: Costs | None, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        counterfactual_of([round_of(5, 2, confs=(None,) * 5)], spec, costs=costs)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"draft": -1.0, "verify": (1.0,)}, "draft"),
        ({"draft": 1.0, "verify": ()}, "verify"),
        ({"draft": 1.0, "verify": (1.0, float("nan"))}, "verify"),
        ({"draft": 1.0, "verify": (1.0,), "other": float("inf")}, "other"),
    ],
)
def test_costs_must_be_times(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        Costs(**given)
    assert refused.value.param == param


def test_a_tau_outside_its_range_is_refused(round_of: MakeRound) -> None:
    with pytest.raises(RequestError, match="spec_tau"):
        sweep([round_of(5, 2)], [0.5, 1.0])
