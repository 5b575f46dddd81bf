from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dsv4nb.errors import Dsv4Error, RequestError
from dsv4nb.session.export import from_cells, from_jsonl, to_cells, to_frame, to_jsonl, to_markdown

MakeModel = Callable[..., Any]

CODE = "Here it is:\n\n```python\nprint(1)\n```\n\nAnd that is all."
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Write code."},
    {"role": "assistant", "content": CODE, "reasoning_content": "I can."},
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "2"},
    {"role": "assistant", "content": "2 – done 😀"},
]


def test_a_history_comes_back_from_every_form(make_model: MakeModel) -> None:
    assert from_cells(to_cells(HISTORY)) == HISTORY
    assert from_jsonl(to_jsonl([HISTORY, HISTORY])) == [HISTORY, HISTORY]
    chat = make_model("ok").chat(messages=HISTORY)
    assert chat.to_messages() == HISTORY and from_cells(chat.to_cells()) == HISTORY
    assert [(turn.user, turn.text) for turn in chat.turns] == [("Write code.", CODE), ("Add.", "2 – done 😀")]
    assert chat.turns[1].calls[0].arguments == '{"a": 1}' and chat.turns[1].results[0].name == "add"
    assert chat.send("And now?").text == "ok"
    assert chat.messages[:-2] == HISTORY


def test_cells_make_a_valid_notebook_whose_code_can_run(make_model: MakeModel) -> None:
    cells = to_cells(HISTORY)
    assert [cell["cell_type"] for cell in cells[2:5]] == ["markdown", "code", "markdown"]
    assert cells[3]["source"] == "print(1)" and "Thoughts" in cells[2]["source"] and "I can." in cells[2]["source"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.from_dict(cell) for cell in cells])
    for cell in notebook.cells:
        cell["id"] = f"c{id(cell)}"
    nbformat.validate(notebook)
    assert from_cells(nbformat.reads(nbformat.writes(notebook), as_version=4).cells) == HISTORY


def test_jsonl_of_one_branch_or_of_all(make_model: MakeModel, tmp_path: Path) -> None:
    chat = make_model(["one", "two"]).chat(system="Be brief.")
    chat.send("a")
    chat.regenerate()
    lines = [json.loads(line)["messages"] for line in chat.to_jsonl(all_branches=True).splitlines()]
    assert [messages[-1]["content"] for messages in lines] == ["one", "two"]
    assert all(messages[0] == {"role": "system", "content": "Be brief."} for messages in lines)
    text = chat.to_jsonl(tmp_path / "chat.jsonl")
    assert (tmp_path / "chat.jsonl").read_text("utf-8") == text and from_jsonl(text) == [chat.messages]


@pytest.mark.parametrize("text", ["[]", "{}", "no", '{"messages": 3}', '{"messages": [1]}'])
def test_a_line_that_is_no_conversation_is_named(text: str) -> None:
    with pytest.raises(RequestError, match="line 2 is no object with"):
        from_jsonl(f'{{"messages": []}}\n{text}\n')


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "assistant", "content": "Hi"}], "the history begins with a message of assistant"),
        ([{"role": "user", "content": 7}], "content"),
        ([{"role": "king", "content": "x"}], "role"),
        ("text", "messages"),
    ],
    ids=str,
)
def test_a_history_that_is_none_is_refused(make_model: MakeModel, messages: Any, says: str) -> None:
    if messages == "text":
        assert make_model().chat(messages=messages).messages == [{"role": "user", "content": "text"}]
        return
    with pytest.raises(Dsv4Error, match=says):
        make_model().chat(messages=messages)


def test_a_frame_has_a_row_per_turn(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        def __init__(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
            self.rows, self.columns = rows, columns

    class Pandas:
        DataFrame = Frame

    chat = make_model("one").chat()
    chat.send("a")
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    frame = chat.to_frame()
    assert frame.rows[0]["user"] == "a" and frame.rows[0]["text"] == "one" and frame.columns[0] == "user"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RequestError, match="pip install pandas"):
        to_frame(chat.turns)


def test_markdown_has_a_heading_per_message_and_fences_that_hold(make_model: MakeModel, tmp_path: Path) -> None:
    hostile = {"role": "tool", "tool_call_id": "call_0", "content": "```\n# no heading"}
    text = to_markdown([*HISTORY[:5], hostile, HISTORY[-1]], title="Chat")
    assert text.startswith("# Chat\n\n## System\n\nBe brief.\n\n## You\n\nWrite code.\n\n## Model\n\n<details>")
    assert CODE in text and 'Call of `add`:\n\n```json\n{"a": 1}\n```' in text
    assert "## Tool add\n\n````\n```\n# no heading\n````\n\n## Model\n\n2 – done 😀\n" in text
    chat = make_model("ok", name="toy").chat(messages=HISTORY)
    assert chat.to_markdown(tmp_path / "chat.md").startswith("# Chat with toy\n\n## System")
    assert (tmp_path / "chat.md").read_text("utf-8") == chat.to_markdown()


def test_a_notebook_file_has_the_cells(make_model: MakeModel, tmp_path: Path) -> None:
    chat = make_model("ok").chat(messages=HISTORY)
    chat.to_notebook(tmp_path / "chat.ipynb")
    notebook = nbformat.read(tmp_path / "chat.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert from_cells(notebook.cells) == HISTORY
