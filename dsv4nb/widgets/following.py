"""What panels of a chat's replies do: follow the one that runs, and show any turn that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from dsv4nb.errors import RequestError
from dsv4nb.stream.frames import Ended, News, Pollable, Pump, Watch
from dsv4nb.widgets import protocol
from dsv4nb.widgets.orders import Do
from dsv4nb.widgets.panel import Panel, finish

LISTED = 200  # turns to choose from, the latest ones
NO_TURN = -1


class Chat(Protocol):
    """What such a panel asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    @property
    def turns(self) -> Sequence[Any]: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def ticket(self) -> Any: ...
    def on_submit(self, callback: Callable[[str, Any], None]) -> Callable[[], None]: ...
    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class Shown(Protocol):
    """A reply as a panel shows it, growing while it is made.

    Attributes:
        label: what was asked.
        turn: of the chat, None while it runs or when there is no chat.
    """

    label: str
    turn: Any
    is_live: bool


_S = TypeVar("_S", bound=Shown)
_S_co = TypeVar("_S_co", bound=Shown, covariant=True)


class Reads(Protocol[_S_co]):
    """Reads a run into what is shown of it."""

    @property
    def shown(self) -> _S_co: ...
    def read(self) -> None: ...


class Following(Panel, Generic[_S]):
    """A panel that shows one reply: the latest, until another turn is chosen.

    A subclass says what it shows of a turn and of a run, and tells its page; everything that it defines for that is
    called on the pump's thread.

    Args:
        chat: whose replies, None when there is no chat.
        shown: first.
        ticket: of a run that is followed without a chat.
        do: commands of the page beside "show", see `Orders`.
        title: stands above.
        pump: delivers the stream, the kernel's own if None.

    Attributes:
        from_kernel: what the page can be told: "turns" and the subclass's own.
    """

    from_kernel: ClassVar[protocol.Messages]

    _chat: Chat | None
    _reader: Reads[_S] | None  # of the run that goes on

    def __init__(
        self,
        chat: Chat | None,
        shown: _S,
        ticket: Pollable | None,
        do: Mapping[str, Do],
        *,
        title: str,
        pump: Pump | None,
    ) -> None:
        super().__init__(pump, title=title)
        self._chat, self._shown, self._reader = chat, shown, None
        self._watch: Watch | None = None
        self._follows = True
        self._run = 1
        self._obey({"show": self._do_show, **do})
        if chat is not None:
            self._listen(chat)
            ticket = chat.ticket if chat.is_busy else None
        if ticket is not None:
            self._pump.call(partial(self._begin, "", ticket))

    # what a subclass says

    def _of_turn(self, turn: Any) -> _S:
        """Return what is shown of a turn; of none when None."""
        raise NotImplementedError

    def _of_run(self, ticket: Pollable, user: str) -> Reads[_S]:
        """Return what reads a run that begins."""
        raise NotImplementedError

    def _size(self, turn: Any) -> int:
        """Return how much there is to see of a turn."""
        raise NotImplementedError

    def _snapshot(self) -> None:
        """Tell all of what is shown."""
        raise NotImplementedError

    def _news(self, *, is_shown: bool) -> None:
        """Tell what the reader has just read, if it is shown."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Tell that what is shown has ended."""
        raise NotImplementedError

    # on any thread

    def _listen(self, chat: Chat) -> None:
        self._unwatch = chat.on_submit(self._submitted), chat.on_change(self._changed)

    def _take(self, command: dict[str, Any]) -> None:
        if command["kind"] == "resync":
            self._pump.call(self._resync)
        else:
            super()._take(command)

    def _submitted(self, user: str, ticket: Pollable) -> None:
        """The chat started a turn, on whatever thread asked for it."""
        self._pump.call(partial(self._begin, user, ticket))

    def _changed(self) -> None:
        """The chat went back or to another branch, on whatever thread asked for it."""
        self._pump.call(self._take_over)

    # everything below runs on the pump's thread

    @property
    def _turns(self) -> Sequence[Any]:
        return () if self._chat is None else self._chat.turns

    def _latest(self) -> _S:
        turns = self._turns
        return self._of_turn(turns[-1] if turns else None)

    def _place(self) -> int:
        """Return which turn of the chat's branch is shown."""
        return next((i for i, turn in enumerate(self._turns) if turn is self._shown.turn), NO_TURN)

    def _say(self, kind: str, buffers: Sequence[memoryview] = (), **fields: Any) -> None:
        message = protocol.message(kind, declared=self.from_kernel, **fields)
        self.send(message, buffers=list(buffers)) if buffers else self.send(message)

    def _begin(self, user: str, ticket: Pollable) -> None:
        if self.comm is None or (self._watch is not None and self._watch.ticket is ticket):
            return
        if not finish(self._watch, self._pump, partial(self._begin, user, ticket)):
            return
        self._reader = self._of_run(ticket, user)
        self._watch = Watch(self._run, ticket, self._told)
        self._pump.watch(self._watch)
        if self._follows:
            self._show(self._reader.shown)
        else:
            self._list()

    def _take_over(self) -> None:
        """Show the chat's branch; what was chosen from it stays as long as it is there."""
        if self.comm is None or self._chat is None or not finish(self._watch, self._pump, self._take_over):
            return
        turns = self._chat.turns
        if any(turn is self._shown.turn for turn in (turns[-1:] if self._follows else turns)):
            self._list()
            return
        self._follows = True
        self._show(self._latest())

    def _told(self, news: News) -> None:
        reader = self._reader
        if self.comm is None or reader is None:
            return
        reader.read()
        is_shown = self._shown is reader.shown
        self._news(is_shown=is_shown)
        if isinstance(news, Ended):
            self._end(reader.shown, is_shown=is_shown)

    def _end(self, reply: _S, *, is_shown: bool) -> None:
        self._reader = self._watch = None
        if turns := self._turns:
            reply.turn, reply.label = turns[-1], turns[-1].user
        if is_shown:
            self._ended()
            self._refresh_saved()
        self._list()

    def _show(self, reply: _S) -> None:
        """Show another reply: every view forgets the one before."""
        self._shown = reply
        self._run += 1
        self._snapshot()
        self._list()
        self._refresh_saved()

    def _resync(self) -> None:
        """Tell a view that has just come, or missed something, where things stand."""
        turns = self._turns
        if turns and self._follows and not self._shown.is_live and self._shown.turn is not turns[-1]:
            self._shown, self._run = self._of_turn(turns[-1]), self._run + 1
            self._refresh_saved()
        self._list()
        self._snapshot()

    def _list(self) -> None:
        """Tell which turns there are to choose from."""
        if self._chat is None:
            return
        turns = list(self._chat.turns)
        first = max(0, len(turns) - LISTED)
        told = [[i, turns[i].user, self._size(turns[i])] for i in range(first, len(turns))]
        self._say("turns", turns=told, shown=self._place(), follows=self._follows)

    def _do_show(self, command: dict[str, Any]) -> None:
        turns, i = self._turns, command["turn"]
        if i == NO_TURN:
            self._follows = True
            self._show(self._reader.shown if self._reader else self._latest())
            return
        if not 0 <= i < len(turns):
            raise RequestError(f"turn is {i}; this branch has {len(turns)} turns, counted from 0", param="turn")
        self._follows = i == len(turns) - 1 and self._reader is None
        self._show(self._of_turn(turns[i]))
