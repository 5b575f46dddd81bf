from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import ChatBusy, EncodingError, EngineError, PromptEmpty, RequestError
from dsv4nb.session.chat import Chat
from dsv4nb.session.tree import Turn

MakeModel = Callable[..., Any]
LONG = "word " * 200
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BLOCK = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">Paris'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def first_token(ticket: Any) -> None:
    deadline = time.monotonic() + 5
    while not ticket.text:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_turn_is_written_down_as_it_was_shown(make_model: MakeModel) -> None:
    chat = make_model(["I think.</think>Hello.", "Again."]).chat(thinking=True)
    result = chat.send("Hi")
    turn = chat.turns[0]
    assert (turn.user, turn.reasoning, turn.text, turn.stop_reason) == ("Hi", "I think.", "Hello.", "stop")
    assert turn.n_tokens == result.done.n_tokens and turn.seconds == result.done.elapsed_s and turn.error is None
    assert chat.messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "I think."},
    ]


def test_the_next_turn_is_rendered_from_all_of_them(make_model: MakeModel) -> None:
    model = make_model(["One.", "Two."])
    chat = model.chat(system="Be brief.")
    chat.send("first")
    chat.send("second")
    prompt = model.engine.states[1].ledger[: model.engine.states[1].n_prompt]
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "second"},
    ]
    assert prompt == model.tokenize(messages=expected)
    assert chat.messages == [*expected, {"role": "assistant", "content": "Two."}]


def test_the_history_is_on_the_books_before_anybody_sees_the_end(make_model: MakeModel) -> None:
    chat = make_model("a").chat()
    for i in range(20):
        ticket = chat.submit("hi")
        while not ticket.poll(0)[1]:
            pass
        assert len(chat.turns) == i + 1 and not chat.is_busy


def test_one_turn_at_a_time(make_model: MakeModel) -> None:
    chat = make_model(LONG, delay_s=0.01).chat()
    ticket = chat.submit("hi")
    assert chat.is_busy
    for call in (lambda: chat.submit("more"), chat.reset):
        with pytest.raises(ChatBusy, match="busy"):
            call()
    chat.stop()
    ticket.result(2.0)
    chat.reset()
    assert chat.turns == [] and chat.messages == []


def test_a_stopped_turn_keeps_its_text_and_says_so(make_model: MakeModel) -> None:
    model = make_model([LONG, "Next."], delay_s=0.003)
    chat = model.chat()
    ticket = chat.submit("hi")
    first_token(ticket)
    chat.stop()
    result = ticket.result(2.0)
    assert chat.turns[0].stop_reason == "cancelled" and chat.turns[0].text == result.text != ""
    assert chat.messages[-1]["content"] == result.text
    assert chat.send("go on").text == "Next."
    state = model.engine.states[1]
    assert state.ledger[: state.n_prompt] == model.tokenize(messages=chat.messages[:-1])


