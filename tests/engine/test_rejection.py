"""Rejection sampling keeps the joint distribution; sharing its noise, or another q, does not (dspark.md 10.1)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.engine import rejection
from dsv4nb.engine.rejection import Drawn, decide, distribution, draw
from dsv4nb.engine.sampler import choose

V = 6
ROUNDS = 1_500  # tests/engine/rejection_rounds.py runs more
Table = npt.NDArray[np.float32]  # [V, V]: logits of the next token by the last one

rng = np.random.default_rng(3)
TARGET: Table = (0.7 * rng.normal(size=(V, V))).astype(np.float32)
DRAFTER: Table = (0.5 * TARGET + 0.9 * rng.normal(size=(V, V))).astype(np.float32)
START = 0


def probabilities(row: Table, config: SamplerConfig) -> npt.NDArray[np.float64]:
    ids, probs = distribution(row, config)
    out = np.zeros(V)
    out[ids] = probs
    return out


def joint(config: SamplerConfig) -> npt.NDArray[np.float64]:
    """The exact joint distribution of two tokens: [V, V]."""
    first = probabilities(TARGET[START], config)
    return np.stack([first[a] * probabilities(TARGET[a], config) for a in range(V)])


Decide = Callable[[Table, SamplerConfig, int, Drawn | None], int]


def two_tokens(config: SamplerConfig, draft_config: SamplerConfig, decide: Decide = decide) -> tuple[int, int]:
    """The first two tokens of rounds with two drafts; where the first draft fell, the next round goes on."""
    said: list[int] = []
    before = START
    while len(said) < 2:
        drawn: list[Drawn] = []
        last = before
        for slot in range(2):
            drawn.append(draw(DRAFTER[last], draft_config, len(said) + slot))
            last = drawn[-1].token
        last, at = before, len(said)
        for slot in range(3):
            token = decide(TARGET[last], config, at + slot, drawn[slot] if slot < 2 else None)
            said.append(token)
            last = token
            if slot == 2 or token != drawn[slot].token:
                break
        before = said[-1]
    return said[0], said[1]


def counted(config: SamplerConfig, draft_config: SamplerConfig, decide: Decide = decide) -> npt.NDArray[np.float64]:
    counts = np.zeros((V, V))
    for seed in range(ROUNDS):
        own, drafting = (SamplerConfig(**{**fields(c), "seed": seed}) for c in (config, draft_config))
        counts[two_tokens(own, drafting, decide)] += 1
    return counts


def fields(config: SamplerConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def p_value(counts: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Chi-square with rare cells pooled, by the Wilson-Hilferty approximation; 0 outside the support."""
    if counts[expected == 0].sum():
        return 0.0
    want, got = expected[expected > 0] * counts.sum(), counts[expected > 0]
    rare = want < 5
    want, got = np.append(want[~rare], want[rare].sum()), np.append(got[~rare], got[rare].sum())
    want, got = want[want > 0], got[want > 0]
    chi, freedom = float(((got - want) ** 2 / want).sum()), len(want) - 1
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


NONE = SamplerConfig(temperature=1.0)


@pytest.mark.parametrize("drafts_filtered", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        NONE,
        SamplerConfig(temperature=0.7),
        SamplerConfig(top_k=3),
        SamplerConfig(top_p=0.8),
        SamplerConfig(min_p=0.2),
    ],
    ids=["none", "T 0.7", "top-k 3", "top-p 0.8", "min-p 0.2"],
)
def test_rule_b_keeps_the_joint_distribution(config: SamplerConfig, drafts_filtered: bool) -> None:
    counts = counted(config, config if drafts_filtered else NONE)
    assert p_value(counts, joint(config)) > 0.001


def test_one_hot_drafts_keep_it_too() -> None:
    assert p_value(counted(NONE, SamplerConfig(top_k=1)), joint(NONE)) > 0.001


