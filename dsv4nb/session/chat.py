"""A conversation: turns, one at a time, and the history that the next one is rendered from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dsv4nb.errors import ChatBusy, PromptEmpty, RequestError
from dsv4nb.events import Event, Failed, Generation
from dsv4nb.session.attachments import message_with
from dsv4nb.session.beside import Beside, listed
from dsv4nb.session.branching import Branching
from dsv4nb.session.continuing import Given
from dsv4nb.session.export import to_text
from dsv4nb.session.exporting import Exports
from dsv4nb.session.from_token import FromToken, Reader
from dsv4nb.session.gauge import Gauge
from dsv4nb.session.live import Ledger
from dsv4nb.session.recall import turn_of
from dsv4nb.session.request import Limits, Options, check_options, override, toolset
from dsv4nb.session.starting import Start, Ticket
from dsv4nb.session.tool_text import result_text
from dsv4nb.session.tree import Branches, Node, Tree, turns_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a turn adds to the history before the model answers.

    Attributes:
        after: the turn that it follows, None for the first.
    """

    messages: tuple[dict[str, Any], ...]
    after: Node | None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatState:
    """What makes a chat.

    Attributes:
        ledger: the ids that its last run left committed.
    """

    options: Options
    nodes: tuple[Node, ...]
    head: Node | None
    ledger: tuple[int, ...]


