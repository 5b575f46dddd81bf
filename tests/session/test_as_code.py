"""A turn as Python: what it makes is the turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import RequestError

MakeModel = Callable[..., Any]


def get_weather(city: str) -> str:
    """Look up the weather."""
    return f"Sunny in {city}."


def test_it_reads_well(make_model: MakeModel) -> None:
    chat = make_model("Hello.").chat()
    chat.send("Hi", seed=42, temperature=0.5)
    assert chat.to_code() == "chat = m.chat()\nchat.send('Hi', temperature=0.5, seed=42)\n"


def test_what_it_makes_is_the_same_request(make_model: MakeModel) -> None:
    model = make_model(["Sure.</think>One.", "Hm.</think>Two.", "Hm.</think>Two."])
    chat = model.chat(system="Be brief.", thinking=True, effort="high", tools=[get_weather], stop=["zzz"])
    chat.send("a")
    chat.send("b", top_k=7, logit_bias={5: -1.0}, max_new=30)
    asked, asked_messages = chat.turns[1], chat.messages
    chat.set(effort=None, system="Another.", thinking=False)
    code = chat.to_code(1)
    names: dict[str, Any] = {"m": model, "get_weather": get_weather}
    exec(code, names)
    again = names["chat"].turns[-1]
    assert again.options.system == "Be brief." and again.options.max_new == 30 and again.options.thinking
    assert again.runs[0].config == asked.runs[0].config and again.runs[0].config.top_k == 7
    assert (again.text, names["chat"].messages) == ("Two.", asked_messages)
    assert model.engine.states[-1].ledger == model.engine.states[-2].ledger, "the same ids"


def test_a_turn_that_was_not_run_here_has_no_sampler(make_model: MakeModel) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = make_model().chat(messages=history)
    assert chat.to_code(0, model="big") == "chat = big.chat()\nchat.send('a')\n"
    with pytest.raises(RequestError, match="turn is 1"):
        chat.to_code(1)
