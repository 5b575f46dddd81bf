"""What the evaluation asks was never trained on."""

from __future__ import annotations

import json
import random
import re

import pytest

from dsv4nb.toy.batches import BUCKETS, draw
from dsv4nb.toy.corpus import splits, tasks, world
from dsv4nb.toy.corpus.tasks import Sampler


def _texts(count: int) -> list[str]:
    """Return all message text of `count` training conversations, calls included."""
    s, out = Sampler(random.Random(5)), []
    while len(out) < count:
        for bucket in BUCKETS:
            conversation, _ = draw(bucket, s, lambda text: len(text) // 4)
            out.append(json.dumps([_without_tools(m) for m in conversation.messages]))
    return out


def _without_tools(message: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in message.items() if k != "tools"}


TEXTS = _texts(1500)


@pytest.mark.parametrize("relation", world.RELATIONS, ids=lambda r: r.name)
def test_phrasings_are_disjoint(relation: world.Relation) -> None:
    assert len(relation.asked) >= 6
    assert len(relation.held_out) >= 2
    assert not set(relation.asked) & set(relation.held_out)


def test_entities_are_disjoint_and_both_sides_hold_some() -> None:
    for train, held_out in (
        (splits.TRAIN_CITIES, splits.HELD_OUT_CITIES),
        (splits.TRAIN_PEOPLE, splits.HELD_OUT_PEOPLE),
        (splits.TRAIN_PHRASES, splits.HELD_OUT_PHRASES),
    ):
        assert train
        assert held_out
        assert not set(train) & set(held_out)


def test_no_training_text_holds_a_held_out_operand_pair() -> None:
    pairs = [
        (int(a), int(b))
        for text in TEXTS
        for a, b in re.findall(r"(?<!\d)(\d\d)(?: [+-] ?|[+-]| plus | minus | and | times )(\d\d)(?!\d)", text)
    ]
    assert len(pairs) > 1000
    assert not [p for p in pairs if splits.is_held_out_pair(*p)]


def test_no_training_text_holds_a_held_out_phrase() -> None:
    told = [p for text in TEXTS for p in re.findall(r"code word(?: of \w+)? (?:is |word )?(\w+ \w+)", text)]
    assert len(told) > 100
    everything = "\n".join(TEXTS)
    assert not [p for p in splits.HELD_OUT_PHRASES if p in everything]


def test_no_training_call_has_a_held_out_argument() -> None:
    s, used = Sampler(random.Random(6)), set()
    for _ in range(2000):
        call = tasks.tool_request(s)
        used |= {(call.tool, key, value) for key, value in call.arguments.items()}
    assert len(used) > 300
    assert not [u for u in used if u[1] == "city" and u[2] in splits.HELD_OUT_CITIES]
    assert not [u for u in used if u[1] == "to" and u[2] in splits.HELD_OUT_PEOPLE]
    assert not [u for u in used if u[1] == "minutes" and splits.is_held_out("timer", u[2])]
    assert not [u for u in used if u[1] == "amount" and splits.is_held_out("money", u[2])]
    assert not [u for u in used if u[1] == "query" and u[2] in splits.HELD_OUT_PHRASES]


def test_the_evaluation_draws_only_from_the_held_out_side() -> None:
    s = Sampler(random.Random(7), held_out=True)
    for _ in range(200):
        assert s.city() in splits.HELD_OUT_CITIES
        assert s.person() in splits.HELD_OUT_PEOPLE
        assert s.phrase() in splits.HELD_OUT_PHRASES
        assert splits.is_held_out_pair(*s.operands())


def test_phrasings_of_memory_and_arithmetic_are_disjoint() -> None:
    for train, held_out in (
        (tasks._SUMS, tasks._SUMS_HELD_OUT),
        (tasks._DIFFERENCES, tasks._DIFFERENCES_HELD_OUT),
        (tasks._TOLD, tasks._TOLD_HELD_OUT),
        (tasks._ASKED, tasks._ASKED_HELD_OUT),
    ):
        assert held_out
        assert not set(train) & set(held_out)
