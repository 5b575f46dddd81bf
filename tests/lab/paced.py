"""A chat that answers by rote at a steady pace, for the notebooks of these tests; copied beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import Dsv4Error
from dsv4nb.events import Channel, Done, Event, PromptUsage, StopReason, Token

THOUGHT = "I add the ones: 7 + 8 = 15, carry 1. I add the tens: 4 + 3 + 1 = 8. So the sum is 85."
REPLIES = {
    "What is the capital of France?": ["The", " capital", " of", " France", " is", " Paris", "."],
    "What is 47 + 38?": ["47", " +", " 38", " =", " 85", "."],
    "Count from 1 to 100.": [f"{i}, " for i in range(1, 101)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedTurn:
    user: str
    reasoning: str
    text: str
    stop_reason: StopReason
    n_tokens: int
    seconds: float
    tool: str = ""
    error: None = None


class PacedTicket:
    def __init__(self, words: Sequence[tuple[Channel, str]], delay_s: float, ended: Callable[[PacedTicket], None]):
        self.state = "queued"
        self.events: list[Event] = []
        self.over = threading.Event()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, args=(words, delay_s, ended), daemon=True).start()

    def _run(self, words: Sequence[tuple[Channel, str]], delay_s: float, ended: Callable[[PacedTicket], None]) -> None:
        start = time.monotonic()
        self._stopped.wait(3 * delay_s)
        self.state = "running"
        self.events.append(PromptUsage(n_prompt=5, n_cached=0))
        for i, (channel, text) in enumerate(words):
            if self._stopped.wait(delay_s):
                break
            self.events.append(Token(id=i, text=text, channel=channel))
        is_stopped = self._stopped.is_set()
        self.events.append(
            Done(
                stop_reason="cancelled" if is_stopped else "stop",
                n_tokens=len(self.events) - 1,
                n_prompt=5,
                n_cached=0,
                queue_s=0.0,
                elapsed_s=time.monotonic() - start,
                config=SamplerConfig(),
            )
        )
        self.state = "cancelled" if is_stopped else "done"
        ended(self)
        self.over.set()

    def poll(self, start: int) -> tuple[list[Event], bool]:
        is_over = self.over.is_set()
        return self.events[start:], is_over

    def cancel(self) -> None:
        self._stopped.set()


class PacedChat:
    name = "toy"

    def __init__(self, delay_s: float = 0.03) -> None:
        self.thinking = False
        self.turns: list[PacedTurn] = []
        self._delay_s = delay_s
        self._ticket: PacedTicket | None = None
        self._callbacks: list[Callable[[str, Any], None]] = []

    def on_submit(self, callback: Callable[[str, Any], None]) -> None:
        self._callbacks.append(callback)

    def reset(self) -> None:
        self.turns.clear()

    def submit(self, text: str) -> PacedTicket:
        if self._ticket and not self._ticket.over.is_set():
            raise Dsv4Error("the chat is answering; stop it or wait")
        known = REPLIES.get(" ".join(text.split()))
        if known is None:
            raise Dsv4Error(f"{text!r} is none of the questions that were learnt by rote")
        words: list[tuple[Channel, str]] = [("content", word) for word in known]
        if self.thinking:
            words = [*(("reasoning", f"{word} ") for word in THOUGHT.split()), ("hidden", "</think>"), *words]

        def ended(ticket: PacedTicket) -> None:
            self.turns.append(_turn(text, ticket.events))

        self._ticket = PacedTicket(words, self._delay_s, ended)
        for callback in self._callbacks:
            callback(text, self._ticket)
        return self._ticket


def _turn(user: str, events: Sequence[Event]) -> PacedTurn:
    done = events[-1]
    assert isinstance(done, Done)
    said = [event for event in events if isinstance(event, Token)]
    return PacedTurn(
        user=user,
        reasoning="".join(token.text for token in said if token.channel == "reasoning"),
        text="".join(token.text for token in said if token.channel == "content"),
        stop_reason=done.stop_reason,
        n_tokens=done.n_tokens,
        seconds=done.elapsed_s,
    )
