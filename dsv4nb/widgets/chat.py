"""The chat as a person sees it in a notebook: traits for small state, messages for what streams.

Comm handlers may run on a subshell's thread, so they set a flag or leave a job to the pump; everything that the page
is told comes from the pump's thread.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import traitlets
from IPython.core.getipython import get_ipython

from dsv4nb.events import Event
from dsv4nb.stream.calls import card_of
from dsv4nb.stream.frames import Called, Ended, Frame, News, Pump, Status, Watch, shared_pump
from dsv4nb.stream.output import Output
from dsv4nb.stream.transcript import Entry, Transcript, TurnLike, ended_entry, entry_from_events, entry_of
from dsv4nb.widgets import protocol
from dsv4nb.widgets.orders import Orders
from dsv4nb.widgets.panel import Panel, finish

_STATIC = Path(__file__).parent / "static"

EXAMPLES = ("What is the capital of France?", "What is 47 + 38?", "Count from 1 to 100.")


class Ticket(Protocol):
    """What the widget asks of a run."""

    @property
    def state(self) -> str: ...
    def poll(self, start: int) -> tuple[Sequence[Event], bool]: ...
    def cancel(self) -> None: ...


class Chat(Protocol):
    """What the widget asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    thinking: bool

    @property
    def turns(self) -> Sequence[TurnLike]: ...
    def submit(self, text: str) -> Ticket: ...
    def reset(self) -> None: ...
    def on_submit(self, callback: Callable[[str, Any], None]) -> object: ...
    def on_change(self, callback: Callable[[], None]) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """The turn that is running; `command` is the page's id of the send that started it, "" for one from Python."""

    run: int
    user: str
    command: str
    ticket: Ticket


