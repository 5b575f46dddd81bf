"""Calls that wait for a person, on a model that says a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.events import ToolCall
from dsv4nb.session.desk import Desk

MakeModel = Callable[..., Any]


def block(*cities: str) -> str:
    calls = "".join(
        f'<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">{city}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
        for city in cities
    )
    return f"\n\n<｜DSML｜tool_calls>\n{calls}</｜DSML｜tool_calls>"


def get_weather(city: str) -> str:
    """Look up the weather."""
    return f"Sunny in {city}."


def waiting(chat: Any, n: int) -> list[ToolCall]:
    deadline = time.monotonic() + 5
    while len(chat.pending) != n:
        assert time.monotonic() < deadline, chat.pending
        time.sleep(0.002)
    return list(chat.pending)


def results(chat: Any) -> list[str]:
    return [message["content"] for message in chat.messages if message["role"] == "tool"]


@pytest.fixture
def chat(make_model: MakeModel) -> Any:
    return make_model([block("Paris", "Oslo"), "Sunny.", "Again."]).chat(tools=[get_weather], approve="ask")


def test_calls_of_a_run_wait_together_and_are_decided_in_any_order(chat: Any) -> None:
    ticket = chat.submit("Weather?")
    first, second = waiting(chat, 2)
    assert [call.arguments for call in (first, second)] == ['{"city": "Paris"}', '{"city": "Oslo"}']
    chat.approve(second.id, '{"city": "Bergen"}')
    assert waiting(chat, 1) == [first] and ticket.state == "running"
    chat.approve(first.id)
    assert ticket.result(5).text == "Sunny."
    assert results(chat) == ["Sunny in Paris.", "Sunny in Bergen."] and chat.pending == []


def test_a_declined_call_is_told_to_the_model(chat: Any) -> None:
    ticket = chat.submit("Weather?")
    waiting(chat, 2)
    chat.deny()
    chat.approve(arguments={"city": "Rome"})
    ticket.result(5)
    assert results(chat) == ["Not run: the user declined this call.", "Sunny in Rome."]


def test_a_stop_while_calls_wait_ends_the_turn_at_once(chat: Any) -> None:
    ticket = chat.submit("Weather?")
    waiting(chat, 2)
    started = time.monotonic()
    chat.stop()
    assert ticket.result(5).stop_reason == "cancelled" and time.monotonic() - started < 0.3
    assert results(chat) == ["Not run: the user stopped here."] * 2 and chat.pending == []
    with pytest.raises(RequestError, match="no call waits for an answer; waiting: none"):
        chat.approve()
    assert chat.submit("Once more?").result(5).text == "Sunny.", "the chat goes on"


def test_what_is_no_decision_leaves_the_call_waiting(chat: Any) -> None:
    chat.submit("Weather?")
    first, _ = waiting(chat, 2)
    for arguments, says in (("{", "the arguments are no JSON"), ("[1]", "are a list; they must be an object")):
        with pytest.raises(RequestError, match=says) as refused:
            chat.approve(first.id, arguments)
        assert refused.value.param == "arguments"
    with pytest.raises(RequestError, match="call 'x' does not wait for an answer; waiting: call_0, call_1"):
        chat.deny("x")
    assert waiting(chat, 2)[0] == first
    chat.stop()


@pytest.mark.parametrize("door", ["send", "asend", "regenerate", "edit"])
def test_whoever_waits_for_the_turn_cannot_be_asked(make_model: MakeModel, door: str) -> None:
    chat = make_model(["Hello.", block("Paris")]).chat(tools=[get_weather], approve="ask")
    chat.submit("Hi").result(5)

    def call() -> object:
        if door == "asend":
            import asyncio

            return asyncio.run(chat.asend("x"))
        return {"send": lambda: chat.send("x"), "edit": lambda: chat.edit(0, "x")}.get(door, chat.regenerate)()

    with pytest.raises(RequestError, match=r"use chat.submit\(\) with chat.pending") as refused:
        call()
    assert refused.value.param == "approve" and not chat.is_busy and len(chat.turns) == 1
    assert chat.send("x", tool_choice="none").stop_reason == "stop", "nothing could ask"


def test_a_fork_asks_too_and_for_itself(chat: Any) -> None:
    fork = chat.fork()
    ticket = fork.submit("Weather?")
    waiting(fork, 2)
    assert chat.pending == []
    fork.stop()
    ticket.wait(5)


def test_listeners_hear_of_calls_that_wait(chat: Any) -> None:
    heard: list[int] = []
    remove = chat.on_notice(lambda: heard.append(len(chat.pending)))
    ticket = chat.submit("Weather?")
    waiting(chat, 2)
    chat.deny()
    chat.deny()
    ticket.wait(5)
    assert heard == [2, 1, 0]
    remove()


def test_a_desk_wakes_who_waits_and_forgets() -> None:
    desk, call = Desk(), ToolCall(id="a", name="f", arguments="{}")
    desk.lay([call])
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(desk.answer(call, lambda: False)))
    thread.start()
    desk.decide("a", False)
    thread.join(5)
    assert answers == [False]
    desk.lay([call])
    desk.clear()
    assert desk.waiting == []
    assert desk.answer(call, lambda: True) is None
