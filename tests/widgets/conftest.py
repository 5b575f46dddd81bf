from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from comm.base_comm import BaseComm

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import Dsv4Error, RequestError
from dsv4nb.events import Done, Event, Failed, PromptUsage, StopReason, Timings, Token, ToolCall, ToolResult
from dsv4nb.session.gauge import Room
from dsv4nb.session.result import joined
from dsv4nb.session.tree import Branches, Tree, Turn
from dsv4nb.stream.frames import Pump


class RecordedComm(BaseComm):
    """Keeps what a kernel would publish, and delivers what a page would send."""

    def __init__(self, **options: Any) -> None:
        self.published: list[tuple[str, dict[str, Any]]] = []
        super().__init__(**options)

    def publish_msg(self, msg_type: str, data: Any = None, *_: Any, **__: Any) -> None:
        self.published.append((msg_type, data or {}))

    def from_page(self, content: object) -> None:
        self.handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})

    def messages(self, kind: str = "") -> list[dict[str, Any]]:
        sent = [data["content"] for name, data in self.published if name == "comm_msg" and data["method"] == "custom"]
        return [message for message in sent if kind in ("", message["kind"])]

    def traits(self, name: str) -> list[Any]:
        updates = [data["state"] for kind, data in self.published if kind == "comm_msg" and data["method"] == "update"]
        return [state[name] for state in updates if name in state]


@dataclass(eq=False)
class HandTicket:
    """A run whose tokens are put in by hand."""

    state: str = "queued"
    events: list[Event] = field(default_factory=list)
    finished: bool = False
    cancelled: int = 0
    write_down: Callable[[Done | Failed], None] = lambda last: None

    def poll(self, start: int) -> tuple[Sequence[Event], bool]:
        return self.events[start:], self.finished

    def cancel(self) -> None:
        self.cancelled += 1

    def start(self) -> None:
        self.state = "running"
        self.events.append(PromptUsage(n_prompt=5, n_cached=0))

    def say(self, *texts: str, channel: Any = "content") -> None:
        self.events.extend(Token(id=i, text=text, channel=channel) for i, text in enumerate(texts))

    def end(self, stop_reason: StopReason = "stop", note: str = "") -> None:
        self.events.append(
            Done(
                stop_reason=stop_reason,
                n_tokens=sum(isinstance(event, Token) for event in self.events),
                n_prompt=5,
                n_cached=0,
                queue_s=0.0,
                elapsed_s=0.5,
                config=SamplerConfig(),
                route="plain_greedy",
                timings=Timings(queue_s=0.0, prepare_s=0.0),
                spec_note=note,
            )
        )
        self.write_down(self.events[-1])  # type: ignore[arg-type]
        self.state, self.finished = "done", True

    def fail(self, message: str) -> None:
        self.events.append(Failed(code="engine", message=message, param=None, retryable=False))
        self.write_down(self.events[-1])  # type: ignore[arg-type]
        self.state, self.finished = "failed", True


class HandChat:
    """A chat whose runs are `HandTicket`s."""

    name = "toy"

    def __init__(self) -> None:
        self.thinking = False
        self.turns: list[Any] = []
        self.tickets: list[HandTicket] = []
        self.asked: list[str] = []
        self.resets = 0
        self._callbacks: list[Callable[[str, Any], None]] = []
        self._on_change: list[Callable[[], None]] = []
        self._on_set: list[Callable[[], None]] = []
        self._on_notice: list[Callable[[], None]] = []
        self.attachments: tuple[Any, ...] = ()
        self.pending: list[ToolCall] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change.append(callback)

    def on_set(self, callback: Callable[[], None]) -> None:
        self._on_set.append(callback)

    def on_notice(self, callback: Callable[[], None]) -> None:
        self._on_notice.append(callback)

    @property
    def branches(self) -> Branches:
        """The turns, one behind the other."""
        tree = Tree()
        for turn in self.turns:
            tree.add(turn, ())
        return tree.branches

    def room(self) -> Room:
        raise RequestError("nobody counts here", param="model")

    def become(self, turns: list[Any]) -> None:
        """Go to another branch, as `rewind` and `switch` do."""
        self.turns = turns
        for callback in self._on_change:
            callback()

    def on_submit(self, callback: Callable[[str, Any], None]) -> None:
        self._callbacks.append(callback)

    def submit(self, text: str) -> HandTicket:
        if self.tickets and not self.tickets[-1].finished:
            raise Dsv4Error("the chat is busy")
        self.asked.append(text)
        ticket = HandTicket()
        ticket.write_down = partial(self._ended, text, ticket)
        self.tickets.append(ticket)
        for callback in self._callbacks:
            callback(text, self.tickets[-1])
        return self.tickets[-1]

    def reset(self) -> None:
        self.resets += 1
        self.become([])

    def _ended(self, text: str, ticket: HandTicket, last: Done | Failed) -> None:
        """Write the turn down, as a chat does just before its ticket says that it ended."""
        said = [event for event in ticket.events if isinstance(event, Token)]
        turn = Turn(
            user=text,
            reasoning=joined(said, "reasoning"),
            text=joined(said, "content"),
            tool=joined(said, "tool"),
            n_reasoning=sum(token.channel == "reasoning" for token in said),
            calls=tuple(event for event in ticket.events if isinstance(event, ToolCall)),
            results=tuple(event for event in ticket.events if isinstance(event, ToolResult)),
        )
        if isinstance(last, Failed):
            turn = replace(turn, error=last.message)
        else:
            turn = replace(
                turn, stop_reason=last.stop_reason, n_tokens=last.n_tokens, seconds=last.elapsed_s, runs=(last,)
            )
        self.turns = [*self.turns, turn]


@pytest.fixture(autouse=True)
def recorded_comms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comm.create_comm", RecordedComm)


@pytest.fixture
def open_panel() -> Iterator[Callable[..., Any]]:
    """Make panels of a class, on a pump each that is quick; they are closed after the test."""
    made: list[Any] = []

    def make(panel: Callable[..., Any], *source: Any, **options: Any) -> Any:
        made.append(panel(*source, **{"pump": Pump(rate=500), **options}))
        return made[-1]

    yield make
    for panel in made:
        panel._pump.drain()
        panel.close()


@pytest.fixture
def chat() -> HandChat:
    return HandChat()
