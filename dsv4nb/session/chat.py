"""A conversation: its turns, and the door through which the next one is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, Unpack

from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.events import Generation, StopReason
from dsv4nb.session.job import Outcome
from dsv4nb.session.request import Message, RequestOptions, given_options

_NOT_HERE = ("messages", "prompt_ids")


class TicketLike(Protocol):
    """What a chat asks of a submitted request; `stream.ticket.Ticket` is one."""

    def result(self, timeout: float | None = None) -> Generation: ...
    async def aresult(self) -> Generation: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def cancel(self) -> None: ...


TicketT = TypeVar("TicketT", bound=TicketLike)
TicketT_co = TypeVar("TicketT_co", bound=TicketLike, covariant=True)


class Door(Protocol[TicketT_co]):
    """Submits a request; `on_end` hears the outcome before anybody else can see it."""

    def __call__(self, options: Mapping[str, Any], on_end: Callable[[Outcome], None], /) -> TicketT_co: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and what came back.

    Attributes:
        tool: calls, as the model wrote them.
        stop_reason: None when it failed.
        seconds: render, prefill and decode.
        error: why it failed, None otherwise.
        reply: the assistant's message, None when it failed: a failed turn is shown and not remembered.
    """

    user: str
    reasoning: str = ""
    text: str = ""
    tool: str = ""
    stop_reason: StopReason | None = None
    n_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None
    reply: Message | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody stopped it; its text is what had been shown."""
        return self.stop_reason == "cancelled"


class Chat(Generic[TicketT]):
    """A conversation with one model; one turn runs at a time.

    What it remembers is exactly what was shown: a stopped turn keeps its partial text, a failed one is left out of the
    next prompt. Every turn is rendered from the start.

    Args:
        name: the model's.
        door: submits the turns.
        options: of every turn, the keywords of `generate`; a turn's own go before.
        show: displays the chat in a notebook, on the thread that runs the cell.

    Attributes:
        thinking: whether the next turn reasons before it answers.
    """

    def __init__(
        self,
        name: str,
        door: Door[TicketT],
        options: Mapping[str, Any],
        show: Callable[[Chat[TicketT]], None] | None = None,
    ) -> None:
        own = given_options(options)
        _refuse_input(own)
        self.name = name
        self.thinking = bool(own.pop("thinking", own.get("effort") is not None))
        self._options = own
        self._door = door
        self._show = show
        self._lock = threading.RLock()
        self._turns: list[Turn] = []
        self._live: TicketT | None = None
        self._is_busy = False
        self._callbacks: list[Callable[[str, TicketT], None]] = []

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns that are over."""
        with self._lock:
            return tuple(self._turns)

    @property
    def messages(self) -> list[Message]:
        """The conversation as the next turn will render it, OpenAI-shaped."""
        with self._lock:
            system = self._options.get("system")
            messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
            for turn in self._turns:
                if turn.reply is not None:
                    messages += [{"role": "user", "content": turn.user}, turn.reply]
            return messages

    @property
    def is_running(self) -> bool:
        """Whether a turn is under way."""
        return self._is_busy

    def submit(self, text: str, **options: Unpack[RequestOptions]) -> TicketT:
        """Ask the next turn and return at once.

        Raises:
            ChatBusy: a turn is running.
            RequestError: the turn was refused; the conversation is as it was.
        """
        given = given_options(options)
        _refuse_input(given)
        if not isinstance(text, str) or not text.strip():
            raise RequestError("the message is empty; write at least one character", param="text")
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            asked = {"thinking": self.thinking, **self._options, **given}
            asked["messages"] = [*self.messages, {"role": "user", "content": text}]
            if "system" in given:
                asked["messages"] = asked["messages"]["system" in self._options :]
            else:
                asked.pop("system", None)
            self._is_busy = True
            try:
                ticket = self._live = self._door(asked, lambda outcome: self._ended(text, outcome))
            except BaseException:
                self._is_busy = False
                raise
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback(text, ticket)
        return ticket

    def send(self, text: str, **options: Unpack[RequestOptions]) -> Generation:
        """Ask the next turn and wait for it; an interrupt stops it and keeps its text in `turns`."""
        return self.submit(text, **options).result()

    async def asend(self, text: str, **options: Unpack[RequestOptions]) -> Generation:
        """Ask the next turn and await it; cancelling the task stops it."""
        return await self.submit(text, **options).aresult()

    def stop(self) -> None:
        """Stop the running turn, if there is one; its text is kept."""
        live = self._live
        if self._is_busy and live is not None:
            live.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no turn is running; False when that took too long."""
        live = self._live
        return live is None or live.wait(timeout)

    def reset(self) -> None:
        """Forget all turns.

        Raises:
            ChatBusy: a turn is running.
        """
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._turns.clear()

    def on_submit(self, callback: Callable[[str, TicketT], None]) -> None:
        """Call `callback` with the text and the ticket of every turn, on the thread that submits it."""
        self._callbacks.append(callback)

    def _ended(self, user: str, outcome: Outcome) -> None:
        with self._lock:
            self._turns.append(_turn_of(user, outcome))
            self._is_busy = False

    def _ipython_display_(self) -> None:
        if self._show is None:
            print(self)  # noqa: T201
        else:
            self._show(self)

    def __repr__(self) -> str:
        n = len(self._turns)
        return f"Chat with {self.name}: {n} turn{'s' * (n != 1)}"


def _refuse_input(given: Mapping[str, Any]) -> None:
    for name in _NOT_HERE:
        if name in given:
            raise RequestError(f"{name} has no place in a chat, which holds its own messages", param=name)


def _turn_of(user: str, outcome: Outcome) -> Turn:
    if not isinstance(outcome, Generation):
        return Turn(user=user, error=str(outcome))
    return Turn(
        user=user,
        reasoning=outcome.reasoning,
        text=outcome.text,
        tool=outcome.tool,
        stop_reason=outcome.stop_reason,
        n_tokens=outcome.done.n_tokens,
        seconds=outcome.done.elapsed_s,
        reply=dict(outcome.messages[-1]) if outcome.messages else {"role": "assistant", "content": ""},
    )
