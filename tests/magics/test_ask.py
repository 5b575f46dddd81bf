"""What `%%dsv4` does with a chat, with variables, and with a form."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from typing import Any

import pytest

from dsv4nb.events import Generation
from dsv4nb.magics.forms import Parsed


def test_a_cell_is_a_turn_of_a_chat_that_is_made_once(cells: Any, fake: Any) -> None:
    fake(["one", "two", "three"])
    cells.run("%%dsv4 --chat\nfirst")
    chat = cells.ns["chat"]
    cells.run("%%dsv4 --chat --as reply\nsecond")
    assert cells.ns["chat"] is chat and [turn.user for turn in chat.turns] == ["first", "second"]
    assert cells.ns["reply"].text == cells.ns["_dsv4"].text == "two"
    assert [m["content"] for m in cells.ns["_dsv4"].messages] == ["first", "one", "second", "two"]
    cells.run("%%dsv4 --chat other\nhi")
    assert [turn.text for turn in cells.ns["other"].turns] == ["three"] and len(chat.turns) == 2


def test_the_system_message_and_the_tools_stay_with_the_chat_and_the_rest_with_the_turn(cells: Any, fake: Any) -> None:
    fake("one")
    cells.run("%dsv4 set temperature 0")
    cells.run("%%dsv4 --chat c --system 'Be brief.' --seed 7\nhi")
    assert cells.ns["_dsv4"].config.seed == 7 and cells.ns["_dsv4"].config.temperature == 0
    cells.run("%dsv4 set system 'Be long.'")
    cells.run("%%dsv4 --chat c\nagain")
    assert cells.ns["_dsv4"].messages[0] == {"role": "system", "content": "Be brief."}
    assert cells.ns["_dsv4"].config.seed != 7
    cells.run("%%dsv4 --chat d\nhi")
    assert cells.ns["d"].messages[0]["content"] == "Be long."


def test_a_chat_thinks_as_it_was_told_unless_the_cell_says(cells: Any, fake: Any) -> None:
    model = fake(["a", "a</think>b", "c"])
    cells.ns["c"] = chat = model.chat()
    cells.run("%%dsv4 --chat c\nhi")
    chat.thinking = True
    cells.run("%%dsv4 --chat c\nhi")
    assert cells.ns["_dsv4"].reasoning == "a" and cells.ns["_dsv4"].text == "b"
    cells.run("%%dsv4 --chat c --no-thinking\nhi")
    assert (cells.ns["_dsv4"].reasoning, cells.ns["_dsv4"].text) == ("", "c")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--chat x", "'x' holds no chat; pass --chat with another name"),
        ("--chat c --model m", "'c' goes on with its own model; leave out --model"),
        ("--chat d --temperature -x", "--temperature"),
        ("--chat d --top-k -1", "top_k is -1"),
        ("--chat 3x", "'3x' is no variable name"),
    ],
)
def test_a_chat_that_cannot_be_is_one_line_and_makes_none(cells: Any, fake: Any, line: str, said: str) -> None:
    model = fake()
    cells.ns["x"] = 1
    cells.ns["c"] = model.chat()
    assert said in cells.refused(f"%%dsv4 {line}\nhi")
    assert "d" not in cells.ns and cells.ns["x"] == 1 and "_dsv4" not in cells.ns
    assert not any(model.engine.calls.values())


def test_a_busy_chat_and_a_closed_model_are_one_line(cells: Any, fake: Any) -> None:
    model = fake("one two three", delay_s=0.05)
    cells.ns["c"] = chat = model.chat()
    ticket = chat.submit("hi")
    assert "the chat is busy" in cells.refused("%%dsv4 --chat c\nhi")
    ticket.result()
    model.close()
    assert "is closed" in cells.refused("%%dsv4 --chat c\nhi")


def test_variables_go_before_the_prompt_and_tell_what_they_cost(cells: Any, fake: Any, capsys: Any) -> None:
    model = fake()
    cells.ns.update(notes="the code word is otter", n=3)
    cells.run("%%dsv4 --with notes --with n\nWhat is it?")
    message = cells.ns["_dsv4"].messages[-2]["content"]
    assert message.endswith("```python\n3\n```\n\nWhat is it?")
    assert message.startswith("`notes` (str, 22 characters):\n```text\nthe code word is otter\n```\n\n`n` (int)")
    blocks = message.removesuffix("What is it?").split("`n`")
    counts = [len(model.encode(text)) for text in (blocks[0], "`n`" + blocks[1])]
    assert f"Tokens of the prompt: notes has {counts[0]}, n has {counts[1]}.\n" in capsys.readouterr().out


def test_what_is_too_long_is_refused_with_numbers(cells: Any, fake: Any) -> None:
    model = fake(max_seq=200)
    cells.ns.update(big="word " * 300, n=3)
    said = cells.refused("%%dsv4 --chat --with big --with n\nhi")
    assert "prompt has 3" in said and "at most 103 fit" in said and "Of them, big has 3" in said and "n has " in said
    assert "chat" not in cells.ns and not any(model.engine.calls.values())


def test_braces_are_filled_on_request_alone(cells: Any, fake: Any) -> None:
    fake()
    cells.ns["x"] = 20
    cells.run("%%dsv4 --fill\nIs {x + 1} in {{1}}?")
    assert cells.ns["_dsv4"].messages[-2]["content"] == "Is 21 in {1}?"
    assert "{y} failed: NameError" in cells.refused("%%dsv4 --fill\nIs {y}?")
    assert "the prompt is empty" in cells.refused("%%dsv4 --fill --with x\n{''}")


@dataclasses.dataclass
class City:
    """A place."""

    name: str
    people: int


class TestForms:
    @pytest.fixture(autouse=True)
    def needs_the_extra(self) -> None:
        pytest.importorskip("llguidance")

    def test_json_keeps_the_value_beside_the_text(self, cells: Any, fake: Any, capsys: Any) -> None:
        fake('{"name": "Rome", "people": 3}')
        cells.run("%%dsv4 --json --as reply\nhi")
        reply = cells.ns["reply"]
        assert isinstance(reply, Generation) and reply is cells.ns["_dsv4"]
        assert reply.text == '{"name": "Rome", "people": 3}' and reply.value == {"name": "Rome", "people": 3}
        assert "value is None" not in capsys.readouterr().out

    def test_a_schema_gives_an_object_of_its_class(self, cells: Any, fake: Any) -> None:
        fake(['{"name": "Rome", "people": 3}', "[1, 2]", '{"a": true}'])
        cells.ns["City"] = City
        cells.run("%%dsv4 --schema City\nhi")
        assert cells.ns["_dsv4"].value == City(name="Rome", people=3)
        cells.ns["pair"] = tuple[int, ...]
        cells.run("%%dsv4 --schema pair --chat\nhi")
        assert cells.ns["_dsv4"].value == (1, 2)
        cells.ns["schema"] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        cells.run("%%dsv4 --schema schema --chat\nhi")
        assert cells.ns["_dsv4"].value == {"a": True} and len(cells.ns["chat"].turns) == 2

    def test_json_that_was_cut_has_no_value_and_says_so(self, cells: Any, fake: Any, capsys: Any) -> None:
        fake('{"name": "Rome", "people": 3}')
        cells.run("%%dsv4 --json --max-new 2\nhi")
        reply = cells.ns["_dsv4"]
        assert isinstance(reply, Parsed) and reply.value is None and reply.text == '{"name": "Rome",'
        said = capsys.readouterr().out.splitlines()[-1]
        assert said == (
            "_dsv4.value is None: the reply reached the token limit before its JSON was complete; raise --max-new."
        )

    def test_what_the_class_refuses_is_no_value(self, cells: Any, fake: Any, capsys: Any) -> None:
        class Refusing:
            @classmethod
            def model_json_schema(cls) -> dict[str, Any]:
                return {"type": "object"}

            @classmethod
            def model_validate(cls, value: Any) -> Any:
                raise ValueError("people must live there")

        fake('{"people": 0}')
        cells.ns["City"] = Refusing
        cells.run("%%dsv4 --schema City\nhi")
        assert cells.ns["_dsv4"].value is None
        assert "City is refused: people must live there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--json --schema City", "--json and --schema are both given; --schema alone gives JSON already"),
        ("--schema Nope", "--schema names 'Nope', and there is no such variable"),
        ("--schema x", "--schema names 'x', which holds no schema; it must be a dict with one, or a dataclass"),
        ("--schema Odd", "--schema: 'f' of Odd is annotated complex, which JSON cannot carry"),
        ("--tools add,subtract", "--tools names 'subtract', and there is no such variable; did you mean subtrac?"),
        ("--tools x", "a tool must be a function or a schema, not int"),
        ("--tools 'add, 3'", "'3' is no variable name"),
        ("--tools add,add", "two tools are called 'add'"),
    ],
)
def test_a_form_that_cannot_be_is_one_line(cells: Any, fake: Any, line: str, said: str) -> None:
    @dataclasses.dataclass
    class Odd:
        f: complex

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    model = fake()
    cells.ns.update(City=City, Odd=Odd, x=1, add=add, subtrac=add)
    assert said in cells.refused(f"%%dsv4 {line}\nhi")
    assert not any(model.engine.calls.values())


def test_without_the_library_the_refusal_is_one_line(cells: Any, fake: Any, monkeypatch: Any) -> None:
    model = fake()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    said = cells.refused("%%dsv4 --json\nhi")
    assert "a grammar needs llguidance, which is not installed; pip install 'dsv4nb[constrained]'" in said
    assert not any(model.engine.calls.values())


CALL = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">47</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">38</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)


@pytest.mark.parametrize("chat", ["", "--chat"])
def test_functions_are_called_and_the_reply_goes_on(cells: Any, fake: Any, chat: str, capsys: Any) -> None:
    calls = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    fake([CALL, "It is 85."])
    cells.ns["add"] = add
    cells.run(f"%%dsv4 {chat} --tools add\nWhat is 47 + 38?")
    assert calls == [(47, 38)] and cells.ns["_dsv4"].text == "It is 85." and len(cells.ns["_dsv4"].steps) == 2
    said = capsys.readouterr().out
    assert "[Result] add → 85" in said and said.endswith("It is 85.\n")
    assert ("chat" in cells.ns) == bool(chat)


@pytest.mark.parametrize("line", ["", "--chat", "--json", "--with n", "--no-stream", "--chat --tools add"])
def test_j04_an_interrupt_keeps_the_text_of_every_kind_of_cell(
    cells: Any, fake: Any, ip: Any, line: str, capsys: Any
) -> None:
    if "json" in line:
        pytest.importorskip("llguidance")

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    begun = threading.Event()

    def on_step(step: str, state: Any) -> None:
        if step == "forward_rows" and state.pos - state.n_prompt >= 3:
            begun.set()

    def interrupt() -> None:
        begun.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    model = fake(
        '{"a": 1, "b": 2, ' + ", ".join(f'"{i}": {i}' for i in range(200)) + "}", delay_s=0.02, on_step=on_step
    )
    cells.ns.update(n=3, add=add)
    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    done = ip.run_cell(f"%%dsv4 {line}\ncount")
    assert time.monotonic() - start < 5 and isinstance(done.error_in_exec, KeyboardInterrupt)
    said = capsys.readouterr().out
    assert "Stopped. The text so far is in _dsv4." in said and "Traceback" not in said and "[Stopped]" in said
    kept = cells.ns["_dsv4"]
    assert kept.text.startswith('{"a": 1,') and len(kept.text) < 200 and kept.stop_reason == "cancelled"
    if "chat" in line:
        assert cells.ns["chat"].turns[-1].text == kept.text and not cells.ns["chat"].is_busy
    cells.run(f"%%dsv4 {line} --max-new 3\nagain")
    assert model.queue == [] and cells.ns["_dsv4"].stop_reason == "length"
