"""The queue as values: who waits, how far who runs has come, and who was here."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from dsv4nb.events import Done, Failed, PromptProgress, PromptUsage, Token
from dsv4nb.session.journal import Journal
from dsv4nb.session.log import State
from dsv4nb.session.timings import FIRST_TOKEN

SHORT = 80  # characters of a prompt that tell a person which request it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One request that has not ended.

    Attributes:
        id: counts the requests of a model from 1 on.
        about: the beginning of the last message, "" of a prompt given as ids.
        waited_s: since it was submitted.
        n_read: prompt tokens in the caches, reused ones included.
        n_tokens: of the reply so far.
        tokens_per_s: since the first token; None before the second.
    """

    id: int
    state: State
    about: str
    n_prompt: int
    waited_s: float
    n_read: int
    n_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One request that has ended.

    Attributes:
        queue_s: from the end of its checks to its start, or to its end when it never started.
        run_s: from its start to its end.
        n_cached: prompt tokens that were not computed again.
        tokens_per_s: of the tokens after the first; None when there are none.
        outcome: the stop reason, or the error's message.
    """

    id: int
    state: State
    about: str
    n_prompt: int
    n_cached: int
    queue_s: float
    run_s: float
    n_tokens: int
    tokens_per_s: float | None
    outcome: str


class Tally:
    """Counts what a request has come to, on the thread of whoever asks."""

    def __init__(self, number: int, journal: Journal) -> None:
        self.number, self.journal = number, journal
        self.about = _about(journal)
        self._lock = threading.Lock()
        self._seen = self._n_read = self._n_tokens = self._n_cached = 0
        self._last: object = None

    def waiting(self) -> Waiting:
        """Return how far the request has come."""
        journal = self.journal
        now = time.monotonic()
        with self._lock:
            self._count()
            return Waiting(
                id=self.number,
                state=journal.state,
                about=self.about,
                n_prompt=len(journal.request.prompt),
                waited_s=now - journal.submitted_at,
                n_read=self._n_read,
                n_tokens=self._n_tokens,
                tokens_per_s=_rate(self._n_tokens, journal.marks.since(FIRST_TOKEN, now)),
            )

    def past(self) -> Past:
        """Return what it came to; it has ended."""
        journal = self.journal
        with self._lock:
            self._count()
            done = self._last
            if isinstance(done, Done):
                queue_s, run_s = done.queue_s, done.elapsed_s - done.timings.prepare_s
                decode_s, n_tokens = done.timings.decode_s, done.n_tokens
            else:  # a failure has no timings of its own; it is asked for as it happens
                now = time.monotonic()
                queue_s, run_s = journal.started_at - journal.submitted_at, now - journal.started_at
                decode_s, n_tokens = journal.marks.since(FIRST_TOKEN, now), self._n_tokens
            return Past(
                id=self.number,
                state=journal.state,
                about=self.about,
                n_prompt=len(journal.request.prompt),
                n_cached=self._n_cached,
                queue_s=queue_s,
                run_s=run_s,
                n_tokens=n_tokens,
                tokens_per_s=_rate(n_tokens, decode_s),
                outcome=_outcome(done),
            )

    def _count(self) -> None:
        events, _ = self.journal.poll(self._seen)
        self._seen += len(events)
        self._last = events[-1] if events else self._last
        for event in events:
            match event:
                case Token():
                    self._n_tokens += event.id is not None
                    self._n_read = len(self.journal.request.prompt)
                case PromptProgress():
                    self._n_read = event.done
                case PromptUsage():
                    self._n_read = self._n_cached = event.n_cached


def _outcome(last: object) -> str:
    match last:
        case Done():
            return last.stop_reason
        case Failed():
            return last.message
    return ""


def _rate(n_tokens: int, seconds: float | None) -> float | None:
    return None if n_tokens < 2 or not seconds else (n_tokens - 1) / seconds


def _about(journal: Journal) -> str:
    messages = journal.request.messages
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        return ""
    line = " ".join(content[: 4 * SHORT].split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"
