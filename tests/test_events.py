from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, fields
from itertools import pairwise
from typing import Any

import pytest

from dsv4nb.events import Done, Event, Generation, Round, SpecUsage
from dsv4nb.testing.fake_engine import FakeTokenizer
from dsv4nb.testing.fake_model import fake_model


def spoken(n: int = 24, **options: Any) -> tuple[Generation, list[Event]]:
    """A reply of an engine that drafts rightly, but for every fourth position."""
    tokens = FakeTokenizer()
    script = tokens.encode_plain(" ".join(f"w{i}" for i in range(n)))

    def drafts(before: tuple[int, ...]) -> list[int]:
        at = script.index(before[-1]) + 1
        return [token if (at + i) % 4 else token + 1 for i, token in enumerate(script[at : at + 5])]

    with fake_model([script], tokenizer=tokens, drafts=drafts, conf_logits=[2.0, 1.0, 0.0, -1.0, -2.0]) as model:
        ticket = model.submit("hi", temperature=0, **options)
        return ticket.result(30), ticket.poll(0)[0]


def test_m31_usage_is_recomputed_from_the_rounds_and_absent_on_the_plain_route() -> None:
    reply, _ = spoken()
    assert reply.done.spec == SpecUsage(
        rounds=len(reply.rounds),
        drafted=sum(max(0, one.t_batch - 1) for one in reply.rounds),
        accepted=sum(one.accepts for one in reply.rounds),
    )
    assert reply.done.route == "spec_greedy" and reply.done.spec.accepted > 12
    plain, events = spoken(spec=False)
    assert plain.ids == reply.ids and plain.done.spec is None and plain.rounds == ()
    assert plain.done.route == "plain_greedy" and not any(isinstance(event, Round) for event in events)
    assert SpecUsage.of([]) is None


def test_m32_rounds_of_a_run_stand_in_its_result() -> None:
    reply, events = spoken()
    assert list(reply.rounds) == [event for event in events if isinstance(event, Round)]
    assert 1 + sum(one.emitted for one in reply.rounds) == len(reply.ids)  # the first token comes from the prompt
    for number, one in enumerate(reply.rounds):
        assert one.round == number and one.accepts <= one.verified <= one.t_batch <= one.t_cap
        assert [draft.pos for draft in one.drafts] == [one.start + 1 + i for i in range(len(one.drafts))]
        assert one.ms.keys() == {"draft", "verify", "commit", "total"}
        assert one.ms["total"] >= one.ms["draft"] + one.ms["verify"]
    for before, after in pairwise(reply.rounds):
        assert after.start == before.start + before.accepts + 1 and after.pending == before.next


def test_m33_drafts_that_the_budget_cut_are_no_rejections() -> None:
    reply, _ = spoken(max_new=3)
    (cut,) = reply.rounds
    assert (cut.t_cap, cut.t_batch, cut.verified) == (6, 2, 1)
    assert [draft.status for draft in cut.drafts] == ["accepted", *["not_verified"] * 4]
    assert (cut.stop, cut.window_reason) == ("budget", "budget: 2 tokens left")
    assert reply.done.spec == SpecUsage(rounds=1, drafted=1, accepted=1) and reply.stop_reason == "length"


def test_every_event_is_frozen_and_json_able() -> None:
    with fake_model("<think>Hm.</think>Hello.") as model:
        events = list(model.stream("hi", thinking=True, logprobs=2))
        again = model.generate("hi")
    for event in [*events, *spoken()[1]]:
        assert json.loads(json.dumps(asdict(event)))
        with pytest.raises(FrozenInstanceError):
            setattr(event, fields(event)[0].name, None)
    done = events[-1]
    assert isinstance(done, Done) and done.route == "plain_sampled"
    assert json.loads(json.dumps(asdict(again.recipe)))["prompt"] == list(again.recipe.prompt)
