"""What a run tells while it reads a long prompt, and what errors about its length carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import PromptOverCeiling, PromptTooLong
from dsv4nb.events import PromptProgress, PromptUsage, Token

MakeModel = Callable[..., Any]


def test_h24_progress_comes_after_each_chunk_and_before_the_first_token(make_model: MakeModel) -> None:
    model = make_model("ok", chunk=50)
    events = list(model.stream(prompt_ids=[300] * 170))
    assert isinstance(events[0], PromptUsage)
    told = [(event.done, event.total) for event in events if isinstance(event, PromptProgress)]
    assert told == [(50, 170), (100, 170), (150, 170)]
    assert isinstance(events[4], Token)
    assert not any(isinstance(event, PromptProgress) for event in model.stream("short"))


def test_h24_what_is_reused_counts_as_done(make_model: MakeModel) -> None:
    model = make_model(["one", "two"], chunk=50)
    chat = model.chat()
    chat.send("word " * 200)
    told = [e for e in chat.submit("more " * 120).events() if isinstance(e, PromptProgress)]
    assert told[0].done > 200 and all(event.total == told[0].total for event in told)
    assert [event.done for event in told] == sorted(event.done for event in told)


def test_a21_an_error_of_length_carries_both_numbers(make_model: MakeModel) -> None:
    model = make_model("ok", max_seq=256)
    with pytest.raises(PromptTooLong) as caught:
        model.prepare(prompt_ids=[300] * 160)
    assert (caught.value.provided, caught.value.maximum) == (160, 159)
    with pytest.raises(PromptOverCeiling) as over:
        model.prepare(prompt_ids=[300] * 11, max_prompt_tokens=10)
    assert (over.value.provided, over.value.maximum, over.value.code) == (11, 10, "context_length")
    assert model.engine.calls["prefill"] == 0
