"""A model that reads prompts in chunks, end to end: its card, its recipes, what the doctor says. Kernels are twins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.engine import device
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.errors import ReplayMismatch, RequestError
from dsv4nb.handle import Model
from dsv4nb.testing.twin_kernels import twin_kernels

ASKED = "What is the capital of France? Anna went from Paris to Rome on Monday, and home on Tuesday, by train. " * 3


@pytest.fixture(scope="module")
def on_twins() -> Iterator[None]:
    """Let every GPU be the CPU, and the kernels of a chunk run the bundled model: their twins have no tiles."""
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        given = options["device"]
        return load(*args, **options | {"device": "cpu" if isinstance(given, str) else ["cpu"] * len(given)})

    with pytest.MonkeyPatch.context() as patch, twin_kernels():
        patch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
        patch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
        patch.setattr(device, "chunk_fault", lambda config, shapes: "")
        yield


@pytest.fixture(scope="module")
def model(on_twins: None) -> Iterator[Model]:
    with dsv4nb.load("toy", devices=0, max_seq=384, drafter=False, prefill_rows=64, warmup=False) as model:
        yield model


def test_card_and_recipe_say_how_a_prompt_was_read(model: Model) -> None:
    assert dict(model.info.rows())["prompts"] == "fast, in chunks of 64"
    reply = model.generate(ASKED, temperature=0.0, max_new=6)
    assert reply.recipe.prefill == "fast"
    assert model.replay(reply.recipe).ids == reply.ids
    with pytest.raises(ReplayMismatch, match="read with prefill='exact'; this model reads with 'fast'"):
        model.replay(replace(reply.recipe, prefill="exact"))
    with pytest.raises(ReplayMismatch, match="read in other chunks"):
        model.replay(replace(reply.recipe, ids_sha256="0" * 64))


@pytest.mark.usefixtures("on_twins")
def test_two_gpus_read_a_prompt_in_chunks_and_answer_as_one(model: Model) -> None:
    with dsv4nb.load(
        "toy", devices=(0, 1), placement="tensor", max_seq=384, drafter=False, prefill_rows=64, warmup=False
    ) as two:
        assert len(two.engine.cache_bytes()) == 2
        assert dict(two.info.rows())["prompts"] == "fast, in chunks of 64"
        reply = two.generate(ASKED, temperature=0.0, max_new=12)
        assert reply.recipe.prefill == "fast"
        assert reply.text == model.generate(ASKED, temperature=0.0, max_new=12).text
        assert two.replay(reply.recipe).ids == reply.ids


@pytest.mark.usefixtures("on_twins")
def test_an_exact_model_is_another_one(model: Model) -> None:
    with dsv4nb.load("toy", devices=0, max_seq=384, drafter=False, prefill="exact", warmup=False) as exact:
        assert exact.engine is not model.engine
        assert dict(exact.info.rows())["prompts"] == "exact"
        assert exact.generate("Hello!", temperature=0.0, max_new=2).recipe.prefill == "exact"


@pytest.mark.usefixtures("on_twins")
def test_a_model_that_cannot_be_read_in_chunks_says_why_on_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "chunk_fault", lambda config, shapes: "heads is 16")
    with dsv4nb.load(
        "toy", devices=0, max_seq=384, drafter=False, prefill="fast", name="few heads", warmup=False
    ) as model:
        assert dict(model.info.rows())["prompts"] == "exact: heads is 16"
        assert model.limits.prefill == "exact"


@pytest.mark.usefixtures("on_twins")
@pytest.mark.parametrize("rows", [31, 4097, 64.0, True])
def test_chunks_of_other_lengths_are_refused_by_name(rows: Any) -> None:
    with pytest.raises(RequestError, match="it must be an integer from 32 to 4096") as refused:
        dsv4nb.load("toy", devices=0, prefill_rows=rows)
    assert refused.value.param == "prefill_rows"
