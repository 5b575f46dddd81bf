"""What a page asks of a chat besides sending and stopping, on a real chat whose model says a script."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import nbformat
import pytest

from dsv4nb.stream.frames import Pump
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.chat import ChatWidget

CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def get_weather(city: str) -> str:
    """Look up the weather."""
    return f"Sunny in {city}."


class Page:
    """A page of one chat: sends commands and reads what the kernel tells."""

    def __init__(self, chat: Any) -> None:
        self.chat = chat
        self.widget = ChatWidget(chat, title="toy", pump=Pump(rate=500))
        self.n = 0

    def give(self, kind: str, **fields: Any) -> str:
        self.n += 1
        key = f"p-{self.n}"
        self.widget.comm.from_page({"kind": kind, "id": key, **fields})
        return key

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Give a command and return its answer."""
        return self.answer(self.give(kind, **fields))

    def answer(self, key: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        self.until(lambda: found.extend(m for m in self.messages("ack") if m["id"] == key) or found)
        return found[0]

    def messages(self, kind: str) -> list[dict[str, Any]]:
        return list(self.widget.comm.messages(kind))

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 5
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def idle(self, *texts: str) -> list[dict[str, Any]]:
        """Wait until these replies are shown; return the turns."""
        self.until(lambda: self.widget.status == "idle" and [turn["text"] for turn in self.turns] == list(texts))
        return self.turns

    @property
    def turns(self) -> list[dict[str, Any]]:
        return list(self.widget.transcript["turns"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables of a notebook."""
    variables: dict[str, Any] = {}
    monkeypatch.setattr("dsv4nb.session.attachments.user_variables", lambda: variables)
    return variables


@pytest.fixture
def open_page() -> Iterator[Callable[..., Page]]:
    made: list[Any] = []

    def open_(script: Any, *, delay_s: float = 0.0, **options: Any) -> Page:
        model = fake_model(script, delay_s=delay_s)
        page = Page(model.chat(**options))
        made.extend((page.widget, model))
        return page

    yield open_
    for one in made:
        one.close()


def test_a_message_is_edited_and_answered_again_from_the_page(open_page: Callable[..., Page]) -> None:
    page = open_page(["One.", "Two.", "Three.", "Four."])
    page.ask("send", text="a")
    page.idle("One.")
    page.ask("send", text="b")
    (first, second) = page.idle("One.", "Two.")
    assert [(turn["number"], turn["siblings"]) for turn in (first, second)] == [(1, [1]), (2, [2])]
    key = page.give("edit", turn=2, text="")
    assert page.answer(key)["ok"]
    last = page.idle("One.", "Three.")[1]
    assert (last["user"], last["number"], last["siblings"]) == ("b", 3, [2, 3])
    assert page.messages("begin")[-1] == {"kind": "begin", "run": 3, "user": "b", "command": key}
    page.ask("edit", turn=1, text="other")
    assert page.idle("Four.")[0]["user"] == "other"
    refused = page.ask("edit", turn=3, text="")
    assert (refused["ok"], refused["error"]) == (False, "this turn is no longer on the branch that is shown")
    page.ask("switch", turn=1)
    assert [turn["number"] for turn in page.idle("One.", "Three.")] == [1, 3]


def test_a_rewind_from_the_page_keeps_the_turn_that_it_names(open_page: Callable[..., Page]) -> None:
    page = open_page(["One.", "Two."])
    for text, texts in (("a", ["One."]), ("b", ["One.", "Two."])):
        page.ask("send", text=text)
        page.idle(*texts)
    assert page.ask("rewind", turn=1)["ok"]
    page.idle("One.")
    page.ask("switch", turn=2)
    page.idle("One.", "Two.")


def test_a_fork_is_named_as_a_cell_can_call_it(open_page: Callable[..., Page], notebook: dict[str, Any]) -> None:
    page = open_page(["One.", "Two."])
    page.ask("send", text="a")
    page.idle("One.")
    assert "no variable holds this chat" in page.ask("fork", turn=1)["error"] and page.chat.forks == []
    notebook["talk"] = page.chat
    assert page.ask("fork", turn=1)["ok"]
    assert page.messages("forked") == [{"kind": "forked", "code": "talk.forks[0]", "turns": 1}]
    assert [turn.text for turn in eval("talk.forks[0]", notebook).turns] == ["One."]


def test_a_call_waits_in_its_card_until_the_page_decides(open_page: Callable[..., Page]) -> None:
    page = open_page([CALL, "Sunny."], tools=[get_weather], approve="ask")
    page.ask("send", text="Weather?")
    page.until(lambda: [m["card"]["state"] for m in page.messages("call")][-1:] == ["waiting"])
    page.widget.comm.from_page({"kind": "resync"})
    page.until(lambda: page.messages("snapshot"))
    (card,) = page.messages("snapshot")[-1]["cards"]
    assert (card["id"], card["state"], card["status"]) == ("call_0", "waiting", "waits for your approval")
    refused = page.ask("approve", call="call_0", text="{")
    assert not refused["ok"] and "the arguments are no JSON" in refused["error"]
    assert page.ask("approve", call="call_0", text='{"city": "Rome"}')["ok"]
    (turn,) = page.idle("Sunny.")
    assert [m["card"]["state"] for m in page.messages("call")][-2:] == ["running", "answered"]
    assert (turn["cards"][0]["arguments"], turn["cards"][0]["result"]) == ('{"city": "Rome"}', "Sunny in Rome.")
    late = page.ask("deny", call="call_0")
    assert not late["ok"] and "does not wait" in late["error"]


def test_a_stop_while_a_call_waits(open_page: Callable[..., Page]) -> None:
    page = open_page([CALL, "Sunny."], tools=[get_weather], approve="ask")
    key = page.give("send", text="Weather?")
    page.until(lambda: page.chat.pending)
    page.give("stop", run=0, command=key)
    (turn,) = page.idle("")
    assert turn["cards"][0]["status"] == "not run: the user stopped here" and turn["stop_reason"] == "cancelled"


def test_variables_are_listed_attached_and_taken_away(open_page: Callable[..., Page], notebook: dict[str, Any]) -> None:
    page = open_page(["One."])
    notebook |= {"notes": "Built in a day.", "get_weather": get_weather, "n": 5}
    key = page.give("list")
    page.until(lambda: page.messages("names"))
    assert page.messages("names") == [
        {
            "kind": "names",
            "id": key,
            "names": [("notes", "str, 15 characters", False), ("get_weather", "function(city: 'str') -> 'str'", True)],
        }
    ]
    assert page.ask("attach", name="notes")["ok"] and page.ask("attach", name="get_weather")["ok"]
    page.until(lambda: len(page.widget.attached) == 2)
    notes, weather = page.widget.attached
    assert (notes["name"], notes["is_tool"], weather["is_tool"]) == ("notes", False, True)
    assert 0 < notes["tokens"] < 40 and weather["tokens"] > 5
    for name in ("nothing", "n"):
        assert not page.ask("attach", name=name)["ok"]
    page.until(lambda: page.widget.room.get("used") == page.chat.room().used)
    page.ask("detach", name="get_weather")
    page.ask("send", text="Really?")
    (turn,) = page.idle("One.")
    assert (
        turn["user"].startswith("`notes` (str, 15 characters):\n```text\nBuilt in a day.") and not page.widget.attached
    )


class Unwritable(dict[str, Any]):
    def __len__(self) -> int:
        raise OSError("gone")


def test_a_value_that_cannot_be_written_down_is_a_refusal(
    open_page: Callable[..., Page], notebook: dict[str, Any]
) -> None:
    page = open_page(["One."])
    notebook["bad"] = Unwritable()
    answer = page.ask("attach", name="bad")
    assert answer["error"] == "bad cannot be written down: OSError: gone"


def test_the_room_is_told_and_follows_what_is_written(open_page: Callable[..., Page]) -> None:
    page = open_page(["One."])
    page.until(lambda: page.widget.room)
    empty = page.widget.room
    assert empty["words"] == f"{empty['used']} of 4,096 positions used; a reply can have {empty['left']:,}"
    key = page.give("measure", text="three more words")
    page.until(lambda: page.messages("measured"))
    (told,) = page.messages("measured")
    assert (told["id"], told["room"]["used"]) == (key, empty["used"] + 3)
    page.ask("send", text="three more words")
    page.idle("One.")
    page.until(lambda: page.widget.room["used"] == page.chat.room().used > empty["used"] + 3)


def test_the_conversation_is_exported_and_a_turn_as_code(open_page: Callable[..., Page]) -> None:
    page = open_page(["One."], seed=7)
    page.ask("send", text="a")
    page.idle("One.")
    found = {}
    for form in ("markdown", "jsonl", "notebook", "code"):
        assert page.ask("export", form=form, turn=1)["ok"]
        found[form] = page.messages("exported")[-1]
    assert [one["file"] for one in found.values()] == ["chat.md", "chat.jsonl", "chat.ipynb", "chat.py"]
    assert json.loads(found["jsonl"]["content"])["messages"][1]["content"] == "One."
    nbformat.validate(nbformat.reads(found["notebook"]["content"], as_version=4))
    assert "## Model\n\nOne." in found["markdown"]["content"]
    assert "chat.send('a', seed=7)" in found["code"]["content"]
    assert "must be one of markdown, jsonl, notebook, code" in page.ask("export", form="pdf", turn=1)["error"]


def test_what_a_turn_cost_goes_with_it(open_page: Callable[..., Page]) -> None:
    page = open_page(["One two."], temperature=0)
    page.ask("send", text="a")
    (turn,) = page.idle("One two.")
    assert turn["footer"].split(" · ")[0] == "2 tokens" and " · greedy · first token " in turn["footer"]
    assert turn["is_timed"] and "runs" not in turn, "a thousand turns would carry them for ever"
    page.ask("times", turn=1)
    (run,) = page.messages("times")[0]["runs"]
    assert run["choice"] == "greedy" and [row[0] for row in run["rows"]][-1] == "Decode"
    assert json.loads(json.dumps(page.widget.transcript)) == page.widget.transcript, "as the page gets it"


def test_a_turn_that_runs_is_in_the_saved_form(open_page: Callable[..., Page]) -> None:
    page = open_page(["word " * 300], delay_s=0.005)
    page.ask("send", text="a")
    page.until(lambda: page.widget.status == "running")
    assert str(page.widget.saved()) == "toy\n\nYou: a\n\nModel: \n\n[Not finished when this was saved]"
    page.chat.stop()
    page.until(lambda: page.widget.status == "idle")
    assert "Not finished" not in str(page.widget.saved())


def test_a_click_is_answered_within_100_ms_at_400_tokens_a_second(open_page: Callable[..., Page]) -> None:
    page = open_page(["word " * 2000], delay_s=0.0025)
    page.ask("send", text="a")
    page.until(lambda: page.messages("frame"))
    took = []
    for value in (True, False) * 5:
        before = time.monotonic()
        page.ask("set_thinking", value=value)
        took.append(time.monotonic() - before)
    assert page.widget.status == "running"
    before = time.monotonic()
    page.give("stop", run=1, command="")
    page.until(lambda: page.widget.status == "idle")
    assert statistics.median(took) < 0.1 and time.monotonic() - before < 0.3, took
