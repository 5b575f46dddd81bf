"""What must not change a text, or must change it in one way, with the bundled model's drafter (dspark.md 10.5)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.sampler import choose
from dsv4nb.model import Model

ASKED: dict[str, Any] = {"prompt": "What is the code word?", "temperature": 1.0, "seed": 4}
GREEDY = ASKED | {"temperature": 0.0}


def test_a_larger_budget_extends_the_text(toy: Model) -> None:
    texts = [toy.generate(**ASKED, max_new=n).ids for n in (1, 2, 5, 6, 7, 12)]
    assert [len(ids) for ids in texts[:4]] == [1, 2, 5, 6]
    for short, long in pairwise(texts):
        assert long[: len(short)] == short


def test_a_text_that_is_stopped_and_continued_is_the_text_in_one_go(toy: Model) -> None:
    whole = toy.generate(**ASKED, max_new=14)
    for n in (1, 4, 9):
        first = toy.generate(**ASKED, max_new=n)
        again = toy.generate(prompt_ids=first.all_ids, temperature=1.0, seed=4, max_new=14 - n)
        assert first.ids + again.ids == whole.ids


def test_prompts_of_a_batch_do_not_meet(toy: Model) -> None:
    prompts = [ASKED["prompt"], "What is 63 - 27?", ASKED["prompt"]]
    together = toy.generate_batch(prompts, temperature=1.0, seed=4, max_new=12)
    assert [one.ids for one in together] == [
        toy.generate(prompt, temperature=1.0, seed=4, max_new=12).ids for prompt in prompts
    ]


@pytest.mark.parametrize("filtered", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}])
def test_the_tightest_filters_are_greedy(toy: Model, filtered: dict[str, Any]) -> None:
    assert toy.generate(**ASKED | filtered, max_new=16).ids == toy.generate(**GREEDY, max_new=16).ids


def test_neither_a_seed_nor_the_order_of_biases_matters_where_it_must_not(toy: Model) -> None:
    assert len({toy.generate(**GREEDY | {"seed": seed}, max_new=16).ids for seed in (0, 4, 2**63)}) == 1
    bias = {300: 2.0, 400: -1.0, 500: 0.5}
    orders = [bias, dict(reversed(bias.items()))]
    assert len({toy.generate(**ASKED, logit_bias=one, max_new=12).ids for one in orders}) == 1


def test_a_constant_on_all_logits_changes_no_draw() -> None:
    rng = np.random.default_rng(0)
    for position in range(200):
        row = np.round(rng.normal(size=50) * 8).astype(np.float32) / 8  # exact in float32, shifted or not
        config = SamplerConfig(temperature=1.0, seed=9, top_p=0.9, min_p=0.01)
        assert choose(row, config, position) == choose(row + np.float32(16.0), config, position)


def test_the_same_run_twice_has_the_same_records(toy: Model) -> None:
    first, second = (toy.generate(**ASKED, max_new=30) for _ in range(2))

    def told(reply: Any) -> list[Any]:
        return [{k: v for k, v in one.items() if k not in ("ms", "plain_ms")} for one in reply.rounds.to_dicts()]

    assert told(first) == told(second) and len(first.rounds) > 2


def test_totals_are_those_of_the_records(toy: Model) -> None:
    for asked in (ASKED, GREEDY, ASKED | {"spec_window": ("slot", 0.7)}):
        reply = toy.generate(**asked, max_new=40)
        usage, rounds = reply.done.spec, reply.rounds
        assert usage is not None and usage.accepted <= usage.drafted <= sum(len(one.drafts) for one in rounds)
        assert 1 + sum(one.emitted for one in rounds) == len(reply.ids)
        judged = [one for one in rounds if one.verified]
        tau = 1 + sum(one.accepts for one in judged) / max(1, len(judged))
        assert rounds.totals.mean_acceptance_length == pytest.approx(tau)