def test_a_failed_turn_leaves_the_history_as_it_was(make_model: MakeModel) -> None:
    chat = make_model(["Fine.", "Broken now", "Better."], faults={1: RuntimeError("lost")}).chat()
    chat.send("one")
    before = chat.messages
    with pytest.raises(EngineError, match="lost"):
        chat.send("two")
    assert chat.messages == before
    assert chat.turns[1].error == "generation panicked: RuntimeError: lost (decode at position 11)"
    assert chat.turns[1].stop_reason is None and chat.turns[1].text == "Broken"
    assert chat.send("three").text == "Better."
    assert [turn.user for turn in chat.turns] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        ("", {}, PromptEmpty),
        (5, {}, RequestError),
        ("a", {"top_p": 0}, RequestError),
        ("a", {"temprature": 1}, RequestError),
        ("a", {"thinking": True, "effort": "huge"}, EncodingError),
        ("a " * 5000, {}, RequestError),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_refused_turn_changes_nothing(
    make_model: MakeModel, text: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    chat = make_model().chat()
    with pytest.raises(error):
        chat.submit(text, **options)
    assert not chat.is_busy and chat.turns == [] and chat.messages == []
    assert chat.send("hi").text == "Hello there."


def test_options_are_checked_when_the_chat_is_made(make_model: MakeModel) -> None:
    with pytest.raises(RequestError, match="top_p"):
        make_model().chat(top_p=7)


def test_thinking_can_be_switched_between_turns(make_model: MakeModel) -> None:
    model = make_model("a</think>b")
    chat = model.chat(effort="high")
    chat.send("one")
    chat.thinking = True
    chat.send("two")
    assert [turn.reasoning for turn in chat.turns] == ["", "a"]
    state = model.engine.states[1]
    assert state.ledger[: state.n_prompt] == model.tokenize(messages=chat.messages[:-1], thinking=True, effort="high")


def test_a_turn_has_its_own_options(make_model: MakeModel) -> None:
    chat = make_model("a b c d").chat(max_new=3, seed=4)
    assert len(chat.send("hi", max_new=1).ids) == 1
    result = chat.send("hi")
    assert len(result.ids) == 3 and result.done.config.seed == 4


def test_calls_are_kept_as_calls(make_model: MakeModel) -> None:
    model = make_model(f"Let me see.\n\n{BLOCK}")
    chat = model.chat(tools=[TOOL])
    result = chat.send("Weather in Paris?")
    assert result.stop_reason == "tool_calls" and chat.turns[0].tool == BLOCK
    call = chat.messages[-1]["tool_calls"][0]["function"]
    assert call == {"name": "f", "arguments": '{"city": "Paris"}'}
    answer = {"role": "tool", "tool_call_id": "call_0", "content": "Sunny."}
    assert BLOCK in model.render(messages=[*chat.messages, answer], tools=[TOOL])


def test_listeners_hear_of_every_turn(make_model: MakeModel) -> None:
    chat = make_model().chat()
    heard: list[tuple[str, Any]] = []
    remove = chat.on_submit(lambda text, ticket: heard.append((text, ticket)))
    ticket = chat.submit("one")
    assert heard == [("one", ticket)]
    ticket.result()
    remove()
    chat.send("two")
    assert len(heard) == 1


def test_listeners_hear_of_every_change_that_is_no_turn(make_model: MakeModel) -> None:
    chat = make_model(["One.", "Two."]).chat()
    heard: list[list[str]] = []
    remove = chat.on_change(lambda: heard.append([turn.text for turn in chat.turns]))
    chat.send("1")
    chat.send("2")
    assert heard == []
    chat.rewind(1)
    chat.switch(2)
    assert heard == [["One."], ["One.", "Two."]]
    with pytest.raises(RequestError):
        chat.rewind(7)
    assert len(heard) == 2
    chat.reset()
    assert heard[-1] == []
    remove()
    chat.reset()
    assert len(heard) == 3


def test_an_interrupt_stops_the_turn_and_keeps_its_text(make_model: MakeModel) -> None:
    chat = make_model([LONG, "Fine."], delay_s=0.005).chat()
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    started = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        chat.send("hi")
    assert time.monotonic() - started < 1.0
    assert chat.turns[0].stop_reason == "cancelled" and chat.turns[0].text
    assert not chat.is_busy and chat.send("again").text == "Fine."


def test_it_can_be_awaited(make_model: MakeModel) -> None:
    chat = make_model(["One.", LONG], delay_s=0.002).chat()
    assert asyncio.run(chat.asend("hi")).text == "One."

    async def cancelled() -> None:
        task = asyncio.create_task(chat.asend("more"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    deadline = time.monotonic() + 1
    while chat.is_busy:
        assert time.monotonic() < deadline
    assert chat.turns[1].stop_reason == "cancelled"


def test_it_reads_as_text(make_model: MakeModel) -> None:
    chat = make_model("I think.\nHard.</think>Hello.", name="toy").chat(thinking=True)
    assert repr(chat) == "Chat with toy"
    chat.send("Hi")
    assert repr(chat) == "Chat with toy\n\nYou: Hi\n\n[Thoughts]\n  I think.\n  Hard.\n\nModel: Hello."


def test_marks_are_part_of_the_text(make_model: MakeModel) -> None:
    chat = make_model("a b", prefill_faults={1: RuntimeError("lost")}).chat()
    chat.send("Hi", max_new=1)
    with pytest.raises(EngineError):
        chat.send("More")
    assert repr(chat).endswith(
        "Model: a\n\n[Reached the token limit]\n\nYou: More\n\n"
        "[Failed: generation panicked: RuntimeError: lost (prefill at position 0)]"
    )


def test_displaying_calls_what_was_injected(make_model: MakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Chat] = []
    model = make_model()
    chat = Chat(model._turns(), name="x", show=shown.append)
    chat._ipython_display_()
    assert shown == [chat]


def test_a_chat_is_forgotten_with_its_last_name(make_model: MakeModel) -> None:
    chat = make_model().chat()
    chat.send("hi")
    chat.attach("text", name="t")
    known = weakref.ref(chat)
    gc.disable()
    try:
        del chat
        assert known() is None, "it waits for a collection, and with it everything it holds"
    finally:
        gc.enable()


def test_turns_and_messages_are_copies(make_model: MakeModel) -> None:
    chat = make_model().chat()
    chat.send("hi")
    chat.turns.append(Turn(user="x"))
    chat.messages[0]["content"] = "changed"
    assert len(chat.turns) == 1 and chat.messages[0]["content"] == "hi"
