from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import Dsv4Error, EncodingError, PromptEmpty, PromptTooLong, RequestError
from dsv4nb.testing.fake_engine import FakeEngine

MakeModel = Callable[..., Any]

HI = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# what is asked, the error, and what it is about
REFUSED: list[tuple[dict[str, Any], type[Dsv4Error], str | None]] = [
    ({}, RequestError, "prompt"),
    ({"prompt": "a", "messages": HI}, RequestError, "messages"),
    ({"prompt": "a", "prompt_ids": [5]}, RequestError, "prompt_ids"),
    ({"messages": HI, "prompt_ids": [5]}, RequestError, "prompt_ids"),
    ({"prompt": ""}, PromptEmpty, "prompt"),
    ({"prompt": 5}, RequestError, "prompt"),
    ({"prompt_ids": []}, PromptEmpty, "prompt_ids"),
    ({"prompt_ids": "abc"}, RequestError, "prompt_ids"),
    ({"prompt_ids": 5}, RequestError, "prompt_ids"),
    ({"prompt_ids": [1.5]}, RequestError, "prompt_ids"),
    ({"prompt_ids": [4096]}, RequestError, "prompt_ids"),
    ({"prompt_ids": [-1]}, RequestError, "prompt_ids"),
    ({"prompt_ids": [5], "system": "x"}, RequestError, "system"),
    ({"prompt_ids": [5], "tools": [TOOL]}, RequestError, "tools"),
    ({"prompt_ids": [5], "effort": "high"}, RequestError, "effort"),
    ({"prompt_ids": [5], "thinking": True}, RequestError, "thinking"),
    ({"prompt_ids": [5], "trust_text": True}, RequestError, "trust_text"),
    ({"messages": []}, EncodingError, "messages"),
    ({"messages": 5}, EncodingError, "messages"),
    ({"messages": [5]}, EncodingError, "messages"),
    ({"messages": [*HI, SYSTEM]}, EncodingError, "messages"),
    ({"messages": [SYSTEM, *HI], "system": "x"}, RequestError, "system"),
    ({"prompt": "a", "system": 5}, RequestError, "system"),
    ({"prompt": "a", "tools": "f"}, RequestError, "tools"),
    ({"prompt": "a", "thinking": 1}, RequestError, "thinking"),
    ({"prompt": "a", "trust_text": "yes"}, RequestError, "trust_text"),
    ({"prompt": "a", "effort": "high"}, RequestError, "effort"),
    ({"prompt": "a", "thinking": True, "effort": "huge"}, EncodingError, "messages"),
    ({"prompt": "a", "temperature": "hot"}, RequestError, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, RequestError, "temperature"),
    ({"prompt": "a", "temperature": True}, RequestError, "temperature"),
    ({"prompt": "a", "top_p": 0}, RequestError, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, RequestError, "top_p"),
    ({"prompt": "a", "top_k": -1}, RequestError, "top_k"),
    ({"prompt": "a", "top_k": 1.5}, RequestError, "top_k"),
    ({"prompt": "a", "min_p": 1}, RequestError, "min_p"),
    ({"prompt": "a", "seed": -1}, RequestError, "seed"),
    ({"prompt": "a", "seed": 2**64}, RequestError, "seed"),
    ({"prompt": "a", "max_new": -1}, RequestError, "max_new"),
    ({"prompt": "a", "max_new": 2.0}, RequestError, "max_new"),
    ({"prompt": "a", "stop": ["a", ""]}, RequestError, "stop"),
    ({"prompt": "a", "stop": [5]}, RequestError, "stop"),
    ({"prompt": "a " * 200}, PromptTooLong, "messages"),
]


@pytest.mark.parametrize(("asked", "error", "param"), REFUSED, ids=[str(c[0])[:60] for c in REFUSED])
def test_m51_refuses_by_name_before_any_engine_call(
    make_model: MakeModel, asked: dict[str, Any], error: type[Dsv4Error], param: str | None
) -> None:
    model = make_model(max_seq=256)
    with pytest.raises(error) as refused:
        model.submit(**asked)
    assert type(refused.value) is error
    assert refused.value.param == param
    engine = model.engine
    assert isinstance(engine, FakeEngine)
    assert not any(engine.calls.values())
    assert model.generate("hi").text == "Hello there."


