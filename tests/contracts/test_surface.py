"""The eight cells of the surface gate on the bundled model, as far as they need no drafter."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict
from typing import Any

import pytest

from dsv4nb.errors import PromptEmpty, PromptTooLong, RequestError
from dsv4nb.events import Event, Reasoning, Token, ToolCall, ToolResult
from dsv4nb.model import Model

CAPITAL = "What is the capital of France?"
STORY = "Tell me a story about a fox."


def said(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Token | Reasoning | ToolCall)]


def test_m70_it_starts_and_tells_what_it_is(toy: Model) -> None:
    facts = dict(toy.info.rows())
    assert facts["model"] == "toy" and facts["device"].startswith("CPU")
    assert {"contract", "max_seq", "drafter"} <= facts.keys()
    assert toy.caps.chat and toy.caps.tools and toy.caps.context_length == toy.max_seq
    assert "Paris" in toy.generate(CAPITAL, temperature=0).text


def test_m70_every_door_gives_the_same_stream(toy: Model) -> None:
    asked: dict[str, Any] = {"seed": 11, "max_new": 12, "temperature": 1.0, "thinking": True}
    ticket = toy.submit(STORY, **asked)
    result, told = ticket.result(), said(list(ticket.events()))

    async def awaited() -> list[Event]:
        return [event async for event in toy.astream(STORY, **asked)]

    heard: list[Event] = []
    assert said(list(toy.stream(STORY, **asked))) == said(asyncio.run(awaited())) == told
    assert toy.generate(STORY, on_token=heard.append, **asked).ids == result.ids
    assert heard == [event for event in told if isinstance(event, Token)]
    assert "".join(event.text for event in told if isinstance(event, Token)) == result.raw_text


def test_m70_penalties_change_the_reply_and_refusals_have_names(toy: Model) -> None:
    plain = toy.generate(STORY, temperature=0, max_new=24)
    held = toy.generate(STORY, temperature=0, max_new=24, repetition_penalty=1.5, frequency_penalty=4.0)
    assert held.ids != plain.ids and held.config.repetition_penalty == 1.5
    refused: list[tuple[dict[str, Any], type[RequestError], str]] = [
        ({"prompt": ""}, PromptEmpty, "prompt"),
        ({"prompt": "a " * 5000}, PromptTooLong, "messages"),
        ({"prompt": "a", "top_p": 0}, RequestError, "top_p"),
        ({"prompt": "a", "regex": "("}, RequestError, "regex"),
        ({"prompt": "a", "temprature": 1}, RequestError, "temprature"),
    ]
    for asked, error, param in refused:
        with pytest.raises(error) as raised:
            toy.submit(**asked)
        assert raised.value.param == param


def test_m70_a_seed_decides(toy: Model) -> None:
    unknown = "What is the code word?"  # nothing tells, so it guesses
    replies = [toy.generate(unknown, temperature=1.0, seed=seed) for seed in (1, 2, 1)]
    assert replies[0].ids == replies[2].ids != replies[1].ids
    drawn = toy.generate(unknown, temperature=1.0)
    assert toy.generate(unknown, temperature=1.0, seed=drawn.config.seed).ids == drawn.ids
    assert toy.replay(drawn.recipe).ids == drawn.ids
    assert json.loads(json.dumps(asdict(drawn.recipe)))["ids_sha256"] == drawn.recipe.ids_sha256


def test_m70_tools_go_round(toy: Model) -> None:
    asked: list[str] = []

    def get_time(city: str) -> dict[str, str]:
        """Get the local time in a city.

        Args:
            city: Name of the city
        """
        asked.append(city)
        return {"city": city, "time": "16:45"}

    chat = toy.chat(tools=[get_time], temperature=0)
    ticket = chat.submit("What time is it in Oslo?")
    reply = ticket.result(30)
    events = ticket.poll(0)[0]
    (call,) = [event for event in events if isinstance(event, ToolCall)]
    (answer,) = [event for event in events if isinstance(event, ToolResult)]
    assert json.loads(call.arguments) == {"city": "Oslo"} and asked == ["Oslo"]
    assert (answer.id, answer.content, answer.error) == (call.id, '{"city": "Oslo", "time": "16:45"}', "")
    assert "16:45" in reply.text and reply.stop_reason == "stop" and "DSML" not in reply.text
    assert [message["role"] for message in reply.messages if message["role"] != "system"] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_m70_sixteen_at_once_get_what_each_alone_gets(toy: Model) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": prompt, "temperature": temperature, "seed": 3, "max_new": 4}
        for prompt in (CAPITAL, STORY)
        for temperature in (0, 1.0)
    ]
    alone = [toy.generate(**options).ids for options in asked]
    together: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        together[i] = toy.generate(**asked[i % 4]).ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[i] for i in range(16)] == alone * 4


def test_m70_a_stop_in_the_middle_keeps_the_text_and_harms_no_other(toy: Model) -> None:
    whole = toy.generate(STORY, temperature=0, max_new=24)
    ticket, other = toy.submit(STORY, temperature=0), toy.submit(CAPITAL, temperature=0)
    for event in ticket.events():
        if isinstance(event, Token):
            ticket.cancel()
    partial = ticket.result()
    assert partial.stop_reason == "cancelled" and partial.ids == whole.ids[: len(partial.ids)] != ()
    assert "Paris" in other.result().text
