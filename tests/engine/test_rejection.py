"""Rejection sampling keeps the joint distribution; shared noise or another q do not (dspark.md 10.1): `draws.py`."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.rejection import decide, draw
from dsv4nb.engine.sampler import choose

SCRIPT = Path(__file__).with_name("draws.py")
ROUNDS = 700
FILTERS = ("none", "T 0.7", "top-k 3", "top-p 0.8", "min-p 0.2")


@pytest.fixture(scope="module")
def draws() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("draws", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(("p", "q"), [*((p, "same") for p in FILTERS), ("top-p 0.8", "none"), ("none", "one-hot")])
def test_rule_b_keeps_the_joint_distribution(draws: Any, p: str, q: str) -> None:
    config = draws.FILTERS[p]
    counts = draws.counted(ROUNDS, config, draws.of_drafts(config, q))
    assert draws.p_value(counts, draws.joint(config)) > 0.001


def test_a_residual_drawn_with_the_drafts_noise_bends_it(draws: Any) -> None:
    expected = np.array(draws.SKEWED_P)
    assert draws.p_value(draws.skewed(4000), expected) > 0.001
    with draws.shared_noise():
        assert draws.p_value(draws.skewed(4000), expected) < 0.001


def test_a_ratio_with_another_q_than_the_drafts_were_drawn_from_bends_it(draws: Any) -> None:
    counts = draws.counted(ROUNDS, draws.NONE, SamplerConfig(top_k=2), draws.with_another_q)
    assert draws.p_value(counts, draws.joint(draws.NONE)) < 1e-6


@pytest.mark.parametrize("proposal", ["coupled", "greedy"])
@pytest.mark.parametrize("name", FILTERS)
def test_rule_a_says_what_single_steps_say(draws: Any, name: str, proposal: str) -> None:
    differing, accepted = draws.pathwise(40, draws.FILTERS[name], proposal)
    assert differing == 0 and accepted > 0.1


def test_coupled_drafts_agree_more_than_greedy_ones(draws: Any) -> None:
    accepted = {proposal: draws.pathwise(80, draws.NONE, proposal)[1] for proposal in ("coupled", "greedy")}
    assert accepted["coupled"] > 1.2 * accepted["greedy"]


def test_acceptance_follows_the_three_laws(draws: Any) -> None:
    """Rule B: sum of min(p, q); rule A with greedy drafts: p(argmax q); with coupled ones: the race's own law."""
    rejected, greedy, coupled, n = 0.0, 0.0, 0.0, 3000
    q, p = draws.DRAFTER[2], draws.TARGET[2]
    for seed in range(n):
        config = SamplerConfig(temperature=1.0, seed=seed)
        drawn = draw(q, config, 5)
        rejected += decide(p, config, 5, drawn) == drawn.token
        said = choose(p, config, 5)
        greedy += said == int(q.argmax())
        coupled += said == choose(q, config, 5)
    ps, qs = draws.probabilities(p, draws.NONE), draws.probabilities(q, draws.NONE)
    law = sum(1 / np.maximum(ps / ps[x], qs / qs[x]).sum() for x in range(draws.V))
    for found, expected in ((rejected, np.minimum(ps, qs).sum()), (greedy, ps[qs.argmax()]), (coupled, law)):
        assert abs(found / n - expected) < 4 * math.sqrt(expected * (1 - expected) / n)
    tv = 0.5 * np.abs(ps - qs).sum()
    assert (1 - tv) / (1 + tv) <= law <= 1 - tv


def test_the_edges_of_the_residual(draws: Any) -> None:
    row, ids = draws.TARGET[1], np.arange(draws.V)
    low, high, one = (np.where(keep, row, -np.inf).astype(np.float32) for keep in (ids < 3, ids >= 3, ids == 4))
    for seed in range(200):
        config = SamplerConfig(temperature=1.0, seed=seed)
        drawn = draw(row, config, 9)
        assert decide(row, config, 9, drawn) == drawn.token  # p = q is never rejected
        apart = draw(high, config, 9)
        assert apart.token >= 3 and decide(low, config, 9, apart) < 3  # always rejected
        assert decide(one, config, 9, drawn) == 4
        assert decide(row, config, 9, draw(one, config, 9)) in range(draws.V)


def test_streams_do_not_go_together(draws: Any) -> None:
    """The draft, the test and the residual of one position are independent draws."""
    row, alone = draws.TARGET[0], draws.probabilities(draws.TARGET[0], draws.NONE)
    drawn = np.array([[choose(row, SamplerConfig(seed=s), 7, stream) for stream in range(4)] for s in range(500)])
    for a in range(4):
        for b in range(a):
            together = np.zeros((draws.V, draws.V))
            np.add.at(together, (drawn[:, a], drawn[:, b]), 1)
            assert draws.p_value(together, np.outer(alone, alone)) > 0.001


def test_a_window_that_looks_back_from_what_it_decides_about_bends_rule_b() -> None:
    """The paper's counterexample: the first draft is verified only if what follows from it looks good (4.5)."""
    target, q = np.log(np.array([0.7, 0.3], np.float32)), np.log(np.array([0.5, 0.5], np.float32))
    said = {"looks back": 0, "does not": 0}
    n = 4000
    for seed in range(n):
        config = SamplerConfig(temperature=1.0, seed=seed)
        drawn = draw(q, config, 5)
        said["does not"] += decide(target, config, 5, drawn) == 0
        verified = drawn.token == 0  # the second confidence comes out high behind the first token alone
        said["looks back"] += decide(target, config, 5, drawn if verified else None) == 0
    assert abs(said["does not"] / n - 0.70) < 0.03
    assert abs(said["looks back"] / n - 0.85) < 0.03
