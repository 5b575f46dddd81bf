"""Chats on disk: nothing is lost, and nothing foreign is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dsv4nb
from dsv4nb.errors import ChatBusy, Dsv4Error, RequestError
from dsv4nb.model import Model, load
from dsv4nb.session.archive import Archive, ArchiveError, read_archive, write_archive
from dsv4nb.session.reuse import Policy

MakeModel = Callable[..., Any]

TEXT = " ".join("Anna went from Paris to Rome on Monday." for _ in range(12))


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy", name="saved") as model:
        yield model


@pytest.fixture(scope="module")
def sent(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A chat with a branch, and its file."""
    chat = model.chat(system="Be brief.", temperature=0, logit_bias={7: -math.inf, 3: 0.5}, stop=["zzz"])
    chat.send("The code word is silver otter.")
    chat.send(TEXT)
    chat.regenerate()
    path = tmp_path_factory.mktemp("sent") / "chat.dsv4"
    chat.save(path)
    return chat, path


@pytest.fixture
def chat(model: Model, sent: tuple[Any, Path]) -> Any:
    """The same chat for each test, with its caches."""
    return model.open_chat(sent[1])


def told(chat: Any) -> Any:
    state = chat.state()
    nodes = [(n.parent.number if n.parent else 0, n.turn, tuple(map(dict, n.messages))) for n in state.nodes]
    return state.options, nodes, state.head.number, state.ledger, chat.thinking, chat.messages


def test_a_chat_comes_back_whole_and_computes_nothing_again(model: Model, sent: tuple[Any, Path]) -> None:
    chat, path = sent
    assert chat.save(path) == path.stat().st_size
    model.cache.clear()  # as in a new kernel
    opened = dsv4nb.open_chat(path, model)
    options, *rest = told(opened)
    assert rest == list(told(chat)[1:])
    assert options.logit_bias == {7: -math.inf, 3: 0.5} and options.stop == ["zzz"] and options.system == "Be brief."
    reply = opened.send("What is the code word?")
    assert "silver otter" in reply.text
    assert reply.done.reuse.kind == "live" and reply.done.reuse.computed < 16
    cold = model.replay(reply.recipe)
    assert cold.ids == reply.ids


def test_a_chat_without_caches_is_saved_too(model: Model, tmp_path: Path) -> None:
    empty = model.chat(temperature=0)
    empty.save(tmp_path / "empty")
    assert model.open_chat(tmp_path / "empty").turns == []
    said = model.chat(temperature=0)
    said.send("Hi!")
    model.cache.clear()
    said.save(tmp_path / "cold")
    opened = model.open_chat(tmp_path / "cold")
    assert opened.send("Who are you?").done.reuse.kind == "reset" and len(opened.turns) == 2


def test_functions_are_saved_as_declarations_and_can_be_given_again(model: Model, tmp_path: Path) -> None:
    def get_time(city: str) -> str:
        """Get the local time in a city."""
        return f"noon in {city}"

    chat = model.chat(tools=[get_time], temperature=0)
    chat.send("What time is it in Paris?")
    chat.save(tmp_path / "tools")
    declared = model.open_chat(tmp_path / "tools")
    assert declared.messages == chat.messages
    assert declared.send("What time is it in Rome?").stop_reason == "tool_calls"
    again = model.open_chat(tmp_path / "tools", tools=[get_time])
    assert again.send("What time is it in Rome?").steps
    with pytest.raises(RequestError):
        model.open_chat(tmp_path / "tools", tools=[7])


