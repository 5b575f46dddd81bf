"""What is to be seen of a reply afterwards: its rounds, its replay, its chat."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

IDS = [300, 301, 302, 303, 304, 305, 306, 307]


def drafts(said: tuple[int, ...]) -> list[int]:
    at = IDS.index(said[-1]) + 1
    return [*IDS[at : at + 2], 5][:3]  # two right ones, one wrong


@pytest.fixture
def panels(ip: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a kernel's shell shows, as objects."""
    monkeypatch.setattr(ip, "kernel", object(), raising=False)
    shown: list[Any] = []
    monkeypatch.setattr("dsv4nb.magics.extension.display", shown.append)
    return shown


def test_rounds_are_text_in_a_terminal(cells: Any, fake: Any, capsys: Any) -> None:
    fake([IDS], drafts=drafts)
    cells.run("%%dsv4 --max-new 7 --as kept\nhi")
    cells.run("%%dsv4 --max-new 7 --no-spec\nhi")
    capsys.readouterr()
    cells.run("%dsv4 rounds kept")
    said = capsys.readouterr().out
    assert said.startswith("rounds      2, 2 with verified drafts") and "3.00 tokens, mean acceptance" in said
    assert "there are none in '_dsv4': the reply was not speculated" in cells.refused("%dsv4 rounds")
    cells.ns["some"] = cells.ns["kept"].rounds[:1]
    cells.run("%dsv4 rounds some")
    assert capsys.readouterr().out.startswith("rounds      1, 1 with verified drafts")


def test_rounds_of_a_chat_are_those_of_its_last_turn(cells: Any, fake: Any, capsys: Any) -> None:
    model = fake([IDS], drafts=drafts)
    cells.ns["chat"] = chat = model.chat(max_new=7)
    assert "there are none in 'chat': it has no turn yet" in cells.refused("%dsv4 rounds")
    chat.send("hi")
    cells.run("%dsv4 rounds")
    assert capsys.readouterr().out.startswith("rounds      2, 2 with verified drafts")
    chat.send("hi", spec=False)
    assert "its last turn was not speculated" in cells.refused("%dsv4 rounds chat")


def test_in_a_notebook_rounds_are_a_panel(cells: Any, fake: Any, panels: list[Any]) -> None:
    anywidget = pytest.importorskip("anywidget")
    model = fake([IDS], drafts=drafts)
    cells.run("%%dsv4 --max-new 7\nhi")
    cells.run("%dsv4 rounds")
    cells.ns["c"] = model.chat()
    cells.run("%dsv4 rounds c")
    of_reply, of_chat = panels
    assert isinstance(of_reply, anywidget.AnyWidget) and len(of_reply.saved().rounds) == 2
    assert isinstance(of_chat, anywidget.AnyWidget) and of_chat.saved().rounds == ()
    of_reply.close()
    of_chat.close()


def test_without_widgets_a_notebook_shows_text(cells: Any, fake: Any, panels: list[Any], monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "dsv4nb.widgets.acceptance", None)
    fake([IDS], drafts=drafts)
    cells.run("%%dsv4 --max-new 7\nhi")
    cells.run("%dsv4 rounds")
    assert str(panels[0]).startswith("rounds      2, 2 with verified drafts")


def test_a_replay_says_that_it_is_the_same(cells: Any, fake: Any, tmp_path: Path, capsys: Any) -> None:
    fake("one two three")
    cells.run("%%dsv4 --as kept\nhi")
    recipe = cells.ns["kept"].recipe
    file = tmp_path / "a recipe.json"
    file.write_text(recipe.to_json(), encoding="utf-8")
    cells.ns.update(r=recipe, text=recipe.to_json(), raw=json.loads(recipe.to_json()))
    for name in ("", "kept", "r", "text", "raw", f"'{file}'"):
        capsys.readouterr()
        cells.run(f"%dsv4 replay {name}")
        said = capsys.readouterr().out
        assert f"the same, 3 tokens with SHA-256 {recipe.ids_sha256[:12]}…" in said and "one two three" in said, name
    assert cells.ns["_dsv4"] is cells.ns["kept"]


def test_a_replay_says_that_it_differs(cells: Any, fake: Any, capsys: Any) -> None:
    fake(["one two three", "one two four"])
    cells.run("%%dsv4\nhi")
    capsys.readouterr()
    cells.run("%dsv4 replay")
    said = capsys.readouterr().out
    assert "differs: the replay has 3 ids" in said and "the same," not in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("replay", "there is no reply yet; a %%dsv4 cell makes one, or pass NAME"),
        ("replay nothing", "there is no variable and no file 'nothing'."),
        ("replay nm", "there is no variable and no file 'nm'; did you mean n?"),
        ("replay n", "'n' holds no result or recipe"),
        ("replay text", "the recipe cannot be read"),
        ("replay other", "of 'fake' with weights 'other'; this model has 'a script'"),
        ("replay kept --model x", "there is no variable 'x'; pass --model m"),
        ("rounds", "there is no reply yet"),
        ("rounds n", "'n' holds no result or chat"),
        ("rounds nope", "there is no variable 'nope'"),
        ("show", "there is no chat; %%dsv4 --chat begins one"),
        ("show n", "'n' holds no chat"),
        ("show nope", "there is no variable 'nope'"),
    ],
)
def test_what_is_not_there_is_one_line(cells: Any, fake: Any, line: str, said: str) -> None:
    model = fake("one two")
    recipe = model.generate("hi").recipe
    other = json.loads(recipe.to_json()) | {"weights": "other"}
    cells.ns.update(n=3, text="{}", other=other, kept=recipe)
    assert said in cells.refused(f"%dsv4 {line}")


def test_an_interrupted_replay_leaves_the_model_usable(cells: Any, fake: Any, ip: Any, capsys: Any) -> None:
    runs = []

    def on_step(step: str, state: Any) -> None:
        runs.append(step)
        if runs.count("prefill") == 2 and step == "forward_rows":  # of the replay
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    model = fake("one two three four five six", delay_s=0.02, on_step=on_step)
    cells.run("%%dsv4\nhi")
    done = ip.run_cell("%dsv4 replay")
    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    said = capsys.readouterr().out
    assert "Stopped; nothing was compared, and the model can be used on." in said and "Traceback" not in said
    assert cells.ns["_dsv4"].text == "one two three four five six" and model.queue == []
    cells.run("%%dsv4\nhi")


def test_a_chat_is_shown_by_its_name_or_because_it_is_the_only_one(cells: Any, fake: Any, panels: list[Any]) -> None:
    model = fake()
    cells.ns["a"] = cells.ns["same"] = cells.ns["_"] = a = model.chat()
    cells.run("%dsv4 show")
    cells.ns["b"] = b = model.chat()
    assert "there are several chats; name one of a, same, b" in cells.refused("%dsv4 show")
    cells.run("%dsv4 show b")
    cells.ns["chat"] = c = model.chat()
    cells.run("%dsv4 show")
    assert [id(one) for one in panels] == [id(one) for one in (a, b, c)]


def test_a_persons_own_object_is_not_run_to_see_what_it_is(cells: Any, fake: Any) -> None:
    class Odd:
        @property
        def tickets(self) -> None:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    cells.ns["odd"] = Odd()
    cells.ns["space"] = SimpleNamespace(submit=1, turns=2)
    assert "there is no chat" in cells.refused("%dsv4 show")
    assert "no model is loaded" in cells.refused("%dsv4 caps")
