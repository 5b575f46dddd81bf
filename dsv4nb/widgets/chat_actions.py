"""What a page asks of a chat besides sending and stopping: branches, forks, approvals, attachments, exports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from dsv4nb.errors import Dsv4Error, RequestError
from dsv4nb.events import Event, ToolCall
from dsv4nb.session.attachments import Attachment, attachable, name_in_notebook
from dsv4nb.session.gauge import Room
from dsv4nb.session.tree import Branches
from dsv4nb.stream.facts import run_facts
from dsv4nb.stream.frames import Pump
from dsv4nb.widgets import protocol

FORMS = {
    "markdown": ("chat.md", "text/markdown"),
    "jsonl": ("chat.jsonl", "application/jsonl"),
    "notebook": ("chat.ipynb", "application/x-ipynb+json"),
    "code": ("chat.py", "text/x-python"),
}


class Ticket(Protocol):
    """What the widget asks of a run."""

    @property
    def state(self) -> str: ...
    def poll(self, start: int) -> tuple[Sequence[Event], bool]: ...
    def cancel(self) -> None: ...


class Chat(Protocol):
    """What these actions ask of a chat; `dsv4nb.session.chat.Chat` is one."""

    forks: list[Any]

    @property
    def branches(self) -> Branches: ...
    @property
    def attachments(self) -> tuple[Attachment, ...]: ...
    @property
    def pending(self) -> list[ToolCall]: ...
    def submit_edit(self, i: int, text: str | None = None) -> Ticket: ...
    def switch(self, turn: int, *, where_left: bool = False) -> None: ...
    def rewind(self, turn: int | None = None) -> None: ...
    def fork(self, turn: int | None = None) -> Any: ...
    def approve(self, call: str | None = None, arguments: str | None = None) -> None: ...
    def deny(self, call: str | None = None) -> None: ...
    def attach(self, value: object, *, name: str | None = None) -> Attachment: ...
    def detach(self, name: str) -> None: ...
    def room(self) -> Room: ...
    def count(self, text: str) -> int: ...
    def to_markdown(self) -> str: ...
    def to_jsonl(self) -> str: ...
    def to_notebook(self) -> str: ...
    def to_code(self, turn: int = -1) -> str: ...


class Actions:
    """Carries them out, on the pump's thread.

    Args:
        say: sends a message to the page.
        started: is told of a run and the command that started it.
        answer: answers a command that was left open, "" for success.
    """

    def __init__(
        self,
        chat: Chat,
        pump: Pump,
        say: Callable[[dict[str, Any]], None],
        started: Callable[[Ticket, str], None],
        answer: Callable[[str, str], None],
    ) -> None:
        self._chat, self._pump, self._say, self._started, self._answer = chat, pump, say, started, answer
        self._room: Room | None = None

    @property
    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], bool | None]]:
        """By kind, what carries a command out."""
        return {
            "edit": self._edit,
            "switch": lambda command: self._chat.switch(command["turn"], where_left=True),
            "rewind": lambda command: self._chat.rewind(self._index(command["turn"]) + 1),
            "fork": self._fork,
            "approve": lambda command: self._chat.approve(command["call"], command["text"] or None),
            "deny": lambda command: self._chat.deny(command["call"]),
            "list": self._list,
            "attach": self._attach,
            "detach": lambda command: self._chat.detach(command["name"]),
            "measure": self._measure,
            "times": self._times,
            "export": self._export,
        }

    def _index(self, number: int) -> int:
        """Return where a turn stands on the current branch."""
        for i, (node, _) in enumerate(self._chat.branches.path()):
            if node.number == number:
                return i
        raise RequestError("this turn is no longer on the branch that is shown", param="turn")

    def _edit(self, command: dict[str, Any]) -> None:
        ticket = self._chat.submit_edit(self._index(command["turn"]), command["text"] or None)
        self._started(ticket, command["id"])

    def _fork(self, command: dict[str, Any]) -> None:
        turns = self._index(command["turn"]) + 1
        name = name_in_notebook(self._chat)
        if not name:
            raise RequestError(
                "no variable holds this chat, so nothing could name its fork; run chat = m.chat() and show that",
                param="turn",
            )
        self._chat.forks.append(self._chat.fork(turns))
        self._say(protocol.message("forked", code=f"{name}.forks[{len(self._chat.forks) - 1}]", turns=turns))

    def _list(self, command: dict[str, Any]) -> None:
        self._say(protocol.message("names", id=command["id"], names=attachable()))

    def _attach(self, command: dict[str, Any]) -> bool:
        def work() -> None:
            error = ""
            try:
                self._chat.attach(command["name"])
            except Dsv4Error as refusal:
                error = str(refusal)
            except Exception as fault:  # writing a value down runs its own code
                error = f"{command['name']} cannot be written down: {type(fault).__name__}: {fault}"
            self._pump.call(partial(self._answer, command["id"], error))

        # a large value takes a while to write down, and the pump has others to serve
        threading.Thread(target=work, name="dsv4nb-attach", daemon=True).start()
        return False

    def _measure(self, command: dict[str, Any]) -> None:
        if self._room is not None:
            text = command["text"]
            room = self._room.plus(self._chat.count(text)) if text else self._room
            self._say(protocol.message("measured", id=command["id"], room=room_of(room)))

    def _times(self, command: dict[str, Any]) -> None:
        node, _ = self._chat.branches.path()[self._index(command["turn"])]
        runs = [run_facts(run).jsonable() for run in node.turn.runs]
        self._say(protocol.message("times", id=command["id"], runs=runs))

    def _export(self, command: dict[str, Any]) -> None:
        form = command["form"]
        if form not in FORMS:
            raise RequestError(f"form is {form!r}; it must be one of {', '.join(FORMS)}", param="form")
        file, mime = FORMS[form]
        if form == "code":
            content = self._chat.to_code(self._index(command["turn"]))
        else:
            write = {
                "markdown": self._chat.to_markdown,
                "jsonl": self._chat.to_jsonl,
                "notebook": self._chat.to_notebook,
            }[form]
            content = write()
        self._say(protocol.message("exported", id=command["id"], file=file, mime=mime, content=content))

    def measure_room(self, done: Callable[[dict[str, Any]], None]) -> None:
        """Count what the next prompt takes; `done` is called on the pump's thread, with {} when nobody can count."""

        def work() -> None:
            room: Room | None = None
            with suppress(Dsv4Error):  # a prompt that cannot be rendered is refused when it is sent
                room = self._chat.room()
            self._pump.call(partial(self._measured, room, done))

        # tokenizing a long history takes a while, and the pump has others to serve
        threading.Thread(target=work, name="dsv4nb-room", daemon=True).start()

    def _measured(self, room: Room | None, done: Callable[[dict[str, Any]], None]) -> None:
        self._room = room
        done({} if room is None else room_of(room))


def room_of(room: Room) -> dict[str, Any]:
    """Return what a page shows of a room."""
    return {"used": room.used, "max_seq": room.max_seq, "left": room.left, "words": str(room)}


def chips_of(attachments: Sequence[Attachment]) -> list[dict[str, Any]]:
    """Return what a page shows of attachments."""
    return [
        {"name": one.name, "about": one.about, "tokens": one.n_tokens, "is_tool": one.function is not None}
        for one in attachments
    ]