@pytest.mark.parametrize("door", ["generate", "stream", "astream", "submit", "chat", "render", "tokenize", "prepare"])
def test_an_unknown_keyword_names_the_nearest(make_model: MakeModel, door: str) -> None:
    call = getattr(make_model(), door)
    with pytest.raises(RequestError, match=rf"{door}\(\) has no keyword 'temprature'; did you mean 'temperature'\?"):
        call(temprature=1) if door == "chat" else call("hi", temprature=1)
    with pytest.raises(RequestError, match=r"has no keyword 'zzz'; it has .*max_new.*seed"):
        call(zzz=1)


def test_the_first_failing_rule_wins(make_model: MakeModel) -> None:
    model = make_model(max_seq=256)
    with pytest.raises(RequestError) as refused:
        model.submit("a " * 200, top_p=7)
    assert refused.value.param == "top_p"


@pytest.mark.parametrize(("n", "fits"), [(159, True), (160, False)])
def test_m49_m50_the_room_is_exact(make_model: MakeModel, n: int, fits: bool) -> None:
    model = make_model("a b c d", max_seq=256)
    if fits:
        result = model.generate(prompt_ids=[9] * n)
        assert (result.stop_reason, len(result.ids)) == ("length", 1)
    else:
        with pytest.raises(PromptTooLong):
            model.generate(prompt_ids=[9] * n)


def test_defaults_are_the_models_and_a_seed_is_drawn(make_model: MakeModel) -> None:
    model = make_model()
    one, other = model.prepare("a"), model.prepare("a")
    assert one.config.temperature == model.limits.sampler.temperature
    assert one.config.seed != other.config.seed
    assert one.max_new == model.limits.max_seq - 96 - len(one.prompt)
    own = model.prepare("a", temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**64 - 1, max_new=5, stop="x")
    assert own.config == SamplerConfig(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**64 - 1)
    assert (own.max_new, own.stops) == (5, ("x",))


def test_integers_of_numpy_are_integers(make_model: MakeModel) -> None:
    request = make_model().prepare(prompt_ids=np.array([7, 8]), max_new=np.int64(3))
    assert request.prompt == (7, 8) and request.max_new == 3


def test_thinking_is_read_from_the_end_of_the_prompt(make_model: MakeModel) -> None:
    model = make_model()
    assert not model.prepare("a").is_thinking
    assert model.prepare("a", thinking=True).is_thinking
    assert model.prepare(prompt_ids=model.tokenize("a", thinking=True)).is_thinking
    assert not model.prepare("a", thinking=True, effort="none").is_thinking


def test_m69_thinking_and_effort_are_fields_of_a_request(make_model: MakeModel) -> None:
    model = make_model()
    asked: list[dict[str, Any]] = [{}, *({"thinking": True, "effort": e} for e in ("low", "high", "max"))]
    assert len({model.render("a", **options) for options in asked}) == 4
    assert model.render("a", thinking=True, effort="none") == model.render("a")
    assert model.render("a", thinking=True, effort="medium") == model.render("a", thinking=True, effort="high")
    for door in (model.submit, model.render, model.tokenize):
        with pytest.raises(EncodingError, match="the effort is 'bogus'; it must be one of none, minimal, low, medium"):
            door("a", thinking=True, effort="bogus")


def test_system_and_tools_are_rendered(make_model: MakeModel) -> None:
    model = make_model()
    assert model.render("a", system="Be brief.") == model.render(messages=[SYSTEM, {"role": "user", "content": "a"}])
    assert '"name": "f"' in model.render("a", tools=[TOOL])
    assert model.prepare("a", tools=[TOOL]).has_tools and not model.prepare("a").has_tools


def test_text_of_messages_becomes_no_control_token_unless_trusted(make_model: MakeModel) -> None:
    model = make_model()
    assert model.tokenize("</think>") != model.tokenize("</think>", trust_text=True)


def test_a_string_of_messages_is_one_user_message(make_model: MakeModel) -> None:
    model = make_model()
    assert model.tokenize(messages="hi", system="x") == model.tokenize("hi", system="x")
