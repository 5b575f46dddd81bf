from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4nb.events import ToolCall, ToolResult
from dsv4nb.session.tree import Turn
from dsv4nb.stream.frames import Pump
from dsv4nb.widgets import protocol
from dsv4nb.widgets.chat import ChatWidget, widget_of
from dsv4nb.widgets.panel import keep_reply_route


@pytest.fixture
def widget(chat: Any) -> Iterator[ChatWidget]:
    widget = ChatWidget(chat, title="toy", pump=Pump(rate=500))
    yield widget
    widget._pump.drain()
    widget.close()


def settle(widget: ChatWidget) -> None:
    """Let the pump do its jobs and read all that the running ticket has said."""
    deadline = time.monotonic() + 5
    assert widget._pump.drain()
    while (watch := widget._watch) is not None and not watch.has_read_all():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert widget._pump.drain()


def send(widget: ChatWidget, text: str, key: str = "a-1") -> None:
    widget.comm.from_page({"kind": "send", "id": key, "text": text})
    settle(widget)


def test_a_turn_from_the_page(widget: ChatWidget, chat: Any) -> None:
    send(widget, "hello")
    assert chat.asked == ["hello"]
    assert widget.comm.messages() == [
        {"kind": "ack", "id": "a-1", "ok": True, "error": "", "trace": ""},
        {"kind": "begin", "run": 1, "user": "hello", "command": "a-1"},
    ]
    assert widget.status == "queued"
    ticket = chat.tickets[0]
    ticket.start()
    ticket.say("hm", channel="reasoning")
    settle(widget)
    assert widget.status == "running"
    ticket.say("good ", "day")
    settle(widget)
    ticket.end()
    settle(widget)
    tokens = [token for frame in widget.comm.messages("frame") for token in frame["tokens"]]
    assert tokens == [["r", "hm"], ["c", "good "], ["c", "day"]]
    assert widget.status == "idle"
    assert widget.transcript["ended"] == 1
    (turn,) = widget.transcript["turns"]
    assert (turn["user"], turn["reasoning"], turn["text"], turn["n_reasoning"]) == ("hello", "hm", "good day", 1)


def test_a_turn_from_python_is_shown_too(widget: ChatWidget, chat: Any) -> None:
    chat.submit("from a cell")
    settle(widget)
    assert widget.comm.messages("begin") == [{"kind": "begin", "run": 1, "user": "from a cell", "command": ""}]


def test_a_repeated_command_has_one_effect_and_the_same_answer(widget: ChatWidget, chat: Any) -> None:
    for _ in range(3):
        send(widget, "hello")
    assert chat.asked == ["hello"]
    assert widget.comm.messages("ack") == [{"kind": "ack", "id": "a-1", "ok": True, "error": "", "trace": ""}] * 3


def test_a_refused_send_is_answered_in_words(widget: ChatWidget, chat: Any) -> None:
    send(widget, "first")
    send(widget, "second", "a-2")
    assert widget.comm.messages("ack")[-1] == {
        "kind": "ack",
        "id": "a-2",
        "ok": False,
        "error": "the chat is busy",
        "trace": "",
    }


