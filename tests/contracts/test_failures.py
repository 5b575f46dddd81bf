"""What goes wrong in a run or with a handle: classified alike on the result, in the events and when awaited."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsv4nb.engine.protocol import Prefilled
from dsv4nb.errors import (
    ChatBusy,
    Dsv4Error,
    EncodingError,
    EngineDead,
    EngineError,
    ModelClosed,
    Overloaded,
    ReplayMismatch,
    RequestError,
)
from dsv4nb.events import Failed
from dsv4nb.model import Model
from dsv4nb.testing.fake_engine import FakeEngine

MakeModel = Callable[..., Model]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BLOCK = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'

# what an engine raises, the error that comes of it, its code, whether to try again, and what it says
FAULTS: list[tuple[BaseException, type[Dsv4Error], str, bool, tuple[str, ...]]] = [
    (OSError("disk"), EngineError, "engine", False, ("generation panicked: OSError: disk", "decode at position 5")),
    (AssertionError(), EngineError, "engine", False, ("generation panicked: AssertionError (decode",)),
    (EngineError("the numbers broke"), EngineError, "engine", False, ("the numbers broke",)),
    (MemoryError(), Overloaded, "overloaded", True, ("memory ran out", "ask for less, or try again")),
    (RuntimeError("CUDA out of memory. Tried to"), Overloaded, "overloaded", True, ("Tried to", "try again")),
    (OSError(12, "Cannot allocate memory"), Overloaded, "overloaded", True, ("memory ran out", "try again")),
    (RuntimeError("CUDA error: misaligned address"), EngineDead, "engine_dead", False, ("device was lost", "Restart")),
]


def outcome(model: Model, **options: Any) -> tuple[Dsv4Error, Failed]:
    """Return the error of a failed run and its last event, the same on every channel."""
    ticket = model.submit(prompt_ids=[9] * 5, **options)
    with pytest.raises(Dsv4Error) as raised:
        ticket.result(5)
    with pytest.raises(Dsv4Error) as awaited:
        asyncio.run(ticket.aresult())
    assert awaited.value is raised.value
    last = list(ticket.events())[-1]
    assert isinstance(last, Failed)
    assert last == Failed(
        code=raised.value.code,
        message=str(raised.value),
        param=raised.value.param,
        retryable=raised.value.retryable,
    )
    return raised.value, last


@pytest.mark.parametrize(("fault", "error", "code", "retryable", "words"), FAULTS, ids=[str(c[0])[:20] for c in FAULTS])
def test_m17_m18_a_failure_is_classified_by_what_it_says(
    make_model: MakeModel,
    fault: BaseException,
    error: type[Dsv4Error],
    code: str,
    retryable: bool,
    words: tuple[str, ...],
) -> None:
    model = make_model("a b", faults={0: fault})
    raised, last = outcome(model)
    assert type(raised) is error and (last.code, last.retryable) == (code, retryable)
    assert all(word in last.message for word in words), last.message
    if error is EngineDead:
        with pytest.raises(EngineDead, match="load the model again"):
            model.submit("hi")
    else:
        assert model.generate("hi").text == "a b"


def test_m18_a_row_that_leaves_nothing_to_choose_says_why(make_model: MakeModel) -> None:
    model = make_model("a b")
    raised, _ = outcome(model, logit_bias=dict.fromkeys(range(4096), -math.inf))
    assert (raised.code, raised.param) == ("engine", "logit_bias")
    assert "no token is left" in str(raised) and "loosen the mask or the bias" in str(raised)

    engine = model.engine
    assert isinstance(engine, FakeEngine)
    prefill = engine.prefill

    def broken(*arguments: Any, **options: Any) -> Prefilled:
        return replace(prefill(*arguments, **options), logits=np.full(4096, np.nan, np.float32))

    engine.prefill = broken  # type: ignore[method-assign]
    for options in ({}, {"temperature": 0}, {"logprobs": 2}, {"presence_penalty": 1.0}):
        raised, _ = outcome(model, **options)
        assert raised.code == "engine" and "the best logit of the row is nan" in str(raised)


def test_m18_a_handle_or_a_chat_that_cannot_says_so(make_model: MakeModel) -> None:
    model = make_model(["word " * 200, BLOCK], delay_s=0.002)
    chat = model.chat(tools=[TOOL])
    ticket = chat.submit("hi")
    while not ticket.text:
        assert not ticket.wait(0.001)
    for call in (lambda: chat.submit("more"), chat.reset):
        with pytest.raises(ChatBusy, match=r"busy; wait for the turn to end, or stop it with chat\.stop\(\)") as busy:
            call()
        assert (busy.value.code, busy.value.retryable) == ("chat_busy", True)
    chat.stop()
    ticket.result(5)
    chat.send("again")
    with pytest.raises(RequestError, match=r"waits for results of call_0; chat\.send_results takes them") as waits:
        chat.send("more")
    assert waits.value.param == "text"
    with pytest.raises(RequestError, match="results are of x; the last turn waits for call_0") as wrong:
        chat.send_results({"x": 1})
    assert wrong.value.param == "results"
    model.close()
    with pytest.raises(ModelClosed, match=r"'fake' is closed; load it again with dsv4nb\.load") as closed:
        model.submit("hi")
    assert (closed.value.code, closed.value.retryable) == ("model_closed", False)


def test_m18_a_replay_that_is_none_says_what_differs(make_model: MakeModel) -> None:
    model = make_model("a b c")
    recipe = model.generate("hi", seed=1).recipe
    assert model.replay(recipe).ids
    for changed, param, words in (
        (replace(recipe, weights="0"), "weights", "Load the checkpoint that the recipe names"),
        (replace(recipe, ids_sha256="0"), None, "the recipe was changed, or this machine computes other numbers"),
    ):
        with pytest.raises(ReplayMismatch, match=words) as differs:
            model.replay(changed)
        assert (differs.value.code, differs.value.param) == ("replay_mismatch", param)


def test_m18_text_that_is_no_text_is_refused_where_it_is_tokenized(toy: Model) -> None:
    function = {"name": "f", "description": "half a \ud800 pair"}
    with pytest.raises(EncodingError, match="half a surrogate pair") as refused:
        toy.submit("hi", tools=[{"type": "function", "function": function}])
    assert (refused.value.code, refused.value.param) == ("invalid_messages", "messages")