class ChatWidget(Panel):
    """Shows one chat in any number of views.

    Args:
        chat: asked and listened to; it holds the conversation.
        title: stands above the messages.
        pump: delivers the stream, the kernel's own if None.
    """

    _esm = _STATIC / "chat.js"
    _css = _STATIC / "chat.css"

    saved_class, name = "dsv4-saved", "Chat"

    status = traitlets.Unicode("idle").tag(sync=True)  # idle | queued | running | stopping
    run = traitlets.Int(0).tag(sync=True)
    thinking = traitlets.Bool(False).tag(sync=True)
    examples = traitlets.List(traitlets.Unicode(), list(EXAMPLES)).tag(sync=True)
    # whole text, written once a turn ends; `ended` is the last run it contains
    transcript = traitlets.Dict({"ended": 0, "turns": []}).tag(sync=True)

    def __init__(self, chat: Chat, *, title: str = "", pump: Pump | None = None) -> None:
        self._entries: list[Entry] = [entry_of(turn) for turn in chat.turns]
        super().__init__(title=title, thinking=chat.thinking, transcript=self._transcript(0))
        self._chat = chat
        self._pump = pump or shared_pump()
        self._live: _Live | None = None
        self._watch: Watch | None = None
        self._sent: tuple[Ticket, str] | None = None
        self._orders = Orders(
            self.send,
            {
                "send": self._do_send,
                "stop": self._do_stop,
                "reset": self._do_reset,
                "set_thinking": self._do_set_thinking,
            },
        )
        self._resets: list[str] = []
        self.on_msg(self._received)
        chat.on_submit(self._submitted)
        chat.on_change(self._changed)

    # page to kernel: may run on a subshell's thread

    def _received(self, _widget: object, content: object, _buffers: object) -> None:
        command = protocol.parse(content)
        if command is None:
            return
        live = self._live
        if command["kind"] == "stop" and live and _names(command, live):
            live.ticket.cancel()
        self._pump.call(self._resync if command["kind"] == "resync" else partial(self._orders.obey, command))

    # everything below runs on the pump's thread

    def _do_send(self, command: dict[str, Any]) -> None:
        ticket = self._chat.submit(command["text"])
        self._sent = (ticket, command["id"])

    def _do_stop(self, command: dict[str, Any]) -> None:
        if self._live and _names(command, self._live):
            self._live.ticket.cancel()
            self.status = "stopping"
        elif self._sent and self._sent[1] == command["command"]:
            self._sent[0].cancel()
        elif command["command"] and command["command"] not in self._orders:
            # the send that it stops is still on its way: refuse it when it arrives
            self._orders.answer(command["command"], "stopped before it was sent")

    def _do_reset(self, command: dict[str, Any]) -> bool:
        if self._live:
            self._live.ticket.cancel()
            self.status = "stopping"
            self._resets.append(command["id"])
            return False
        self._reset()
        return True

    def _do_set_thinking(self, command: dict[str, Any]) -> None:
        self._chat.thinking = command["value"]
        self.thinking = self._chat.thinking

    def _reset(self) -> None:
        self._chat.reset()
        self._entries = []
        self._publish()

    def _submitted(self, user: str, ticket: Ticket) -> None:
        """The chat started a turn, on whatever thread asked for it."""
        is_over = ticket.poll(0)[1]
        before = self._chat.turns[:-1] if is_over else self._chat.turns
        self._pump.call(partial(self._begin, user, ticket, tuple(before)))

    def _changed(self) -> None:
        """The chat went back or to another branch, on whatever thread asked for it."""
        self._pump.call(partial(self._take_over, tuple(self._chat.turns)))

    def _take_over(self, turns: tuple[TurnLike, ...]) -> None:
        if finish(self._watch, self._pump, partial(self._take_over, turns)):
            self._catch_up(turns)

    def _begin(self, user: str, ticket: Ticket, before: tuple[TurnLike, ...]) -> None:
        if not finish(self._watch, self._pump, partial(self._begin, user, ticket, before)):
            return
        command = self._sent[1] if self._sent and self._sent[0] is ticket else ""
        self._catch_up(before)
        self.run += 1
        self._live = _Live(run=self.run, user=user, command=command, ticket=ticket)
        self.thinking = self._chat.thinking
        self.status = "queued"
        self.send(protocol.message("begin", run=self.run, user=user, command=command))
        self._watch = Watch(self.run, ticket, self._told)
        self._pump.watch(self._watch)

    def _catch_up(self, turns: tuple[TurnLike, ...]) -> None:
        """Take over what happened to the chat without this widget: turns it never saw, another branch, a reset."""
        entries = [entry_of(turn) for turn in turns]
        for i, known in enumerate(self._entries[: len(entries)]):
            if replace(known, note="") == entries[i]:
                entries[i] = known  # no turn remembers its note
        if entries != self._entries:
            self._entries = entries
            self._publish()

    def _told(self, news: News) -> None:
        match news:
            case Frame():
                self.send(news.message())
            case Called():
                card = card_of(news.call, news.result, is_over=False)
                self.send(protocol.message("call", run=news.run, index=news.index, card=card.jsonable()))
            case Status():
                if self.status != "stopping":
                    self.status = news.state
            case Ended():
                self._end(news)

    def _end(self, ended: Ended) -> None:
        live = self._live
        assert live is not None and live.run == ended.run, ended
        entry = ended_entry(live.user, live.ticket.poll(0)[0])
        turns = self._chat.turns[len(self._entries) :]
        if turns and turns[0].user == live.user:  # else the chat has gone elsewhere since
            entry = replace(entry_of(turns[0]), note=entry.note)  # a turn of several runs counts them all
        self._entries.append(entry)
        self._live = self._watch = None
        if self._sent and self._sent[0] is live.ticket:
            self._sent = None
        self._publish()
        self.status = "idle"
        resets, self._resets = self._resets, []
        if resets:
            self._reset()
        for key in resets:
            self._orders.answer(key)

    def _resync(self) -> None:
        """Tell a view that has just come, or missed something, where the running turn stands."""
        self.thinking = self._chat.thinking
        if (live := self._live) is None:
            return
        entry = entry_from_events(live.user, live.ticket.poll(0)[0])
        self.send(
            protocol.message(
                "snapshot",
                run=live.run,
                user=live.user,
                command=live.command,
                next=entry.n_tokens,
                reasoning=entry.reasoning,
                text=entry.text,
                n_reasoning=entry.n_reasoning,
                cards=[card.jsonable() for card in entry.cards],
                is_calling=entry.is_calling,
            )
        )

    # what a saved notebook keeps

    def saved(self) -> Transcript:
        """Return the conversation so far, without the turn that is running."""
        return Transcript(title=self.title, turns=tuple(self._entries))

    def _transcript(self, ended: int) -> dict[str, Any]:
        return {"ended": ended, "turns": Transcript(turns=tuple(self._entries)).jsonable()}

    def _publish(self) -> None:
        self.transcript = self._transcript(self.run)
        self._refresh_saved()


def _names(command: dict[str, Any], live: _Live) -> bool:
    return bool(command["run"] == live.run or (live.command and command["command"] == live.command))


_shown: weakref.WeakKeyDictionary[Any, ChatWidget] = weakref.WeakKeyDictionary()


def widget_of(chat: Chat, *, title: str = "") -> ChatWidget:
    """Return the one widget of `chat`; every display of it is a view of the same state."""
    widget = _shown.get(chat)
    if widget is None or widget.comm is None:
        widget = _shown[chat] = ChatWidget(chat, title=title or _title(chat))
    return widget


def show(chat: Chat) -> None:
    """Display `chat` as a widget where there are widgets, as text elsewhere."""
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        Output(Transcript(turns=tuple(entry_of(turn) for turn in chat.turns)).bundle())
        return
    widget_of(chat)._ipython_display_()


def _title(chat: Chat) -> str:
    with contextlib.suppress(AttributeError):
        return str(chat.name)  # type: ignore[attr-defined]
    return "Chat"