@pytest.mark.parametrize("name", ["weights", "arithmetic", "encoding", "layout"])
def test_a_file_of_another_model_is_refused_with_both_sides(model: Model, chat: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    archive = read_archive(path)
    write_archive(path, replace(archive, manifest={**archive.manifest, name: "another"}))
    before = model.cache.stats()
    with pytest.raises(ArchiveError, match=f"saved with {name} 'another'; the loaded model has") as caught:
        model.open_chat(path)
    assert (caught.value.fault, caught.value.param) == ("mismatch", name)
    assert model.cache.stats() == before


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "picture"},
        {"turns": [{"parent": 1}]},
        {"turns": 7},
        {"head": 9},
        {"options": {"temprature": 1}},
        {"options": {"tools": [7]}},
        {"ledger": ["x"]},
    ],
    ids=str,
)
def test_a_file_that_holds_no_chat_is_refused(model: Model, chat: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    archive = read_archive(path)
    write_archive(path, replace(archive, manifest={**archive.manifest, **change}))
    with pytest.raises(Dsv4Error):
        model.open_chat(path).send("Hi!")
    assert model.generate("Hi!", temperature=0, max_new=2).ids


def test_arrays_that_do_not_fit_are_refused(model: Model, chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    archive = read_archive(path)
    model.cache.clear()
    for name in sorted(archive.arrays)[:3]:
        fewer = {k: (v[:-1] if k == name else v) for k, v in archive.arrays.items()}
        write_archive(path, Archive(manifest=archive.manifest, arrays=fewer))
        with pytest.raises(Dsv4Error):
            model.open_chat(path)
    assert model.cache.stats().anchors == ()


def test_a_busy_chat_and_a_path_that_cannot_be(model: Model, chat: Any, tmp_path: Path, make_model: MakeModel) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    before = path.read_bytes()
    ticket = chat.submit("Count from 1 to 100.")
    with pytest.raises(ChatBusy):
        chat.save(path)
    ticket.cancel()
    ticket.wait()
    assert path.read_bytes() == before
    with pytest.raises(ArchiveError) as caught:
        chat.save(tmp_path / "no" / "folder")
    assert caught.value.fault == "unwritable"
    with pytest.raises(ArchiveError, match="does not exist"):
        model.open_chat(tmp_path / "nothing")
    assert chat.send("Hi!").text


@pytest.mark.parametrize("name", ["dump", "load"])
def test_memory_that_ran_out_is_named_and_nothing_is_changed(
    model: Model, chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    path = tmp_path / "chat"
    chat.save(path)
    if name == "load":
        model.cache.clear()
    before, told_before, stats = path.read_bytes(), told(chat), model.cache.stats()
    with monkeypatch.context() as patch, pytest.raises(ArchiveError, match=r"\d tokens.*close other chats") as caught:
        patch.setattr(model.engine, name, broken)
        chat.save(path) if name == "dump" else model.open_chat(path)
    assert caught.value.fault == "memory"
    assert (path.read_bytes(), told(chat), model.cache.stats()) == (before, told_before, stats)
    assert told(model.open_chat(path))[1:] == told_before[1:]


def test_a_chat_is_saved_between_requests_not_during_one(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("word " * 200, delay_s=0.002)
    chat = model.chat(max_new=5)
    chat.send("hi")
    other = model.submit("hi")
    chat.save(tmp_path / "chat")
    assert other.state == "done"


def test_rows_are_counted(model: Model) -> None:
    """A long chat: another try, a fork and an edit cost what the issue allows."""
    model.cache.clear()
    model.cache.policy = Policy()
    chat = model.chat(temperature=0)
    for _ in range(3):
        chat.send(TEXT)
    chat.send("What is 12 + 30?")
    assert chat.regenerate().done.reuse.computed <= 8
    other = chat.fork().send("And what is 20 + 30?")
    assert other.done.reuse.kind == "live"
    edited = chat.edit(3, "What is 13 + 30?")
    reuse = edited.done.reuse
    assert reuse.computed <= 8 + len(model.encode("What is 13 + 30?")) + 2


def test_what_each_run_was_like_comes_back(model: Model, tmp_path: Path) -> None:
    chat = model.chat(logit_bias={7: -math.inf}, seed=5)
    chat.send("The code word is silver otter.", max_new=4, logprobs=2)
    chat.save(tmp_path / "chat")
    (turn,), (saved,) = model.open_chat(tmp_path / "chat").turns, chat.turns
    (run,) = turn.runs
    assert run == saved.runs[0] and run.config.seed == 5 and run.timings.marks[0] == ("called", 0.0)
    assert turn == saved and turn.options is not None and turn.options.max_new == 4
    assert model.open_chat(tmp_path / "chat").to_code() == chat.to_code()


def test_a_file_that_tells_less_of_its_turns_is_read(model: Model, chat: Any, tmp_path: Path) -> None:
    """As chats were saved before turns remembered their runs."""
    chat.save(tmp_path / "chat")
    archive = read_archive(tmp_path / "chat")
    told_then = (
        "user",
        "reasoning",
        "text",
        "tool",
        "calls",
        "results",
        "stop_reason",
        "n_tokens",
        "n_cached",
        "seconds",
    )
    turns = [
        {**one, "turn": {name: one["turn"][name] for name in (*told_then, "n_reasoning", "error")}}
        for one in archive.manifest["turns"]
    ]
    write_archive(tmp_path / "old", replace(archive, manifest={**archive.manifest, "turns": turns}))
    opened = model.open_chat(tmp_path / "old")
    assert opened.messages == chat.messages and [turn.runs for turn in opened.turns] == [(), ()]
    assert opened.send("What is the code word?").done.reuse.kind == "live"
