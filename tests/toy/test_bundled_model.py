"""A sample of the evaluation, through the product; the whole of it is `python -m dsv4nb.toy.evaluate`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.model import Model, load
from dsv4nb.toy.corpus import tasks
from dsv4nb.toy.corpus.tasks import Sampler
from dsv4nb.toy.evaluate import ask, is_right


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy") as model:
        yield model


@pytest.mark.parametrize("thinking", [False, True], ids=["chat", "thinking"])
@pytest.mark.parametrize("skill", ["fact", "addition", "subtraction"])
def test_answers_what_it_was_not_trained_on(model: Model, skill: str, thinking: bool) -> None:
    s, right = Sampler(random.Random(11), held_out=True), 0
    for _ in range(4):
        turn = {"fact": tasks.fact, "addition": tasks.addition, "subtraction": tasks.subtraction}[skill](s)
        conversation = tasks.single(turn, skill)
        reply = ask(model, conversation, thinking=thinking)
        assert reply.stop_reason == "stop"
        assert bool(reply.reasoning) == thinking
        right += is_right(skill, conversation, reply, thinking=thinking)
    assert right >= 4 - (skill == "fact")


@pytest.mark.parametrize("thinking", [False, True], ids=["chat", "thinking"])
def test_recalls_a_code_word_through_compressed_entries(model: Model, thinking: bool) -> None:
    s = Sampler(random.Random(12), held_out=True)
    count = ChatTokenizer.from_file(f"{model.info.path}/tokenizer.json").count
    for distance in (300, 900, 1500):
        conversation = tasks.memory_conversation(s, count, distance, in_one_message=distance != 900)
        assert conversation.tags["distance"] >= 300  # far outside the window of 64
        reply = ask(model, conversation, thinking=thinking)
        assert is_right("code word", conversation, reply, thinking=thinking), (distance, reply.raw_text)


@pytest.mark.parametrize("tool", ["get_time", "set_timer", "search_notes", "calculate"])
def test_calls_a_tool_with_arguments_it_has_not_seen(model: Model, tool: str) -> None:
    conversation = tasks.tool_conversation(Sampler(random.Random(13), held_out=True), tool=tool, answer_result=False)
    reply = ask(model, conversation, thinking=False)
    assert is_right("tool calls", conversation, reply, thinking=False), reply.raw_text
    assert reply.stop_reason == "tool_calls"


def test_the_evaluation_counts_a_wrong_reply_as_wrong(model: Model) -> None:
    s = Sampler(random.Random(14), held_out=True)
    asked = tasks.single(tasks.addition(s), "addition")
    other = tasks.single(tasks.fact(s), "fact")
    reply = ask(model, asked, thinking=False)
    assert not is_right("facts", other, reply, thinking=False)
    assert not is_right("tool calls", tasks.tool_conversation(s, answer_result=False), reply, thinking=False)