def test_a_fault_is_answered_with_where_it_comes_from(
    widget: ChatWidget, chat: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(text: str) -> None:
        raise KeyError(text)

    monkeypatch.setattr(chat, "submit", broken)
    send(widget, "hello")
    (ack,) = widget.comm.messages("ack")
    assert (ack["ok"], ack["error"]) == (False, "KeyError: 'hello'")
    assert "in broken" in ack["trace"]
    capsys.readouterr()  # the pump tells it on stderr too
    send(widget, "hello")  # the id comes again
    assert widget.comm.messages("ack") == [ack, ack]


def test_stop_cancels_at_once_and_the_partial_text_is_marked(widget: ChatWidget, chat: Any) -> None:
    send(widget, "count")
    ticket = chat.tickets[0]
    ticket.start()
    ticket.say("1 ", "2 ")
    settle(widget)
    for _ in range(2):
        widget.comm.from_page({"kind": "stop", "id": "a-2", "run": 1, "command": "a-1"})
        assert ticket.cancelled, "before the handler returns"
    settle(widget)
    assert widget.status == "stopping"
    ticket.end("cancelled")
    settle(widget)
    assert widget.comm.traits("status") == ["queued", "running", "stopping", "idle"]
    assert widget.transcript["turns"][0]["stop_reason"] == "cancelled"
    assert widget.transcript["turns"][0]["text"] == "1 2 "
    assert "[Stopped]" in str(widget.saved())
    send(widget, "again", "a-3")
    assert chat.asked == ["count", "again"]


def test_a_stop_for_another_run_does_nothing(widget: ChatWidget, chat: Any) -> None:
    send(widget, "count")
    widget.comm.from_page({"kind": "stop", "id": "a-2", "run": 7, "command": "b-1"})
    settle(widget)
    assert chat.tickets[0].cancelled == 0
    assert widget.comm.messages("ack")[-1]["ok"]


def test_a_stop_that_overtakes_its_send_refuses_it(widget: ChatWidget, chat: Any) -> None:
    widget.comm.from_page({"kind": "stop", "id": "a-2", "run": 0, "command": "a-1"})
    send(widget, "hello", "a-1")
    assert chat.asked == []
    assert {
        "kind": "ack",
        "id": "a-1",
        "ok": False,
        "error": "stopped before it was sent",
        "trace": "",
    } in widget.comm.messages()


def test_a_failure_stands_in_its_turn(widget: ChatWidget, chat: Any) -> None:
    send(widget, "hello")
    chat.tickets[0].start()
    chat.tickets[0].say("half ")
    chat.tickets[0].fail("out of memory")
    settle(widget)
    (turn,) = widget.transcript["turns"]
    assert (turn["text"], turn["error"], turn["stop_reason"]) == ("half ", "out of memory", None)
    assert widget.status == "idle"


def test_a_late_view_gets_the_running_turn(widget: ChatWidget, chat: Any) -> None:
    widget.comm.from_page({"kind": "resync"})
    settle(widget)
    assert widget.comm.messages() == [], "nothing runs, the traits say it all"
    send(widget, "hello")
    chat.tickets[0].start()
    chat.tickets[0].say("a", "b", channel="reasoning")
    chat.tickets[0].say("c")
    widget.comm.from_page({"kind": "resync"})
    settle(widget)
    (snapshot,) = widget.comm.messages("snapshot")
    assert (snapshot["run"], snapshot["next"], snapshot["reasoning"], snapshot["text"]) == (1, 3, "ab", "c")
    assert (snapshot["user"], snapshot["command"], snapshot["n_reasoning"]) == ("hello", "a-1", 2)


def test_what_sets_formulas_comes_when_a_page_asks(widget: ChatWidget) -> None:
    assert widget.comm.messages("maths") == []
    widget.comm.from_page({"kind": "maths"})
    settle(widget)
    (sent,) = widget.comm.messages("maths")
    assert sent["script"] == (Path(protocol.__file__).parent / "static/maths.js").read_text()


def test_a_new_chat_while_one_runs_stops_it_first(widget: ChatWidget, chat: Any) -> None:
    send(widget, "hello")
    widget.comm.from_page({"kind": "reset", "id": "a-2"})
    settle(widget)
    assert chat.tickets[0].cancelled and chat.resets == 0
    assert [ack["id"] for ack in widget.comm.messages("ack")] == ["a-1"]
    chat.tickets[0].end("cancelled")
    settle(widget)
    assert chat.resets == 1
    assert widget.transcript["turns"] == []
    assert [ack["id"] for ack in widget.comm.messages("ack")] == ["a-1", "a-2"]


def answered(widget: ChatWidget, chat: Any, *texts: str) -> None:
    for text in texts:
        chat.submit("asked")
        chat.tickets[-1].say(text)
        chat.tickets[-1].end()
        settle(widget)


def shown(widget: ChatWidget) -> list[str]:
    return [turn["text"] for turn in widget.transcript["turns"]]


def test_what_python_does_to_a_chat_is_shown_at_once(widget: ChatWidget, chat: Any) -> None:
    answered(widget, chat, "one", "two")
    all_turns = chat.turns
    chat.become(all_turns[:1])
    settle(widget)
    assert shown(widget) == ["one"] and widget.transcript["ended"] == 2
    chat.become(all_turns)
    settle(widget)
    assert shown(widget) == ["one", "two"]
    chat.reset()
    settle(widget)
    assert shown(widget) == [] and str(widget.saved()) == "toy\n\n(no messages)"


def test_a_rewind_before_the_last_frame_was_sent_is_shown_after_it(chat: Any) -> None:
    widget = ChatWidget(chat, pump=Pump(rate=1))  # a tick a second: the end of the turn is not seen in time
    chat.submit("first")
    widget._pump.drain()
    chat.tickets[0].say("one")
    chat.tickets[0].end()
    chat.become([])
    widget._pump.drain()
    assert widget.comm.traits("transcript")[-1] == {"ended": 1, "turns": []}
    assert widget.status == "idle"
    widget.close()


CALL = ToolCall(id="call_0", name="get_weather", arguments='{"city": "Paris"}')
RESULT = ToolResult(id="call_0", name="get_weather", content="Sunny, <b>21</b>", arguments='{"city": "Paris"}')


def test_calls_are_cards_while_they_run_and_for_ever(widget: ChatWidget, chat: Any) -> None:
    send(widget, "weather?")
    ticket = chat.tickets[0]
    ticket.start()
    ticket.say("<secret markup>", channel="tool")
    widget.comm.from_page({"kind": "resync"})
    settle(widget)
    ticket.events.append(CALL)
    settle(widget)
    ticket.events.append(RESULT)
    settle(widget)
    widget.comm.from_page({"kind": "resync"})
    settle(widget)
    running, done = [message["card"] for message in widget.comm.messages("call")]
    assert (running["name"], running["arguments"], running["status"]) == (
        "get_weather",
        '{"city": "Paris"}',
        "running…",
    )
    assert (done["status"], done["result"], done["preview"]) == ("answered", RESULT.content, RESULT.content)
    early, late = widget.comm.messages("snapshot")
    assert (early["is_calling"], early["cards"]) == (True, [])
    assert (late["is_calling"], late["cards"]) == (False, [done])
    ticket.say("It is sunny.")
    ticket.end()
    settle(widget)
    (turn,) = widget.transcript["turns"]
    assert turn["cards"] == [done]
    saved = widget.saved()
    assert '[Call] get_weather({"city": "Paris"}) → Sunny, <b>21</b>' in str(saved)
    assert "Sunny, &lt;b&gt;21&lt;/b&gt;" in saved._repr_html_()
    assert "secret markup" not in json.dumps(widget.transcript) + str(saved) + saved._repr_html_()


def test_the_note_of_a_reply_stays_with_it(widget: ChatWidget, chat: Any) -> None:
    send(widget, "one")
    chat.tickets[0].say("1")
    chat.tickets[0].end(note="plain: measured no faster")
    settle(widget)
    answered(widget, chat, "two")
    footers = [turn["footer"] for turn in widget.transcript["turns"]]
    assert footers == ["1 token · 2.0 tok/s · plain: measured no faster · greedy", "1 token · 2.0 tok/s · greedy"]


def test_a_turn_that_ran_before_the_widget_came_is_taken_over(chat: Any) -> None:
    chat.turns.append(Turn(user="before", text="seen"))
    chat.submit("meanwhile")
    widget = ChatWidget(chat, pump=Pump(rate=500))
    chat.tickets[0].say("missed")
    chat.tickets[0].end()
    chat.submit("after")
    settle(widget)
    assert [turn["text"] for turn in widget.transcript["turns"]] == ["seen", "missed"]
    assert widget.status == "queued"
    widget.close()


def test_thinking_is_the_chats(widget: ChatWidget, chat: Any) -> None:
    widget.comm.from_page({"kind": "set_thinking", "id": "a-1", "value": True})
    settle(widget)
    assert chat.thinking is True and widget.thinking is True


def test_a_turn_that_starts_before_the_last_frame_was_sent_loses_nothing(chat: Any) -> None:
    widget = ChatWidget(chat, pump=Pump(rate=1))  # a tick a second: the end of the first turn is not seen in time
    chat.submit("first")
    widget._pump.drain()
    chat.tickets[0].say("one")
    chat.tickets[0].end()
    chat.submit("second")
    widget._pump.drain()
    assert [turn["text"] for turn in widget.transcript["turns"]] == ["one"]
    assert widget.run == 2 and widget.status == "queued"
    widget.close()


def test_a_long_turn_costs_bytes_in_proportion_to_its_text(widget: ChatWidget, chat: Any) -> None:
    send(widget, "go")
    chat.tickets[0].start()
    for i in range(2000):
        chat.tickets[0].say("word")
        if i % 100 == 0:
            time.sleep(0.005)
    chat.tickets[0].end()
    settle(widget)
    sent = [json.dumps(frame) for frame in widget.comm.messages("frame")]
    assert sum(map(len, sent)) <= 4 * 8000 + 200 * len(sent)
    assert len(widget.comm.traits("transcript")) == 1, "whole text only at the end"


def test_the_saved_page_reads_without_widgets(widget: ChatWidget, chat: Any) -> None:
    send(widget, "<b>hello</b>")
    chat.tickets[0].say("good day")
    chat.tickets[0].end()
    settle(widget)
    bundle, _ = widget._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id
    assert "good day" in bundle["text/plain"]
    assert "&lt;b&gt;hello&lt;/b&gt;" in bundle["text/html"] and "<script" not in bundle["text/html"]


def test_a_chat_has_one_widget(chat: Any) -> None:
    assert widget_of(chat) is widget_of(chat)
    assert widget_of(chat).title == "toy"


@pytest.mark.parametrize("has_route", [True, False], ids=["ipykernel 7.4.0", "others"])
def test_answers_keep_the_route_on_which_they_were_asked(has_route: bool) -> None:
    comm = SimpleNamespace(_reply_subshell_for=lambda data, default: "gone") if has_route else SimpleNamespace()
    keep_reply_route(comm)
    assert hasattr(comm, "_reply_subshell_for") is has_route
    if has_route:
        assert comm._reply_subshell_for({}, "here") == "here"


def test_the_style_and_the_script_need_no_network() -> None:
    scripts = Path(protocol.__file__).parent
    for text in (str(ChatWidget._esm), str(ChatWidget._css), (scripts / "static/maths.js").read_text()):
        addresses = set(re.findall(r"https?://[\w.-]+[^\s\"'`]*", text))
        assert {address for address in addresses if not address.startswith("http://www.w3.org/")} == set()
        assert "@import" not in text
    assert str(ChatWidget._esm).count("import(") == 1, "what sets formulas, as the kernel sent it"
    assert all("innerHTML" not in path.read_text() for path in (scripts / "js").iterdir())


def test_another_branch_replaces_what_was_shown(chat: Any) -> None:
    widget = ChatWidget(chat, pump=Pump(rate=500))
    for text in ("one", "two"):
        chat.submit("asked")
        chat.tickets[-1].say(text)
        chat.tickets[-1].end()
        settle(widget)
    assert [turn["text"] for turn in widget.transcript["turns"]] == ["one", "two"]
    chat.turns = chat.turns[:1]  # regenerated: the new turn follows the first one
    chat.submit("asked")
    settle(widget)
    assert [turn["text"] for turn in widget.transcript["turns"]] == ["one"]
    chat.tickets[-1].say("another")
    chat.tickets[-1].end()
    settle(widget)
    assert [turn["text"] for turn in widget.transcript["turns"]] == ["one", "another"]
