from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from dsv4nb.events import Done, Draft, PromptUsage, Round, SpecUsage, TokenSnapshot
from dsv4nb.session.result import generation_of
from dsv4nb.testing.fake_model import fake_model


def a_round(number: int, start: int, t_batch: int, accepts: int, *, t_cap: int = 6) -> Round:
    drafts = tuple(
        Draft(
            id=i,
            text="x",
            position=start + 1 + i,
            confidence=0.5,
            status="not_verified" if i >= t_batch - 1 else "accepted" if i < accepts else "unreached",
        )
        for i in range(t_cap - 1)
    )
    ms = {"draft": 0.5, "verify": 3.5, "total": 4.0}
    return Round(number=number, start=start, drafts=drafts, t_cap=t_cap, t_batch=t_batch, accepts=accepts,
                 emitted=accepts + 1, ms=ms)  # fmt: skip


def test_m31_usage_is_the_sum_over_rounds_and_absent_without_any() -> None:
    rounds = [a_round(0, 10, 6, 3), a_round(1, 14, 1, 0), a_round(2, 15, 4, 3)]
    assert SpecUsage.of(rounds) == SpecUsage(rounds=3, drafted=5 + 0 + 3, accepted=6)
    assert SpecUsage.of([]) is None


def test_m32_rounds_of_a_run_stand_in_its_result() -> None:
    with fake_model("Hello.") as model:
        plain, request = model.generate("hi"), model.prepare("hi")
    assert plain.rounds == () and plain.done.spec is None
    usage = PromptUsage(n_prompt=5, n_cached=0)
    rounds = (a_round(0, 5, 6, 2), a_round(1, 8, 2, 0))
    result = generation_of(request, [usage, rounds[0], rounds[1], TokenSnapshot(ids=(9, 9, 9)), plain.done])
    assert result.rounds == rounds
    for one in result.rounds:
        assert one.accepts <= one.verified <= one.t_batch <= one.t_cap
    assert sum(one.emitted for one in result.rounds) >= len(result.ids)


def test_m33_drafts_that_the_budget_cut_are_no_rejections() -> None:
    cut = a_round(0, 10, 2, 1)  # two rows were left: one draft was verified, and accepted
    assert cut.t_batch < cut.t_cap and cut.verified == 1
    assert [draft.status for draft in cut.drafts].count("not_verified") == len(cut.drafts) - 1
    usage = SpecUsage.of([cut])
    assert usage is not None and (usage.drafted, usage.accepted) == (1, 1)


def test_every_event_is_frozen_and_json_able() -> None:
    with fake_model("<think>Hm.</think>Hello.") as model:
        events = list(model.stream("hi", thinking=True, logprobs=2))
        again = model.generate("hi")
    for event in [*events, a_round(0, 5, 3, 1)]:
        assert json.loads(json.dumps(asdict(event)))
        with pytest.raises(FrozenInstanceError):
            setattr(event, fields(event)[0].name, None)
    done = events[-1]
    assert isinstance(done, Done) and done.route == "plain_sampled"
    assert json.loads(json.dumps(asdict(again.recipe)))["prompt"] == list(again.recipe.prompt)