class Chat(Exports, Beside, Branching, FromToken):
    """A conversation with one model; a turn is rendered from the history and computes what is not known of it.

    The history holds exactly what was shown: a turn that was stopped stays with its partial text, a turn that
    failed leaves it as it was.

    Args:
        start: runs a conversation.
        name: of the model, for people.
        options: of every turn; a turn can override them.
        show: displays a chat in a notebook, text when None.
        messages: the history to go on from, in the encoder's form and without a system message.
        save: writes a chat to a file.
        limits: of the model, which options are checked against; None checks their names alone.
        gauge: counts the model's tokens.
        asks: whether calls of functions wait for `approve` or `deny`.
        model: reads and scores token ids; None where there is none to ask.

    Attributes:
        forks: those that were made in a panel, so that a cell can go on with them.
    """

    def __init__(
        self,
        start: Start,
        *,
        name: str = "",
        options: Options | None = None,
        show: Callable[[Chat], None] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        save: Callable[[Chat, str | Path], int] | None = None,
        limits: Limits | None = None,
        model: Reader | None = None,
        gauge: Gauge | None = None,
        asks: bool = False,
    ) -> None:
        super().__init__(gauge)
        self.forks: list[Chat] = []
        self._asks = asks
        self._options = options or Options()
        self.name, self.limits, self.model = name, limits, model
        self._thinking = self._options.thinking
        self._start, self._show, self._save = start, show, save
        self._lock = threading.Lock()
        self._is_busy = False
        self._ticket: Ticket | None = None
        self._ledger = Ledger()
        self._tree = Tree()
        for turn, said in turns_of(messages):
            self._tree.add(turn, said)
        self._callbacks: list[Callable[[str, Any], None]] = []
        self._on_change: list[Callable[[], None]] = []
        self._on_set: list[Callable[[], None]] = []

    @property
    def thinking(self) -> bool:
        """Whether the next turns reason before they answer; may be set at any time."""
        return self._thinking

    @thinking.setter
    def thinking(self, value: bool) -> None:
        was, self._thinking = self._thinking, value
        if value != was:
            _call_all(self._on_set)

    @property
    def options(self) -> Options:
        """What the next turns ask for; `set` changes it, and a turn can ask for something else."""
        return replace(self._options, thinking=self._thinking)

    def set(self, **options: Any) -> None:
        """Change options of the turns to come, by the names of `send`; None takes the model's default again.

        A turn that is running keeps what it began with.

        Raises:
            RequestError, EncodingError: a value is refused; nothing was changed.
        """
        with self._lock:
            chosen = self.check(**options)
            self._options, self._thinking = chosen, chosen.thinking
        _call_all(self._on_set)

    def check(self, **options: Any) -> Options:
        """Return what `options` would be after `set` with the same; change nothing.

        Raises:
            RequestError, EncodingError: as `set`.
        """
        chosen = override(self.options, options, "chat.set()")
        if self.limits is not None:
            check_options(chosen, self.limits)
        return chosen

    @property
    def branches(self) -> Branches:
        """Every turn there was, as a tree that can be printed."""
        return self._tree.branches

    @property
    def ledger(self) -> Ledger:
        """The ids that the last run left committed, and how they came about; a copy."""
        return replace(self._ledger)

    def state(self) -> ChatState:
        """Return everything that makes this chat, at this moment.

        Raises:
            ChatBusy: a turn is still running.
        """
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            tree = self._tree.branches
            return ChatState(
                options=self._with_tools(self._attached), nodes=tree.nodes, head=tree.head, ledger=self._ledger.ids
            )

    def save(self, path: str | Path) -> int:
        """Write the chat to a file, with all its branches and the caches of the last turn; return its bytes.

        `dsv4nb.open_chat(path, model)` goes on from it, in another kernel too. Functions are saved as declarations.

        Raises:
            ChatBusy: a turn is still running.
            ArchiveError: the file cannot be written; one that was there is as it was.
        """
        if self._save is None:
            raise RequestError("this chat has no model to save the caches of", param="path")
        return self._save(self, path)

    @property
    def is_busy(self) -> bool:
        """Whether a turn is queued or running."""
        return self._is_busy

    @property
    def ticket(self) -> Ticket | None:
        """The turn that runs, else the last one that did; None before the first."""
        return self._ticket

    def submit(self, text: str, **options: Any) -> Ticket:
        """Start a turn and return at once; tools that are functions are called on another thread.

        Args:
            options: of this turn only, by the names of `Model.generate`.

        Raises:
            ChatBusy: a turn is still running.
            RequestError, EncodingError: the turn is refused; nothing was changed.
        """
        return self._submit(text, options, inline=False)

    def send(self, text: str, **options: Any) -> Generation:
        """Ask and wait for the answer; an interrupt stops the turn and keeps its text.

        Tools that are functions are called on this thread.

        Raises:
            Dsv4Error: as `submit`, and when the turn fails.
        """
        return self._submit(text, options, inline=True).result()

    def send_results(self, results: Mapping[str, object], **options: Any) -> Generation:
        """Answer the calls that the last turn ended with, and wait for what the model makes of it.

        Args:
            results: id of each call -> its result; anything that is not text is written as JSON.

        Raises:
            RequestError: the last turn ended with other calls.
            Dsv4Error: as `send`.
        """
        told = _Told(messages=self._results(results), after=self._tree.head)
        return self._start_turn(told, options, inline=True).result()

    def fork(self, turn: int | None = None) -> Chat:
        """Return another chat with this one's history and options; from here on they do not know of each other.

        Args:
            turn: the fork goes on behind the first `turn` turns of this branch; all of them when None.

        Raises:
            ChatBusy: a turn is still running.
            RequestError: there are not that many turns.
        """
        head = self._last_of(turn)
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            other = Chat(
                self._start,
                name=self.name,
                options=self._options,
                show=self._show,
                save=self._save,
                limits=self.limits,
                model=self.model,
                gauge=self._gauge,
                asks=self._asks,
            )
            other._attached = self._attached
            other.resume(Tree(self._tree.branches.nodes, head), self._ledger.ids, thinking=self.thinking)
        return other

    def resume(self, tree: Tree, ledger: Sequence[int], *, thinking: bool) -> None:
        """Become the chat that these stand for."""
        self._tree, self._ledger, self._thinking = tree, Ledger(tuple(ledger)), thinking
        self._changed()
        _call_all(self._on_set)

    def _submit(
        self,
        text: str,
        options: Mapping[str, Any],
        *,
        inline: bool,
        waits: bool = False,
        after: Node | Literal["head"] | None = "head",
    ) -> Ticket:
        if not isinstance(text, str):
            raise RequestError(f"a message must be text, not {type(text).__name__}", param="text")
        if not text:
            raise PromptEmpty("text")
        node = self._tree.head if after == "head" else after
        if waiting := _open_calls(node.messages if node else ()):
            raise RequestError(
                f"the last turn waits for results of {', '.join(waiting)}; chat.send_results takes them", param="text"
            )
        attached = self._attached if after == "head" else ()
        whole = message_with(attached, text)
        told = _Told(text=whole, after=node, messages=({"role": "user", "content": whole},))
        ticket = self._start_turn(told, options, inline=inline, waits=waits)
        self._sent(attached)
        return ticket

    def _start_given(self, node: Node, options: Options, given: Given, *, inline: bool) -> Ticket:
        told = _Told(text=node.turn.user, after=node.parent, messages=tuple(map(dict, node.messages[:-1])))
        return self._start_turn(told, {}, inline=inline, base=options, given=given)

    def _start_turn(
        self,
        told: _Told,
        options: Mapping[str, Any],
        *,
        inline: bool,
        waits: bool = False,
        base: Options | None = None,
        given: Given | None = None,
    ) -> Ticket:
        chosen = override(base or self._with_tools(self._attached), options, "chat.send()")
        if base is None and not chosen.thinking and "effort" not in options:
            chosen = replace(chosen, effort=None)  # the chat's effort is that of its thinking turns
        if (inline or waits) and self._asks and toolset(chosen).functions and chosen.tool_choice != "none":
            raise RequestError(
                "calls of this chat wait for a person, and so would this cell; show the chat and ask there, or use "
                "chat.submit() with chat.pending, chat.approve() and chat.deny()",
                param="approve",
            )
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._is_busy = True
            head, self._tree.head = self._tree.head, told.after
        try:
            sent = (*self._tree.messages, *told.messages)
            on_end = partial(self._ended, told.text, chosen, len(sent))
            desk = self._desk if self._asks else None
            ticket = self._start(sent, chosen, on_end, inline=inline, ledger=self._ledger, desk=desk, given=given)
        except BaseException:
            self._tree.head = head
            self._is_busy = False
            raise
        self._ticket = ticket
        for callback in tuple(self._callbacks):
            callback(told.text, ticket)
        return ticket

    def _results(self, results: Mapping[str, object]) -> tuple[dict[str, Any], ...]:
        wanted = _open_calls(self._tree.messages)
        if not isinstance(results, Mapping) or set(results) != set(wanted):
            given = ", ".join(map(str, results)) if isinstance(results, Mapping) else type(results).__name__
            raise RequestError(
                f"results are of {given or 'nothing'}; the last turn waits for {', '.join(wanted) or 'none'}",
                param="results",
            )
        return tuple({"role": "tool", "tool_call_id": call, "content": result_text(results[call])} for call in wanted)

    async def asend(self, text: str, **options: Any) -> Generation:
        """Ask and await the answer; cancelling the await stops the turn."""
        return await self._submit(text, options, inline=False, waits=True).aresult()

    def stop(self) -> None:
        """Stop the turn that is running; its text so far is kept."""
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()

    def reset(self) -> None:
        """Forget the conversation; the system message and the options stay.

        Raises:
            ChatBusy: a turn is still running.
        """
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._tree, self._ticket, self._ledger = Tree(), None, Ledger()
        self._changed()

    def on_submit(self, callback: Callable[[str, Any], None]) -> Callable[[], None]:
        """Call `callback(text, ticket)` whenever a turn starts, on the thread that started it.

        Returns:
            A function that ends this.
        """
        return listed(self._callbacks, callback)

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` whenever `turns` become others without a turn: after rewind, switch, reset, resume.

        It is called on the thread that changed them, when the change is complete; no turn is running then.

        Returns:
            A function that ends this.
        """
        return listed(self._on_change, callback)

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` whenever `options` become others, while a turn is running too; else as `on_change`."""
        return listed(self._on_set, callback)

    def _changed(self) -> None:
        _call_all(self._on_change)

    def _ended(
        self, text: str, options: Options, n_sent: int, outcome: Generation | Failed, events: Sequence[Event]
    ) -> None:
        """Write the turn down; called before its ticket is finished, on the thread that ends it."""
        turn = turn_of(text, options, outcome, events)
        added: tuple[dict[str, Any], ...] = ()
        with self._lock:
            if isinstance(outcome, Generation):
                said = [m for m in outcome.messages if m["role"] != "system"]
                n_before = len(self._tree.messages)
                added = tuple(said[n_before:]) if len(said) > n_sent else ()
            self._tree.add(turn, added)
            self._is_busy = False

    def __repr__(self) -> str:
        return to_text(self.turns, title=f"Chat with {self.name}" if self.name else "Chat")

    def _ipython_display_(self) -> None:
        if self._show is not None:
            self._show(self)
            return
        from IPython.display import display

        display({"text/plain": repr(self)}, raw=True)  # type: ignore[no-untyped-call]


def _open_calls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the calls that a history ends with."""
    last = messages[-1] if messages else {}
    return [call["id"] for call in last.get("tool_calls", ())]


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in tuple(callbacks):
        callback()
