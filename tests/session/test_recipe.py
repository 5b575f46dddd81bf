"""A reply can be made again from its recipe, and a recipe that was changed is noticed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsv4nb.errors import ReplayMismatch, RequestError
from dsv4nb.events import Recipe
from dsv4nb.model import Model, load


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy") as model:
        yield model


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.2, "top_p": 0.9, "max_new": 30},
        {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {40: 2.0}, "sampler": "inverse_cdf"},
        {"temperature": 1.0, "thinking": True, "stop": ["85"], "stop_token_ids": [7]},
        {"temperature": 1.0, "regex": "[a-z ]{4,20}"},
    ],
    ids=str,
)
def test_a_replay_is_the_same_reply(model: Model, options: dict[str, Any]) -> None:
    if "regex" in options:
        pytest.importorskip("llguidance")
    reply = model.generate("What is 47 + 38?", **options)
    again = model.replay(reply.recipe)
    assert (again.ids, again.text, again.reasoning) == (reply.ids, reply.text, reply.reasoning)
    assert again.recipe == reply.recipe
    assert again.config.seed == reply.config.seed


def test_tool_calls_replay(model: Model) -> None:
    def get_time(city: str) -> str:
        """Get the local time in a city.

        Args:
            city: Name of the city
        """
        return city

    reply = model.generate("What time is it in Paris?", tools=[get_time], temperature=0)
    again = model.replay(reply.recipe)
    assert again.tool_calls == reply.tool_calls and reply.tool_calls[0].name == "get_time"


def test_what_was_changed_is_noticed(model: Model) -> None:
    recipe = model.generate("What is the code word?", temperature=1.0, seed=1).recipe
    with pytest.raises(ReplayMismatch, match="the replay has"):
        model.replay(replace(recipe, config=replace(recipe.config, seed=2)))
    with pytest.raises(ReplayMismatch, match="the replay has"):
        model.replay(replace(recipe, ids_sha256="0" * 64))
    with pytest.raises(ReplayMismatch, match="the recipe is of 'toy' with weights '0000'") as caught:
        model.replay(replace(recipe, weights="0000"))
    assert (caught.value.param, caught.value.code) == ("weights", "replay_mismatch")
    with pytest.raises(ReplayMismatch, match="arithmetic 'other'"):
        model.replay(replace(recipe, arithmetic="other"))
    with pytest.raises(ReplayMismatch, match="read with prefill='fast'; this model reads with 'exact'"):
        model.replay(replace(recipe, prefill="fast"))


def test_a_recipe_survives_being_written_down(model: Model) -> None:
    bias = {40: 2.0, 41: -math.inf}
    recipe = model.generate("Hi!", temperature=0.7, stop=["x", "y"], logit_bias=bias, max_new=4).recipe
    told = recipe.to_json()
    assert json.loads(told)["model"] == "toy" and json.loads(told)["arithmetic"] == "ref_fp8_round"
    read = Recipe.from_json(told)
    assert read.prefill == "exact"
    older = {name: value for name, value in json.loads(told).items() if name not in ("given", "prefill")}
    assert Recipe.from_json(json.dumps(older)) == recipe
    assert read == recipe and hash(read.config) == hash(recipe.config)
    assert model.replay(read).recipe == recipe


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"prompt": [1]}'])
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="the recipe cannot be read") as caught:
        Recipe.from_json(text)
    assert caught.value.param == "recipe"
