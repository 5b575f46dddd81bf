"""A conversation: turns, one at a time, and the history that the next one is rendered from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from dsv4nb.errors import ChatBusy, PromptEmpty, RequestError
from dsv4nb.events import Event, Failed, Generation, StopReason, ToolCall, ToolResult
from dsv4nb.session.log import OnEnd
from dsv4nb.session.request import Options, override
from dsv4nb.session.result import joined
from dsv4nb.session.tool_text import result_text


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
        self, messages: Sequence[Mapping[str, Any]], options: Options, on_end: OnEnd, *, inline: bool
    ) -> Ticket: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and what came back.

    Attributes:
        tool: calls, as the model wrote them; `calls` and `results` are their values.
        stop_reason: None when it failed; "cancelled" when it was stopped, with the text so far.
        error: why it failed; such a turn is not part of the history.
    """

    user: str
    reasoning: str = ""
    text: str = ""
    tool: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    stop_reason: StopReason | None = None
    n_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a turn adds to the history before the model answers."""

    messages: tuple[dict[str, Any], ...]
    text: str = ""


class Chat:
    """A conversation with one model; every turn is rendered from the history and run on a fresh state.

    The history holds exactly what was shown: a turn that was stopped stays with its partial text, a turn that
    failed leaves it as it was.

    Args:
        start: runs a conversation.
        name: of the model, for people.
        options: of every turn; a turn can override them.
        show: displays a chat in a notebook, text when None.

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
    ) -> None:
        self._options = options or Options()
        self.name = name
        self.thinking = self._options.thinking
        self._start, self._show = start, show
        self._lock = threading.Lock()
        self._is_busy = False
        self._ticket: Ticket | None = None
        self._turns: tuple[Turn, ...] = ()
        self._messages: tuple[dict[str, Any], ...] = ()
        self._callbacks: list[Callable[[str, Any], None]] = []

    @property
    def turns(self) -> list[Turn]:
        """The turns that ended, failed ones included."""
        return list(self._turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as messages, the system message in front."""
        system = self._options.system
        front = [] if system is None else [{"role": "system", "content": system}]
        return [*front, *map(dict, self._messages)]

    @property
    def is_busy(self) -> bool:
        """Whether a turn is queued or running."""
        return self._is_busy

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
        return self._start_turn(_Told(messages=self._results(results)), options, inline=True).result()

    def _submit(self, text: str, options: Mapping[str, Any], *, inline: bool) -> Ticket:
        if not isinstance(text, str):
            raise RequestError(f"a message must be text, not {type(text).__name__}", param="text")
        if not text:
            raise PromptEmpty("text")
        if self._open_calls():
            ids = ", ".join(self._open_calls())
            raise RequestError(f"the last turn waits for results of {ids}; chat.send_results takes them", param="text")
        return self._start_turn(_Told(text=text, messages=({"role": "user", "content": text},)), options, inline=inline)

    def _start_turn(self, told: _Told, options: Mapping[str, Any], *, inline: bool) -> Ticket:
        chosen = override(replace(self._options, thinking=self.thinking), options, "chat.send()")
        if not chosen.thinking and "effort" not in options:
            chosen = replace(chosen, effort=None)  # the chat's effort is that of its thinking turns
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._is_busy = True
            before = self._messages
        try:
            sent = (*before, *told.messages)
            ticket = self._start(sent, chosen, partial(self._ended, told.text, len(sent)), inline=inline)
        except BaseException:
            self._is_busy = False
            raise
        self._ticket = ticket
        for callback in tuple(self._callbacks):
            callback(told.text, ticket)
        return ticket

    def _open_calls(self) -> dict[str, str]:
        """Return id -> name of the calls that the history ends with."""
        last = self._messages[-1] if self._messages else {}
        return {call["id"]: call["function"]["name"] for call in last.get("tool_calls", ())}

    def _results(self, results: Mapping[str, object]) -> tuple[dict[str, Any], ...]:
        wanted = self._open_calls()
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
            self._turns, self._messages, self._ticket = (), (), None

    def on_submit(self, callback: Callable[[str, Any], None]) -> Callable[[], None]:
        """Call `callback(text, ticket)` whenever a turn starts, on the thread that started it.

        Returns:
            A function that ends this.
        """
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def _ended(self, text: str, n_sent: int, outcome: Generation | Failed, events: Sequence[Event]) -> None:
        """Write the turn down; called before its ticket is finished, on the thread that ends it."""
        turn = Turn(
            user=text,
            reasoning=joined(events, "reasoning"),
            text=joined(events, "content"),
            tool=joined(events, "tool"),
            calls=tuple(event for event in events if isinstance(event, ToolCall)),
            results=tuple(event for event in events if isinstance(event, ToolResult)),
        )
        with self._lock:
            if isinstance(outcome, Failed):
                turn = replace(turn, error=outcome.message)
            else:
                runs = outcome.steps or (outcome,)
                turn = replace(
                    turn,
                    stop_reason=outcome.stop_reason,
                    n_tokens=sum(run.done.n_tokens for run in runs),
                    seconds=sum(run.done.elapsed_s for run in runs),
                )
                said = [m for m in outcome.messages if m["role"] != "system"]
                self._messages = tuple(said) if len(said) > n_sent else self._messages
            self._turns = (*self._turns, turn)
            self._is_busy = False

    def __repr__(self) -> str:
        head = f"Chat with {self.name}" if self.name else "Chat"
        return "\n\n".join([head, *(line for turn in self._turns for line in _lines(turn))])

    def _ipython_display_(self) -> None:
        if self._show is not None:
            self._show(self)
            return
        from IPython.display import display

        display({"text/plain": repr(self)}, raw=True)  # type: ignore[no-untyped-call]


def _lines(turn: Turn) -> list[str]:
    """Return a turn as a person reads it."""
    mark = {"cancelled": "[Stopped]", "length": "[Reached the token limit]"}.get(turn.stop_reason or "", "")
    if turn.error is not None:
        mark = f"[Failed: {turn.error}]"
    lines = [f"You: {turn.user}"]
    if turn.reasoning:
        lines.append("[Thoughts]\n" + "\n".join(f"  {line}" for line in turn.reasoning.splitlines()))
    results = {result.id: result.content for result in turn.results}
    for call in turn.calls:
        answer = f" → {results[call.id]}" if call.id in results else ""
        lines.append(f"[Call] {call.name}({call.arguments}){answer}")
    if turn.text or not (mark or turn.tool):
        lines.append(f"Model: {turn.text}")
    return [*lines, mark] if mark else lines
