"""A conversation: turns, one at a time, and the history that the next one is rendered from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from dsv4nb.errors import ChatBusy, PromptEmpty, RequestError
from dsv4nb.events import Event, Failed, Generation, PromptUsage, Round, Rounds, Token, ToolCall, ToolResult
from dsv4nb.session.export import to_cells, to_frame, to_jsonl
from dsv4nb.session.live import Ledger
from dsv4nb.session.log import OnEnd
from dsv4nb.session.request import Options, override
from dsv4nb.session.result import joined
from dsv4nb.session.tool_text import result_text
from dsv4nb.session.tree import Branches, Node, Tree, Turn, turns_of

_F = TypeVar("_F")


class Ticket(Protocol):
    """A turn on its way; `dsv4nb.stream.ticket.Ticket` is one."""

    @property
    def state(self) -> str: ...
    @property
    def text(self) -> str: ...
    def poll(self, start: int) -> tuple[list[Event], bool]: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def result(self, timeout: float | None = None) -> Generation: ...
    async def aresult(self) -> Generation: ...
    def cancel(self) -> None: ...


class Start(Protocol):
    """Starts a turn; `on_end` is called before anybody sees that it ended.

    Functions are called on a thread of their own; with `inline` on that of whoever asks the ticket for its result.
    """

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], options: Options, on_end: OnEnd, *, inline: bool, ledger: Ledger
    ) -> Ticket: ...


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


class Chat:
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

    Attributes:
        thinking: whether the next turns reason before they answer; may be set at any time.
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
    ) -> None:
        self._options = options or Options()
        self.name = name
        self.thinking = self._options.thinking
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

    @property
    def turns(self) -> list[Turn]:
        """The turns of this branch that ended, failed ones included."""
        return [node.turn for node in self._tree.path]

    @property
    def branches(self) -> Branches:
        """Every turn there was, as a tree that can be printed."""
        return self._tree.branches

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as messages, the system message in front."""
        system = self._options.system
        front = [] if system is None else [{"role": "system", "content": system}]
        return [*front, *map(dict, self._tree.messages)]

    def state(self) -> ChatState:
        """Return everything that makes this chat, at this moment.

        Raises:
            ChatBusy: a turn is still running.
        """
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            tree = self._tree.branches
            return ChatState(options=self._options, nodes=tree.nodes, head=tree.head, ledger=self._ledger.ids)

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

    def to_messages(self) -> list[dict[str, Any]]:
        """Return the history of this branch; `Model.chat(messages=...)` takes it back."""
        return self.messages

    def to_jsonl(self, path: str | Path | None = None, *, all_branches: bool = False) -> str:
        """Return, and write to `path`, one line of JSON per conversation: this branch, or every one.

        Raises:
            OSError: the file cannot be written.
        """
        heads = self._tree.branches.leaves if all_branches else [self._tree.head]
        front = self.messages[: self._options.system is not None]
        text = to_jsonl(
            [*front, *(m for node in (head.path() if head else ()) for m in node.messages)] for head in heads
        )
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_cells(self) -> list[dict[str, Any]]:
        """Return the history of this branch as notebook cells; Python that the model wrote becomes code cells."""
        return to_cells(self.messages)

    def to_frame(self) -> Any:
        """Return the turns of this branch as a pandas data frame.

        Raises:
            RequestError: pandas is not installed.
        """
        return to_frame(self.turns)

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

    def regenerate(self, **options: Any) -> Generation:
        """Answer the last message again, as a new branch, and wait; what was computed for the prompt is used again.

        Raises:
            RequestError: there is no turn yet.
            Dsv4Error: as `send`.
        """
        return self.edit(-1, None, **options)

    def edit(self, i: int, text: str | None, **options: Any) -> Generation:
        """Send another text in place of turn `i` of this branch, as a new branch, and wait for the answer.

        Args:
            i: index of the turn, as in `turns`; negative counts from the end.
            text: None sends the same again.

        Raises:
            RequestError: there is no such turn, or it has no text of its own.
            Dsv4Error: as `send`.
        """
        node = self._tree.nth(i)
        if text is None and not node.turn.user:
            raise RequestError("this turn answered calls and has no text; edit the turn before it", param="turn")
        return self._submit(node.turn.user if text is None else text, options, inline=True, after=node.parent).result()

    def rewind(self, turn: int | None = None, *, round: int | None = None) -> None:
        """Go back; what is left behind stays in `branches`.

        Args:
            turn: the next message follows the first `turn` turns of this branch; all of them when None.
            round: of the last turn that is kept, counted from 0: it is kept as if it had been stopped before this
                round of speculation, as a new branch.

        Raises:
            ChatBusy: a turn is still running.
            RequestError: there are not that many turns or rounds, or the turn made calls.
        """
        path = self._tree.path
        if turn is None and round is None:
            raise RequestError("pass turn=, round= or both", param="turn")
        kept = len(path) if turn is None else turn
        if isinstance(kept, bool) or not isinstance(kept, int) or not 0 <= kept <= len(path):
            raise RequestError(f"turn is {turn!r}; this branch has {len(path)} turns to keep, or 0", param="turn")
        node = path[kept - 1] if kept else None
        if round is None:
            self._go_to(node)
            return
        if node is None:
            raise RequestError(f"round is {round!r}; there is no turn that it could be of", param="round")
        turn_before = node.turn.before(round)
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._tree.head = node.parent
            self._tree.add(turn_before, [*node.messages[:-1], _cut(node.messages[-1], turn_before)])
        self._changed()

    def switch(self, turn: int) -> None:
        """Go on from the turn with this number in `branches`, on whatever branch.

        Raises:
            ChatBusy: a turn is still running.
            RequestError: there is no such turn.
        """
        self._go_to(self._tree.node(turn))

    def fork(self) -> Chat:
        """Return another chat with this one's history and options; from here on they do not know of each other.

        Raises:
            ChatBusy: a turn is still running.
        """
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            other = Chat(self._start, name=self.name, options=self._options, show=self._show, save=self._save)
            other.resume(Tree(self._tree.branches.nodes, self._tree.head), self._ledger.ids, thinking=self.thinking)
        return other

    def resume(self, tree: Tree, ledger: Sequence[int], *, thinking: bool) -> None:
        """Become the chat that these stand for."""
        self._tree, self._ledger, self.thinking = tree, Ledger(tuple(ledger)), thinking
        self._changed()

    def _go_to(self, node: Node | None) -> None:
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._tree.head = node
        self._changed()

    def _submit(
        self, text: str, options: Mapping[str, Any], *, inline: bool, after: Node | Literal["head"] | None = "head"
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
        told = _Told(text=text, after=node, messages=({"role": "user", "content": text},))
        return self._start_turn(told, options, inline=inline)

    def _start_turn(self, told: _Told, options: Mapping[str, Any], *, inline: bool) -> Ticket:
        chosen = override(replace(self._options, thinking=self.thinking), options, "chat.send()")
        if not chosen.thinking and "effort" not in options:
            chosen = replace(chosen, effort=None)  # the chat's effort is that of its thinking turns
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._is_busy = True
            head, self._tree.head = self._tree.head, told.after
        try:
            sent = (*self._tree.messages, *told.messages)
            ticket = self._start(
                sent, chosen, partial(self._ended, told.text, len(sent)), inline=inline, ledger=self._ledger
            )
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
        return await self.submit(text, **options).aresult()

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
        return _listed(self._callbacks, callback)

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` whenever `turns` become others without a turn: after `rewind`, `switch`, `reset`, `resume`.

        It is called on the thread that changed them, when the change is complete.

        Returns:
            A function that ends this.
        """
        return _listed(self._on_change, callback)

    def _changed(self) -> None:
        for callback in tuple(self._on_change):
            callback()

    def _ended(self, text: str, n_sent: int, outcome: Generation | Failed, events: Sequence[Event]) -> None:
        """Write the turn down; called before its ticket is finished, on the thread that ends it."""
        rounds, marks = _rounds(events)
        turn = Turn(
            user=text,
            rounds=rounds,
            marks=marks,
            reasoning=joined(events, "reasoning"),
            text=joined(events, "content"),
            tool=joined(events, "tool"),
            n_reasoning=sum(isinstance(event, Token) and event.channel == "reasoning" for event in events),
            calls=tuple(event for event in events if isinstance(event, ToolCall)),
            results=tuple(event for event in events if isinstance(event, ToolResult)),
        )
        added: tuple[dict[str, Any], ...] = ()
        with self._lock:
            if isinstance(outcome, Failed):
                turn = replace(turn, error=outcome.message)
            else:
                runs = outcome.steps or (outcome,)
                turn = replace(
                    turn,
                    stop_reason=outcome.stop_reason,
                    n_tokens=sum(run.done.n_tokens for run in runs),
                    n_cached=runs[0].done.n_cached,
                    seconds=sum(run.done.elapsed_s for run in runs),
                )
                said = [m for m in outcome.messages if m["role"] != "system"]
                n_before = len(self._tree.messages)
                added = tuple(said[n_before:]) if len(said) > n_sent else ()
            self._tree.add(turn, added)
            self._is_busy = False

    def __repr__(self) -> str:
        head = f"Chat with {self.name}" if self.name else "Chat"
        return "\n\n".join([head, *(line for turn in self.turns for line in _lines(turn))])

    def _ipython_display_(self) -> None:
        if self._show is not None:
            self._show(self)
            return
        from IPython.display import display

        display({"text/plain": repr(self)}, raw=True)  # type: ignore[no-untyped-call]


def _listed(callbacks: list[_F], callback: _F) -> Callable[[], None]:
    """Add a callback, and return what takes it away again."""
    callbacks.append(callback)

    def remove() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return remove


def _rounds(events: Sequence[Event]) -> tuple[Rounds, tuple[tuple[int, int], ...]]:
    """Return the rounds of a turn, and the characters of reasoning and content before each."""
    rounds: list[Round] = []
    marks: list[tuple[int, int]] = []
    reasoning = content = 0
    before: tuple[int, int] | None = None  # where the round that goes on began
    for event in events:
        if isinstance(event, Token):
            reasoning += len(event.text) * (event.channel == "reasoning")
            content += len(event.text) * (event.channel == "content")
            if before is None and event.id is not None:
                before = reasoning, content  # a run's first token comes before its first round
        elif isinstance(event, Round):
            rounds.append(event)
            marks.append(before or (reasoning, content))
            before = reasoning, content
        elif isinstance(event, PromptUsage):
            before = None
    return Rounds(rounds), tuple(marks)


def _cut(message: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return a reply with the text that is left of it."""
    cut = {name: value for name, value in message.items() if name != "reasoning_content"}
    cut["content"] = turn.text
    if turn.reasoning:
        cut["reasoning_content"] = turn.reasoning
    return cut


def _open_calls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the calls that a history ends with."""
    last = messages[-1] if messages else {}
    return [call["id"] for call in last.get("tool_calls", ())]


def _lines(turn: Turn) -> list[str]:
    """Return a turn as a person reads it."""
    mark = {"cancelled": "[Stopped]", "length": "[Reached the token limit]"}.get(turn.stop_reason or "", "")
    if turn.error is not None:
        mark = f"[Failed: {turn.error}]"
    lines = [f"You: {turn.user}"]
    if turn.reasoning:
        lines.append("[Thoughts]\n" + "\n".join(f"  {line}" for line in turn.reasoning.splitlines()))
    results = {result.id: result for result in turn.results}
    for call in turn.calls:
        result = results.get(call.id)
        arguments = result.arguments if result and result.arguments else call.arguments
        lines.append(f"[Call] {call.name}({arguments}){f' → {result.content}' if result else ''}")
    if turn.text or not (mark or turn.tool):
        lines.append(f"Model: {turn.text}")
    return [*lines, mark] if mark else lines