def test_a_residual_drawn_with_the_drafts_noise_bends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, p = ([0.6, 0.3, 0.05, 0.03, 0.01, 0.01], [0.05, 0.35, 0.1, 0.1, 0.2, 0.2])
    rows = [np.log(np.array(share, np.float32)) for share in (q, p)]

    def said(n: int = 4000) -> npt.NDArray[np.float64]:
        counts = np.zeros(V)
        for seed in range(n):
            config = SamplerConfig(temperature=1.0, seed=seed)
            counts[decide(rows[1], config, 3, draw(rows[0], config, 3))] += 1
        return counts

    assert p_value(said(), np.array(p)) > 0.001
    monkeypatch.setattr(rejection, "REST_STREAM", rejection.DRAFT_STREAM)
    assert p_value(said(), np.array(p)) < 0.001


def test_a_ratio_with_another_q_than_the_drafts_were_drawn_from_bends_it() -> None:
    filtered = SamplerConfig(top_k=2)

    def with_raw_q(row: Table, config: SamplerConfig, position: int, drawn: Drawn | None) -> int:
        if drawn is not None:  # the same token, told with the unfiltered distribution; rows tell which it came from
            source = next(r for r in DRAFTER if drawn.token in distribution(r, filtered)[0] and same(r, drawn))
            ids, probs = distribution(source, NONE)
            drawn = Drawn(token=drawn.token, ids=ids, probs=probs)
        return decide(row, config, position, drawn)

    def same(row: Table, drawn: Drawn) -> bool:
        return np.allclose(distribution(row, filtered)[1], drawn.probs)

    assert p_value(counted(NONE, filtered, with_raw_q), joint(NONE)) < 1e-6


def test_acceptance_follows_the_three_laws() -> None:
    """Rule B: sum of min(p, q); rule A with greedy drafts: p(argmax q); with coupled ones: the race's own law."""
    rejected, greedy, coupled, n = 0.0, 0.0, 0.0, 4000
    q, p = DRAFTER[2], TARGET[2]
    for seed in range(n):
        config = SamplerConfig(temperature=1.0, seed=seed)
        drawn = draw(q, config, 5)
        rejected += decide(p, config, 5, drawn) == drawn.token
        said = choose(p, config, 5)
        greedy += said == int(q.argmax())
        coupled += said == choose(q, config, 5)
    ps, qs = probabilities(p, NONE), probabilities(q, NONE)
    law = sum(1 / np.maximum(ps / ps[x], qs / qs[x]).sum() for x in range(V))
    for found, expected in ((rejected, np.minimum(ps, qs).sum()), (greedy, ps[qs.argmax()]), (coupled, law)):
        assert abs(found / n - expected) < 4 * math.sqrt(expected * (1 - expected) / n)
    tv = 0.5 * np.abs(ps - qs).sum()
    assert (1 - tv) / (1 + tv) <= law <= 1 - tv


def test_the_edges_of_the_residual() -> None:
    same = SamplerConfig(temperature=1.0)
    row = TARGET[1]
    disjoint_p = np.where(np.arange(V) < 3, row, -np.inf).astype(np.float32)
    disjoint_q = np.where(np.arange(V) >= 3, row, -np.inf).astype(np.float32)
    one_hot = np.where(np.arange(V) == 4, 0.0, -np.inf).astype(np.float32)
    for seed in range(300):
        config = SamplerConfig(temperature=1.0, seed=seed)
        drawn = draw(row, config, 9)
        assert decide(row, config, 9, drawn) == drawn.token  # p = q is never rejected
        apart = draw(disjoint_q, config, 9)
        assert apart.token >= 3 and decide(disjoint_p, config, 9, apart) < 3  # always rejected
        assert decide(one_hot, config, 9, drawn) == 4
    assert probabilities(disjoint_p, same)[3:].sum() == 0


def test_streams_do_not_go_together() -> None:
    """The draft, the test and the residual of one position are independent draws."""
    draws = np.array(
        [[choose(TARGET[0], SamplerConfig(seed=seed), 7, stream) for stream in (0, 1, 2, 3)] for seed in range(1500)]
    )
    for a in range(4):
        for b in range(a):
            together = np.zeros((V, V))
            np.add.at(together, (draws[:, a], draws[:, b]), 1)
            alone = probabilities(TARGET[0], NONE)
            assert p_value(together, np.outer(alone, alone)) > 0.001
