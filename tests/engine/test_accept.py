"""Windows, depth and budget against brute force (dspark.md 4, 10.6; M-29, M-30)."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from dsv4nb.config import SpecConfig, parse_window
from dsv4nb.engine.accept import plan, sigmoid, survivals
from dsv4nb.errors import RequestError
from dsv4nb.rounds import Costs, leading

NAN = float("nan")
FREE: dict[str, Any] = {"costs": None, "legal": 5, "room": 100, "tokens_left": 100}


def logit(p: float) -> float:
    return math.log(p / (1 - p))


@pytest.mark.parametrize(
    ("confidences", "tau", "length"),
    [
        ([0.9, 0.8, 0.7, 0.6, 0.5], 0.5, 5),
        ([0.9, 0.8, 0.49, 0.9, 0.9], 0.5, 2),
        ([0.4, 0.9, 0.9, 0.9, 0.9], 0.5, 0),
        ([0.9, NAN, 0.9, 0.9, 0.9], 0.5, 1),
        ([NAN] * 5, 0.01, 0),
        ([0.3] * 5, 0.2999, 5),
        ([], 0.5, 0),
    ],
)
def test_m29_the_slot_window_takes_the_leading_run(confidences: list[float], tau: float, length: int) -> None:
    logits = [NAN if math.isnan(c) else logit(c) for c in confidences]
    assert leading(logits, tau) == length
    slot = SpecConfig(window="slot", tau=tau)
    assert plan(slot, logits, len(logits), **FREE).vt_drafts == length
    for floor in range(min(5, len(logits))):
        raised = plan(replace(slot, floor=floor), logits, len(logits), **FREE)
        assert raised.vt_drafts == max(length, floor) and raised.t_cap == raised.vt_drafts + 1


def test_m29_a_window_is_parsed_or_refused_by_name() -> None:
    assert parse_window("off") == ("off", None, None) and parse_window("auto") == ("auto", None, None)
    assert parse_window("slot") == ("slot", None, None)
    assert parse_window(("slot", 0.3)) == ("slot", 0.3, None) and parse_window(["slot", 0.3, 2]) == ("slot", 0.3, 2)
    for given in ("slot@0.5", "", "Slot", ("slot", 0.5, 1, 2), (), 0.5, None, ("cumulative", 0.5), {"slot": 0.5}):
        with pytest.raises(RequestError, match="spec_window is") as raised:
            parse_window(given)
        assert raised.value.param == "spec_window"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        *(({"window": "slot", "tau": tau}, "spec_tau") for tau in (0, 1, -0.1, 1.5, NAN, "0.5", True)),
        *(({"window": "slot", "floor": floor}, "spec_floor") for floor in (-1, 1.5, "1", True)),
        *(({"window": window, "tau": 0.5}, "spec_tau") for window in ("off", "auto")),
        ({"floor": 0}, "spec_floor"),
        *(({"depth": depth}, "spec_depth") for depth in (0, -1, 1.5, "four", "", True)),
        ({"mode": "block"}, "spec_mode"),
        ({"proposal": "tree"}, "spec_proposal"),
        ({"mode": "rejection", "proposal": "greedy"}, "spec_proposal"),
    ],
)
def test_m29_m30_a_bad_or_inert_knob_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=f"{param} is ") as raised:
        SpecConfig(**given)
    assert raised.value.param == param


def test_the_smallest_bound_wins_and_is_named() -> None:
    logits, all_five = [2.0] * 5, SpecConfig()
    assert plan(all_five, logits, 5, **FREE).t_batch == 6
    for bound, rows, words in (
        ({"room": 3}, 3, "room"),
        ({"legal": 1}, 2, "grammar"),
        ({"tokens_left": 2}, 2, "budget: 2 tokens left"),
        ({"tokens_left": 1}, 1, "budget: 1 token left"),
    ):
        found = plan(all_five, logits, 5, **{**FREE, **bound})
        assert found.t_batch == rows and words in found.reason
        assert found.t_cap == (6 if "tokens_left" in bound else rows) and found.vt_drafts == 5
    assert plan(SpecConfig(depth=1), logits, 5, **FREE).t_batch == 1  # M-30: no draft is verified
    assert plan(SpecConfig(depth=4), logits, 5, **FREE).reason == "depth 4"
    assert plan(SpecConfig(window="slot"), [2.0, 2.0, -2.0, 2.0, 2.0], 5, **FREE).reason.endswith("2 drafts in a row")
    for combination in itertools.product(range(1, 7), range(6), range(1, 8), range(1, 8)):
        depth, legal, room, left = combination
        found = plan(SpecConfig(depth=depth), logits, 5, costs=None, legal=legal, room=room, tokens_left=left)
        assert 1 <= found.t_batch == min(depth, legal + 1, room, left, 6) <= found.t_cap


def test_a_window_without_confidences_lets_all_pass() -> None:
    for window in ("slot", "auto"):
        costs = Costs.measured(1.0, [1.0] * 6)
        assert plan(SpecConfig(window=window), (), 5, **{**FREE, "costs": costs}).vt_drafts == 5


def test_survival_is_the_product_of_what_comes_before() -> None:
    assert survivals([0.0, 0.0, 0.0]) == [0.5, 0.25, 0.125]
    assert survivals([0.0, NAN, 5.0]) == [0.5, 0.0, 0.0]
    assert sigmoid(800.0) == 1.0 and sigmoid(-800.0) == 0.0 and sigmoid(2.0) == pytest.approx(1 / (1 + math.exp(-2)))


def test_the_best_count_is_the_brute_force_one() -> None:
    rng = random.Random(4)
    for _ in range(500):
        costs = Costs.measured(rng.uniform(0, 2), [rng.uniform(0.5, 4) for _ in range(6)])
        assert list(costs.verify) == sorted(costs.verify)
        chances = sorted((rng.random() for _ in range(5)), reverse=True)
        rates = [(1 + sum(chances[:n])) / (costs.draft + costs.verify[n]) for n in range(6)]
        assert costs.best(chances) == rates.index(max(rates))
        early = costs.best(chances, looks_ahead=False)
        assert all(a < b for a, b in itertools.pairwise(rates[: early + 1]))
        assert early == 5 or rates[early + 1] <= rates[early]


def test_the_early_stop_is_the_papers_and_looks_at_nothing_behind_it() -> None:
    # steps per second 1.0, 0.5, 0.45 with 1, 2, 3 rows, and a first draft that survives with 0.8: none pays
    costs = Costs.measured(0.0, [1.0, 2.0, 1 / 0.45])
    assert costs.best([0.8, 0.8], looks_ahead=False) == 0
    assert costs.best([0.8, 0.8]) == 2  # the global search sees that two pay
    # what stands behind the draft that does not pay changes nothing: rule B stays unbiased (dspark.md 4.5)
    assert {costs.best([0.8, later], looks_ahead=False) for later in (0.0, 0.5, 0.8)} == {0}
    rejecting = SpecConfig(mode="rejection", window="auto")
    bounds = {**FREE, "costs": costs}
    assert plan(rejecting, [logit(0.8), 5.0], 2, **bounds).vt_drafts == 0
    assert plan(SpecConfig(window="auto"), [logit(0.8), 5.0], 2, **bounds).vt_drafts == 2
