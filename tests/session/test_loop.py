"""Turns that call Python functions, on a model that says a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.events import Done, Failed, ToolCall, ToolResult

MakeModel = Callable[..., Any]


def block(*calls: tuple[str, dict[str, Any]]) -> str:
    """Return what a model writes to make calls."""
    text = "\n\n<｜DSML｜tool_calls>\n"
    for name, arguments in calls:
        text += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value)
            flag = "true" if is_text else "false"
            text += f'<｜DSML｜parameter name="{key}" string="{flag}">{shown}</｜DSML｜parameter>\n'
        text += "</｜DSML｜invoke>\n"
    return text + "</｜DSML｜tool_calls>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def roles(chat: Any) -> list[str]:
    return [message["role"] for message in chat.messages]


def test_a_function_is_called_and_the_model_goes_on_with_its_result(make_model: MakeModel) -> None:
    model = make_model([block(("add", {"a": 2, "b": 3})), "It is 5."])
    chat = model.chat(tools=[add])
    reply = chat.send("What is 2 + 3?")
    assert (reply.text, reply.stop_reason) == ("It is 5.", "stop")
    assert [step.stop_reason for step in reply.steps] == ["tool_calls", "stop"]
    assert roles(chat) == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    turn = chat.turns[0]
    assert [call.arguments for call in turn.calls] == ['{"a": 2, "b": 3}']
    assert [result.content for result in turn.results] == ["5"]
    assert turn.n_tokens == sum(step.done.n_tokens for step in reply.steps)
    # what the model read the second time holds the call and its result
    assert "<tool_result>5</tool_result>" in model.render(messages=[*chat.messages, {"role": "user", "content": "?"}])


def test_calls_of_one_conversation_have_different_ids(make_model: MakeModel) -> None:
    model = make_model(
        [block(("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})), block(("add", {"a": 3, "b": 3})), "ok"]
    )
    chat = model.chat(tools=[add])
    reply = chat.send("Go")
    asked = [call["id"] for message in chat.messages for call in message.get("tool_calls", ())]
    assert asked == ["call_0", "call_1", "call_2"]
    assert [m["content"] for m in chat.messages if m["role"] == "tool"] == ["2", "4", "6"]
    assert reply.text == "ok"


def test_send_calls_functions_on_the_thread_that_asked_and_submit_on_another(make_model: MakeModel) -> None:
    seen: list[str] = []

    def where() -> str:
        """Tell the thread."""
        seen.append(threading.current_thread().name)
        return "here"

    model = make_model([block(("where", {})), "ok", block(("where", {})), "ok"], name="threads")
    chat = model.chat(tools=[where])
    chat.send("Go")
    chat.submit("Go").result()
    assert seen == [threading.main_thread().name, "dsv4nb-tools-threads"]


def test_events_of_all_runs_come_in_order_and_end_once(make_model: MakeModel) -> None:
    chat = make_model([block(("add", {"a": 2, "b": 3})), "It is 5."]).chat(tools=[add])
    events = list(chat.submit("Go").events())
    assert [type(e) for e in events if isinstance(e, ToolCall | ToolResult)] == [ToolCall, ToolResult]
    assert [isinstance(e, Done | Failed) for e in events].count(True) == 1 and isinstance(events[-1], Done)


def test_a_declined_call_is_not_run_and_the_model_is_told(make_model: MakeModel) -> None:
    asked: list[ToolCall] = []

    def decline(call: ToolCall) -> bool:
        asked.append(call)
        return False

    chat = make_model([block(("add", {"a": 2, "b": 3})), "Well."]).chat(tools=[add], approve=decline)
    assert chat.send("Go").text == "Well."
    assert [(call.name, call.arguments) for call in asked] == [("add", '{"a": 2, "b": 3}')]
    assert chat.messages[2]["content"] == "Not run: the user declined this call."
    assert chat.turns[0].results[0].error


def test_an_edited_call_runs_with_the_edited_arguments(make_model: MakeModel) -> None:
    chat = make_model([block(("add", {"a": 2, "b": 3})), "ok"]).chat(
        tools=[add], approve=lambda call: {"a": 20, "b": 30}
    )
    chat.send("Go")
    assert chat.messages[2]["content"] == "50"
    # the history reads as what was run, or the model would report the sum of other numbers
    assert json.loads(chat.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 20, "b": 30}
    turn = chat.turns[0]
    assert json.loads(turn.calls[0].arguments) == {"a": 2, "b": 3}
    assert json.loads(turn.results[0].arguments) == {"a": 20, "b": 30}


def test_a_function_that_fails_is_something_the_model_reads(make_model: MakeModel) -> None:
    def broken(x: int) -> int:
        """Break."""
        raise ValueError(f"no {x}")

    chat = make_model([block(("broken", {"x": 1})), block(("nothing", {})), "Sorry."]).chat(tools=[broken])
    assert chat.send("Go").text == "Sorry."
    first, second = (m["content"] for m in chat.messages if m["role"] == "tool")
    assert "ValueError: no 1" in first and "Traceback" not in first
    assert "nothing" in second and "broken" in second  # names what there is


def test_an_approval_that_fails_fails_the_turn_and_leaves_the_history(make_model: MakeModel) -> None:
    def unsure(call: ToolCall) -> Any:
        raise LookupError("who knows")

    model = make_model([block(("add", {"a": 2, "b": 3})), "ok"])
    chat = model.chat(tools=[add], approve=unsure)
    with pytest.raises(RequestError, match="LookupError: who knows") as caught:
        chat.send("Go")
    assert caught.value.param == "approve"
    assert chat.messages == [] and chat.turns[0].error
    assert make_model("fine").generate("hi").text == "fine"
    with pytest.raises(RequestError, match="approve returned 7"):
        make_model([block(("add", {"a": 2, "b": 3}))]).chat(tools=[add], approve=lambda call: 7).send("Go")


def test_a_turn_has_at_most_so_many_rounds_of_calls(make_model: MakeModel) -> None:
    ran: list[int] = []

    def again() -> str:
        """Do it again."""
        ran.append(1)
        return "once more"

    chat = make_model(block(("again", {}))).chat(tools=[again], max_rounds=2)
    reply = chat.send("Go")
    assert len(ran) == 2 and reply.stop_reason == "tool_calls" and len(reply.steps) == 3
    assert chat.messages[-1]["content"] == "Not run: this turn has had 2 rounds of calls."
    once = make_model(block(("again", {}))).chat(tools=[again], max_rounds=1)
    once.send("Go")
    assert once.messages[-1]["content"] == "Not run: this turn has had 1 round of calls."
    with pytest.raises(RequestError, match="max_rounds is 0"):
        make_model().chat(tools=[again], max_rounds=0)


def test_an_interrupt_in_a_function_ends_the_turn_in_order(make_model: MakeModel) -> None:
    def interrupted() -> str:
        """Be interrupted."""
        raise KeyboardInterrupt

    model = make_model([block(("interrupted", {}), ("interrupted", {})), "after"])
    chat = model.chat(tools=[interrupted])
    with pytest.raises(KeyboardInterrupt):
        chat.send("Go")
    assert chat.turns[0].stop_reason == "cancelled"
    assert [m["content"] for m in chat.messages if m["role"] == "tool"] == [
        "Not run: the user interrupted it.",
        "Not run: the user stopped here.",
    ]
    assert chat.send("Next").text == "after"


def test_cancelling_stops_the_run_under_way(make_model: MakeModel) -> None:
    model = make_model([block(("add", {"a": 2, "b": 3})), "word " * 400], delay_s=0.005)
    chat = model.chat(tools=[add])
    ticket = chat.submit("Go")
    deadline = time.monotonic() + 10
    while "word" not in ticket.text and time.monotonic() < deadline:
        time.sleep(0.01)
    ticket.cancel()
    assert ticket.result().stop_reason == "cancelled" and ticket.state == "cancelled"
    assert roles(chat) == ["user", "assistant", "tool", "assistant"]
    assert not chat.is_busy


def test_a_tool_that_is_no_function_is_left_to_the_caller(make_model: MakeModel) -> None:
    declared = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    model = make_model([block(("add", {"a": 2, "b": 3}), ("look", {})), "Seen."])
    chat = model.chat(tools=[add, declared])
    assert chat.send("Go").stop_reason == "tool_calls"
    with pytest.raises(RequestError, match="waits for results of call_0, call_1"):
        chat.send("And?")
    with pytest.raises(RequestError, match="results are of call_7; the last turn waits for call_0, call_1"):
        chat.send_results({"call_7": 1})
    reply = chat.send_results({"call_0": 5, "call_1": {"seen": ["a", None]}})
    assert reply.text == "Seen."
    assert [m["content"] for m in chat.messages if m["role"] == "tool"] == ["5", '{"seen": ["a", null]}']


def test_generate_returns_the_calls_and_runs_nothing(make_model: MakeModel) -> None:
    reply = make_model(block(("add", {"a": 2, "b": 3}))).generate("Go", tools=[add])
    assert reply.stop_reason == "tool_calls"
    assert [(call.id, call.name, call.arguments) for call in reply.tool_calls] == [
        ("call_0", "add", '{"a": 2, "b": 3}')
    ]


def test_a_system_message_stays_in_front(make_model: MakeModel) -> None:
    model = make_model([block(("add", {"a": 2, "b": 3})), "ok"])
    chat = model.chat(tools=[add], system="Be brief.")
    reply = chat.send("Go")
    assert [m["role"] for m in reply.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert reply.messages[0]["content"] == "Be brief."
    assert roles(chat) == ["system", "user", "assistant", "tool", "assistant"]


def test_the_second_run_of_a_turn_may_be_refused(make_model: MakeModel) -> None:
    def long() -> str:
        """Say much."""
        return "word " * 500

    model = make_model([block(("long", {})), "never"], max_seq=420)
    chat = model.chat(tools=[long])
    with pytest.raises(RequestError, match="max_seq"):
        chat.send("Go")
    assert chat.messages == [] and not chat.is_busy and "max_seq" in (chat.turns[0].error or "")
