"""Penalties, bias, log-probabilities and grammars of requests, on the bundled model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dsv4nb.errors import RequestError
from dsv4nb.events import Token
from dsv4nb.model import Model, load

LONG = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy") as model:
        yield model


def test_m23_any_temperature_up_to_zero_is_greedy_and_so_is_top_k_1(model: Model) -> None:
    one = model.generate(LONG, temperature=0, max_new=24)
    assert one.ids == model.generate(LONG, temperature=-1.0, max_new=24).ids
    assert one.ids == model.generate(LONG, temperature=1.5, top_k=1, seed=3, max_new=24).ids
    assert one.done.route == "spec_greedy"
    assert model.generate(LONG, temperature=1.0, max_new=4).done.route == "spec_sampled"


def test_m36_neutral_penalties_change_nothing(model: Model) -> None:
    neutral: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    for temperature in (0, 1.0):
        plain = model.generate(LONG, temperature=temperature, seed=5, max_new=24, logprobs=3)
        same = model.generate(LONG, temperature=temperature, seed=5, max_new=24, logprobs=3, **neutral)
        assert plain.ids == same.ids and plain.logprobs == same.logprobs


def test_m39_the_first_token_is_penalised_too(model: Model) -> None:
    prompt = model.tokenize("What is the capital of France?")
    first = model.generate(prompt_ids=prompt, temperature=0, max_new=1).ids[0]
    assert first not in prompt  # "The": so put it there
    crowded = [*prompt[:1], *[first] * 4, *prompt[1:]]
    free = model.generate(prompt_ids=crowded, temperature=0, max_new=1)
    held = model.generate(prompt_ids=crowded, temperature=0, max_new=1, presence_penalty=60.0)
    assert free.ids[0] == first != held.ids[0]
    generated = model.generate(
        prompt_ids=crowded, temperature=0, max_new=1, presence_penalty=60.0, penalty_scope="generated"
    )
    assert generated.ids == free.ids


def test_m37_a_window_forgets(model: Model) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_new": 40, "frequency_penalty": 30.0}
    whole = model.generate(LONG, **options)
    counts = np.bincount(whole.ids)
    assert counts.max() < np.bincount(model.generate(LONG, temperature=0, max_new=40).ids).max()
    assert whole.ids != model.generate(LONG, penalty_last_n=1, **options).ids


def test_a_banned_token_is_never_said_and_a_favoured_one_is(model: Model) -> None:
    usual = model.generate("What is the capital of France?", temperature=0)
    banned = model.generate("What is the capital of France?", temperature=0, logit_bias={usual.ids[0]: -math.inf})
    assert usual.ids[0] not in banned.ids
    forced = model.generate(
        "What is the capital of France?", temperature=0, max_new=3, logit_bias={usual.ids[1]: 100.0}
    )
    assert set(forced.ids) == {usual.ids[1]}
    with pytest.raises(RequestError, match="logit_bias has the id 999999; ids are 0 to") as caught:
        model.prepare("hi", logit_bias={999999: 1.0})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logprobs_are_those_of_the_networks_own_rows(model: Model, temperature: float) -> None:
    reply = model.generate(LONG, temperature=temperature, top_p=0.9, seed=2, max_new=12, logprobs=4)
    assert [entry.id for entry in reply.logprobs] == list(reply.ids)
    # independently: each row by a forward of everything before it
    prompt = list(reply.all_ids[: -len(reply.ids)])
    for i, entry in enumerate(reply.logprobs):
        state = model.engine.new_state()
        row = model.engine.prefill(state, prompt + list(reply.ids[:i])).logits.astype(np.float64)
        logs = row - row.max() - math.log(np.exp(row - row.max()).sum())
        assert entry.logprob == pytest.approx(logs[entry.id], abs=1e-9)
        order = np.argsort(-logs, kind="stable")
        assert [token for token, _ in entry.top] == order[:4].tolist()
        assert order[entry.rank - 1] == entry.id


def test_logprobs_ride_on_the_tokens_that_carry_ids(model: Model) -> None:
    said = [e for e in model.stream("Hi!", temperature=0, logprobs=0) if isinstance(e, Token)]
    assert all((token.logprob is not None) == (token.id is not None) for token in said)
    assert all(token.logprob.top == () for token in said if token.logprob)
    assert model.generate("Hi!", temperature=0).logprobs == ()
    for bad, what in ((-1, "logprobs is -1"), (21, "at most 20"), (True, "logprobs is True"), (1.5, "logprobs is 1.5")):
        with pytest.raises(RequestError, match=what):
            model.prepare("Hi!", logprobs=bad)


def test_the_inverse_cdf_is_another_draw_of_the_same_distribution(model: Model) -> None:
    drawn = [
        model.generate("What is the code word?", temperature=1, seed=s, sampler="inverse_cdf").ids for s in (1, 2, 1)
    ]
    assert drawn[0] == drawn[2] != drawn[1]
    greedy = model.generate("What is the code word?", temperature=0)
    narrow = model.generate("What is the code word?", temperature=1, seed=9, top_p=1e-6, sampler="inverse_cdf")
    assert narrow.ids == greedy.ids
    with pytest.raises(RequestError, match="sampler is 'dice'"):
        model.prepare("hi", sampler="dice")


SUM = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"sum": {"type": "integer"}},
            "required": ["sum"],
            "additionalProperties": False,
        }
    },
}


class TestGrammar:
    @pytest.fixture(autouse=True)
    def needs_the_extra(self) -> None:
        pytest.importorskip("llguidance")

    @pytest.mark.parametrize("thinking", [False, True])
    def test_a_reply_keeps_to_its_schema(self, model: Model, thinking: bool) -> None:
        for seed in range(2):
            reply = model.generate(
                "What is 47 + 38?",
                response_format=SUM,
                thinking=thinking,
                seed=seed,
                temperature=2.0,
                max_new=150,
            )
            if reply.stop_reason == "stop":
                assert set(json.loads(reply.text)) == {"sum"}
        exact = model.generate("What is 47 + 38?", response_format=SUM, thinking=thinking, temperature=0)
        assert json.loads(exact.text) == {"sum": 85} and bool(exact.reasoning) == thinking

    def test_a_regex_is_matched_whole(self, model: Model) -> None:
        reply = model.generate(
            "What is the capital of France?", regex="The capital of France is (Rome|Paris|Oslo)", temperature=0
        )
        assert reply.text == "The capital of France is Paris" and reply.stop_reason == "stop"

    def test_a_call_is_made_when_it_is_required(self, model: Model) -> None:
        def get_time(city: str) -> str:
            """Get the local time in a city.

            Args:
                city: Name of the city
            """
            return "now"

        asked: dict[str, Any] = {"tools": [get_time], "temperature": 0}
        free = model.generate("What is 47 + 38?", **asked)
        assert free.stop_reason == "stop"
        for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
            reply = model.generate("What is 47 + 38?", tool_choice=choice, **asked)
            assert reply.stop_reason == "tool_calls" and reply.problems == ()
            assert [call.name for call in reply.tool_calls] == ["get_time"]
            assert list(json.loads(reply.tool_calls[0].arguments)) == ["city"]
        silent = model.generate("What time is it in Paris?", tool_choice="none", **asked)
        assert silent.tool_calls == () and not silent.messages[0].get("tools")

    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"response_format": {"type": "xml"}}, "response_format"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
                "response_format",
            ),
            ({"regex": "("}, "regex"),
            ({"tool_choice": "required"}, "tool_choice"),
        ],
    )
    def test_m19_a_grammar_that_cannot_be_is_refused_at_the_call(
        self, model: Model, options: dict[str, Any], param: str
    ) -> None:
        for ask in (model.generate, model.submit, model.stream, model.astream):
            with pytest.raises(RequestError) as caught:
                ask("hi", **options)
            assert caught.value.param == param
        assert model.generate("Hi!", temperature=0).text

    def test_grammar_penalties_and_logprobs_together(self, model: Model) -> None:
        reply = model.generate(
            "Name three animals.", regex="[a-z]{3,9}( [a-z]{3,9}){3}", presence_penalty=50.0, temperature=0, logprobs=2
        )
        assert len(reply.logprobs) == len(reply.ids) and reply.stop_reason == "stop"
        assert len(reply.text.split()) == 4

    def test_a_continued_reply_is_not_constrained(self, model: Model) -> None:
        begun = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": '{"', "prefix": True}]
        with pytest.raises(RequestError, match="a reply that is continued cannot be constrained") as caught:
            model.generate(messages=begun, response_format={"type": "json_object"})
        assert caught.value.param == "response_format"
