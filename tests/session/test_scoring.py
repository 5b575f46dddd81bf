"""Log-probabilities of tokens that are already there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4nb.errors import ModelClosed, RequestError
from dsv4nb.model import Model, load
from dsv4nb.testing.fake_model import fake_model


@pytest.fixture(scope="module")
def toy() -> Iterator[Model]:
    with load("toy", name="scoring") as model:
        yield model


@pytest.mark.parametrize("spec", [True, False])
def test_they_are_those_that_the_run_would_have_reported_bit_for_bit(toy: Model, spec: bool) -> None:
    whole = toy.generate("Tell me a story about a fox.", max_new=30, seed=3, logprobs=4, spec=spec)
    assert toy.score(whole.recipe.prompt, whole.ids, 4) == whole.logprobs
    bare = toy.score(whole.recipe.prompt, whole.ids, 0)
    assert [one.logprob for one in bare] == [one.logprob for one in whole.logprobs] and not any(o.top for o in bare)


def test_a_chats_reply_is_scored_from_its_caches_and_leaves_them_as_they_were(toy: Model) -> None:
    chat = toy.chat(seed=3)
    chat.send("Tell me a story about a fox.", max_new=10)
    whole = chat.send("And a second one.", max_new=20, logprobs=3)
    before = toy.cache.stats()
    assert chat.score(1, 3) == whole.logprobs
    after = toy.cache.stats()
    assert set(after.anchors) == set(before.anchors), "used, and in another order for that"
    assert (after.decisions, after.computed) == (before.decisions, before.computed)
    gc.collect()
    in_use = toy.engine.blocks_in_use
    chat.score(0, 3)
    gc.collect()
    assert toy.engine.blocks_in_use == in_use


def test_it_can_be_stopped(toy: Model) -> None:
    whole = toy.generate("Tell me a story about a fox.", max_new=30, seed=3, logprobs=2)
    asked = iter([False] * 3 + [True] * 99)
    some = toy.score(whole.recipe.prompt, whole.ids, 2, should_stop=lambda: next(asked))
    assert 0 < len(some) < len(whole.ids) and some == whole.logprobs[: len(some)]
    assert toy.score(whole.recipe.prompt, whole.ids, 2, should_stop=lambda: True) == ()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (((), [1]), "prompt_ids"),
        (([1], [99_999]), "ids"),
        (([-1], [1]), "prompt_ids"),
        (([1], "ab"), "ids"),
        (([1], [1], 21), "n"),
        (([1] * 4000, [1] * 97), "ids"),
    ],
    ids=["nothing", "large", "negative", "text", "many", "long"],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], param: str) -> None:
    with fake_model() as model, pytest.raises(RequestError) as refused:
        model.score(*arguments)
    assert refused.value.param == param


def test_a_closed_model_scores_nothing() -> None:
    model = fake_model()
    model.close()
    with pytest.raises(ModelClosed):
        model.score([1], [1])
