"""The chat as a person sees it in a notebook: traits for small state, messages for what streams.

Comm handlers may run on a subshell's thread, so they set a flag or leave a job to the pump; everything that the page
is told comes from the pump's thread.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import traitlets
from IPython.core.getipython import get_ipython

from dsv4nb.events import ToolCall, ToolResult
from dsv4nb.stream.calls import card_of
from dsv4nb.stream.frames import Called, Ended, Frame, News, Pump, Status, Watch
from dsv4nb.stream.output import Output
from dsv4nb.stream.transcript import Entry, Transcript, TurnLike, ended_entry, entry_from_events, entry_of
from dsv4nb.widgets import chat_actions, protocol
from dsv4nb.widgets.chat_actions import Actions, Ticket, chips_of
from dsv4nb.widgets.chat_shown import Shown, shown_of
from dsv4nb.widgets.panel import Panel, finish

_STATIC = Path(__file__).parent / "static"

EXAMPLES = ("What is the capital of France?", "What is 47 + 38?", "Count from 1 to 100.")


class Chat(chat_actions.Chat, Protocol):
    """What the widget asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    @property
    def thinking(self) -> bool: ...
    @thinking.setter
    def thinking(self, value: bool, /) -> None: ...
    @property
    def turns(self) -> Sequence[TurnLike]: ...
    def submit(self, text: str) -> Ticket: ...
    def reset(self) -> None: ...
    def on_submit(self, callback: Callable[[str, Any], None]) -> object: ...
    def on_change(self, callback: Callable[[], None]) -> object: ...
    def on_set(self, callback: Callable[[], None]) -> object: ...
    def on_notice(self, callback: Callable[[], None]) -> object: ...


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

    from_page = protocol.FROM_PAGE
    saved_class, name = "dsv4-saved", "Chat"

    status = traitlets.Unicode("idle").tag(sync=True)  # idle | queued | running | stopping
    run = traitlets.Int(0).tag(sync=True)
    thinking = traitlets.Bool(False).tag(sync=True)
    examples = traitlets.List(traitlets.Unicode(), list(EXAMPLES)).tag(sync=True)
    attached = traitlets.List(traitlets.Dict(), []).tag(sync=True)
    room = traitlets.Dict({}).tag(sync=True)  # what the next prompt takes, {} when nobody can count
    # whole text, written once a turn ends; `ended` is the last run it contains
    transcript = traitlets.Dict({"ended": 0, "turns": []}).tag(sync=True)

    def __init__(self, chat: Chat, *, title: str = "", pump: Pump | None = None) -> None:
        self._turns = shown_of(chat)
        super().__init__(pump, title=title, thinking=chat.thinking, transcript=self._transcript(0))
        self._chat = chat
        self._live: _Live | None = None
        self._watch: Watch | None = None
        self._sent: tuple[Ticket, str] | None = None
        self._calls: list[ToolCall] = []  # of the running turn
        self._waiting: frozenset[str] = frozenset()  # ids of those that the page knows to wait
        self._actions = Actions(chat, self._pump, self.send, self._started, self._answered)
        self._resets: list[str] = []
        self._obey(
            {
                "send": self._do_send,
                "stop": self._do_stop,
                "reset": self._do_reset,
                "set_thinking": self._do_set_thinking,
                **self._actions.handlers,
            }
        )
        chat.on_submit(self._submitted)
        chat.on_change(self._changed)
        chat.on_set(self._options_set)
        chat.on_notice(self._noticed)
        self._pump.call(self._show_beside)

    # page to kernel: may run on a subshell's thread

    def _take(self, command: dict[str, Any]) -> None:
        live = self._live
        if command["kind"] == "stop" and live and _names(command, live):
            live.ticket.cancel()
        if job := {"resync": self._resync, "maths": self._send_maths}.get(command["kind"]):
            self._pump.call(job)
        else:
            super()._take(command)

    # everything below runs on the pump's thread

    def _do_send(self, command: dict[str, Any]) -> None:
        self._started(self._chat.submit(command["text"]), command["id"])

    def _started(self, ticket: Ticket, command: str) -> None:
        self._sent = (ticket, command)

    def _answered(self, command: str, error: str) -> None:
        self._orders.answer(command, error)

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
        self._catch_up(shown_of(self._chat))

    def _submitted(self, user: str, ticket: Ticket) -> None:
        """The chat started a turn, on whatever thread asked for it."""
        is_over = ticket.poll(0)[1]
        before = shown_of(self._chat, self._turns)
        self._pump.call(partial(self._begin, user, ticket, before[:-1] if is_over else before))

    def _changed(self) -> None:
        """The chat went back or to another branch, on whatever thread asked for it."""
        self._pump.call(partial(self._take_over, shown_of(self._chat, self._turns)))

    def _options_set(self) -> None:
        """What the next turns ask for has changed, on whatever thread it was; a turn may be running."""
        self._pump.call(self._take_options)

    def _noticed(self) -> None:
        """Calls wait or no longer do, or attachments are others; on whatever thread it was."""
        self._pump.call(self._show_beside)

    def _take_options(self) -> None:
        self.thinking = self._chat.thinking
        self._measure()

    def _take_over(self, turns: list[Shown]) -> None:
        if finish(self._watch, self._pump, partial(self._take_over, turns)):
            self._catch_up(turns)
            self._measure()

    def _begin(self, user: str, ticket: Ticket, before: list[Shown]) -> None:
        if not finish(self._watch, self._pump, partial(self._begin, user, ticket, before)):
            return
        command = self._sent[1] if self._sent and self._sent[0] is ticket else ""
        self._catch_up(before)
        self.run += 1
        self._live = _Live(run=self.run, user=user, command=command, ticket=ticket)
        self._calls, self._waiting = [], self._pending()
        self.thinking = self._chat.thinking
        self.status = "queued"
        self.send(protocol.message("begin", run=self.run, user=user, command=command))
        self._watch = Watch(self.run, ticket, self._told)
        self._pump.watch(self._watch)
        self._refresh_saved()

    def _catch_up(self, turns: list[Shown]) -> None:
        """Take over what happened to the chat without this widget: turns it never saw, another branch, a reset."""
        if turns != self._turns:
            self._turns = turns
            self._publish()

    def _show_beside(self) -> None:
        """Tell the page what stands beside the turns."""
        self.attached = chips_of(self._chat.attachments)
        waiting = self._pending()
        changed, self._waiting = waiting ^ self._waiting, waiting
        for index, call in enumerate(self._calls):
            if self._live and call.id in changed:
                self._say_call(self._live.run, index, call, None)
        self._measure()

    def _pending(self) -> frozenset[str]:
        return frozenset(call.id for call in self._chat.pending)

    def _measure(self) -> None:
        self._actions.measure_room(self._measured)

    def _measured(self, room: dict[str, Any]) -> None:
        self.room = room

    def _say_call(self, run: int, index: int, call: ToolCall, result: ToolResult | None) -> None:
        card = card_of(call, result, is_over=False, waits=call.id in self._waiting)
        self.send(protocol.message("call", run=run, index=index, card=card.jsonable()))

    def _told(self, news: News) -> None:
        match news:
            case Frame():
                self.send(news.message())
            case Called():
                if news.result is None:
                    self._calls.append(news.call)
                self._say_call(news.run, news.index, news.call, news.result)
            case Status():
                if self.status != "stopping":
                    self.status = news.state
            case Ended():
                self._end(news)

    def _end(self, ended: Ended) -> None:
        live = self._live
        assert live is not None and live.run == ended.run, ended
        now = shown_of(self._chat, self._turns)
        last = now[len(self._turns) :]
        if last and last[0].entry.user == live.user:  # else the chat has gone elsewhere since
            self._turns = now[: len(self._turns) + 1]
        else:
            entry = ended_entry(live.user, live.ticket.poll(0)[0])
            self._turns = [*self._turns, Shown(turn=None, entry=entry)]
        self._live = self._watch = None
        if self._sent and self._sent[0] is live.ticket:
            self._sent = None
        self._publish()
        self._measure()
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
        entry = entry_from_events(live.user, live.ticket.poll(0)[0], self._waiting)
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

    def _send_maths(self) -> None:
        """Give the page what sets formulas; it is large, and most chats have none."""
        self.send(protocol.message("maths", script=(_STATIC / "maths.js").read_text(encoding="utf-8")))

    # what a saved notebook keeps

    def saved(self) -> Transcript:
        """Return the conversation so far; of the turn that is running what was asked."""
        turns = tuple(shown.entry for shown in self._turns)
        if self._live is not None:
            turns += (Entry(user=self._live.user, is_running=True),)
        return Transcript(title=self.title, turns=turns)

    def _transcript(self, ended: int) -> dict[str, Any]:
        return {"ended": ended, "turns": [shown.jsonable() for shown in self._turns]}

    def _publish(self) -> None:
        self.transcript = self._transcript(self.run)
        self._refresh_saved()


def _names(command: dict[str, Any], live: _Live) -> bool:
    return bool(command["run"] == live.run or (live.command and command["command"] == live.command))


_widgets: weakref.WeakKeyDictionary[Any, ChatWidget] = weakref.WeakKeyDictionary()


def widget_of(chat: Chat, *, title: str = "") -> ChatWidget:
    """Return the one widget of `chat`; every display of it is a view of the same state."""
    widget = _widgets.get(chat)
    if widget is None or widget.comm is None:
        widget = _widgets[chat] = ChatWidget(chat, title=title or _title(chat))
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
