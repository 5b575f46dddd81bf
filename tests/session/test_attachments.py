"""Variables and functions of a notebook in a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dsv4nb.session.attachments as attachments
from dsv4nb.errors import RequestError
from dsv4nb.session.attachments import Attachment, attachable, attachment_of, message_with

MakeModel = Callable[..., Any]


class Table:
    """Looks like a data frame."""

    def __init__(self, rows: int) -> None:
        self.index, self.shape = range(rows), (rows, 2)

    def __len__(self) -> int:
        return len(self.index)

    def head(self, n: int) -> Table:
        return Table(min(n, len(self)))

    def to_csv(self, *, index: bool) -> str:
        return "a,b\n" + "1,2\n" * len(self.index)


def get_weather(city: str) -> str:
    """Look up the weather."""
    return f"Sunny in {city}."


def undocumented() -> None: ...


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The variables of a notebook, Out and what IPython put there among them."""
    shell = SimpleNamespace(user_ns={}, user_ns_hidden={})
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    In: list[str] = []
    Out: dict[int, object] = {}
    shell.user_ns_hidden |= {"In": In, "Out": Out}
    shell.user_ns |= {"In": In, "_": 5, "Out": Out}
    yield shell.user_ns


@pytest.mark.parametrize(
    ("value", "about", "text"),
    [
        ("Rome", "str, 4 characters", "```text\nRome\n```"),
        ({"a": 1}, "dict, 1 key", '```json\n{"a": 1}\n```'),
        ([1, "é"], "list, 2 items", '```json\n[1, "é"]\n```'),
        (Table(2), "Table, 2 rows, 2 columns", "```csv\na,b\n1,2\n1,2\n```"),
        (np.array([[1.5, 2.0]], np.float32), "ndarray, float32, 1 × 2", "```text\n[[1.5, 2.0]]\n```"),
        ("a\n````\nb", "str, 8 characters", "`````text\na\n````\nb\n`````"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_value_stands_in_a_fence_that_nothing_in_it_closes(value: object, about: str, text: str) -> None:
    made = attachment_of("x", value)
    assert made.block == f"`x` ({about}):\n{text}"
    assert message_with((made,), "And?") == f"{made.block}\n\nAnd?"


def test_a_large_array_is_told_by_its_range() -> None:
    text = attachment_of("x", np.arange(10_000)).text
    assert text.startswith("min 0, max 9999, mean 4999.5\n") and len(text) < 300


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "x is a int; text, tables, arrays, dicts, lists and functions"),
        (Table, "x is a type"),
        (list(range(30_000)), "x is too large: it takes more than 20,000 characters; attach a part of it"),
        ([["word"] * 100] * 100, "x is too large"),
    ],
    ids=["number", "class", "long", "nested"],
)
def test_what_cannot_be_attached_is_refused_by_name(value: object, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        attachment_of("x", value)
    assert refused.value.param == "value"


def test_the_notebook_lists_what_can_be_attached(notebook: dict[str, Any]) -> None:
    notebook |= {"text": "abc", "n": 5, "get_weather": get_weather, "undocumented": undocumented, "np": np, "d": {}}
    assert attachable() == [
        ("d", "dict, 0 keys", False),
        ("text", "str, 3 characters", False),
        ("get_weather", "function(city: 'str') -> 'str'", True),
    ]


def test_a_value_goes_along_once_and_is_part_of_the_message(make_model: MakeModel, notebook: dict[str, Any]) -> None:
    model = make_model(["One.", "Two."])
    chat = model.chat()
    notebook["notes"] = "Built in a day."
    made = chat.attach("notes")
    assert chat.attachments == (made,) and made.n_tokens == len(model.encode(f"{made.block}\n\n"))
    notebook["notes"] = "changed since"
    before = chat.room("Really?").used
    chat.send("Really?")
    sent = "`notes` (str, 15 characters):\n```text\nBuilt in a day.\n```\n\nReally?"
    assert chat.messages[0]["content"] == sent == chat.turns[0].user and chat.attachments == ()
    assert chat.turns[0].runs[0].n_prompt == before
    chat.send("Again?")
    assert chat.turns[1].user == "Again?"


def test_a_refused_message_keeps_its_attachments(make_model: MakeModel) -> None:
    chat = make_model().chat()
    made = chat.attach("some text", name="note")
    with pytest.raises(RequestError):
        chat.send("x", top_p=7)
    assert chat.attachments == (made,) and chat.turns == []
    chat.detach("note")
    assert chat.send("x").messages[0]["content"] == "x"
    with pytest.raises(RequestError, match="nothing called 'note' is attached; attached: none"):
        chat.detach("note")


def test_a_function_is_a_tool_from_then_on(make_model: MakeModel) -> None:
    model = make_model(["One.", "Two.", "Three."])
    chat = model.chat()
    chat.send("a")
    made = chat.attach(get_weather)
    assert (made.name, made.about) == ("get_weather", "function(city: 'str') -> 'str'")
    chat.send("b")
    chat.send("c")
    assert [turn.options.tools for turn in chat.turns] == [None, [get_weather], [get_weather]]
    without = len(model.tokenize(messages=chat.messages[:3]))
    assert made.n_tokens == chat.turns[1].runs[0].n_prompt - without > 5
    chat.attach(get_weather)
    assert len(chat.attachments) == 1, "one of the same name takes its place"
    fork = chat.fork()
    chat.detach("get_weather")
    assert chat.attachments == () and len(fork.attachments) == 1


def test_a_tool_that_is_none_is_refused(make_model: MakeModel) -> None:
    chat = make_model().chat(tools=[get_weather])
    with pytest.raises(RequestError, match="two tools are called 'get_weather'"):
        chat.attach(get_weather)
    assert chat.attachments == ()


def test_names_come_from_the_notebook(make_model: MakeModel, notebook: dict[str, Any]) -> None:
    chat = make_model().chat()
    notebook["data"] = data = {"a": 1}
    assert chat.attach(data).name == "data"
    notebook["Out"][3] = chat
    assert attachments.name_in_notebook(chat) == "Out[3]"
    for value, says in (([1], "this list has no name in the notebook; pass name= too"), ("nix", "no variable 'nix'")):
        with pytest.raises(RequestError, match=says):
            chat.attach(value)
    with pytest.raises(RequestError, match="one line of text without backticks"):
        chat.attach("x", name="a`b")


def test_outside_a_notebook_there_are_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: None)
    assert attachable() == [] and attachments.name_in_notebook({}) == ""


def test_an_attachment_of_nobody_who_counts_has_no_cost() -> None:
    assert attachment_of("x", "a").n_tokens is None
    assert isinstance(attachment_of("x", "a"), Attachment)
