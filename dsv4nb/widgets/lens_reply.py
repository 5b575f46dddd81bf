"""The tokens that a lens shows: what the model thought of each, and how it came about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from dsv4nb.events import Event, Failed, Generation, PromptUsage, Token, TokenLogprob
from dsv4nb.rounds import Round, Rounds
from dsv4nb.session.tree import Turn
from dsv4nb.stream.frames import Pollable
from dsv4nb.widgets import protocol

Made = Literal["plain", "given", "first", "accepted", "correction", "bonus"]

N_TOP = 5  # alternatives that a lens asks for
_NO_TOKEN = -1

FAILED = "Failed: {}"
NO_IDS = "The token ids of this turn are not known: it came as text."
LAST_RUN = "This turn made calls; shown is its last run."


class Texts(Protocol):
    """Reads token ids; a model does."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(slots=True, kw_only=True)
class Reply:
    """One reply, growing while it is made.

    Attributes:
        label: what was asked.
        made: how each token came about, as many as `ids`.
        scores: of the first tokens, or of all; of none until they are computed.
        note: what there is to say about it, "" for nothing.
        turn: of the chat, None while it runs or when there is no chat.
        prompt: the ids it answered, where they are known.
    """

    label: str = ""
    ids: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    note: str = ""
    turn: Turn | None = None
    prompt: tuple[int, ...] = ()
    is_live: bool = False

    @property
    def is_scored(self) -> bool:
        """Whether the log-probability of every token is known."""
        return len(self.scores) == len(self.ids)


def reply_of_turn(turn: Turn) -> Reply:
    """Return what a chat wrote down."""
    reply = Reply(label=turn.user, ids=list(turn.ids), scores=list(turn.logprobs), turn=turn)
    n_prompt = turn.runs[-1].n_prompt - turn.n_given if turn.runs else 0
    reply.made = _made(len(turn.ids), turn.n_given, n_prompt, _last_run(turn.rounds))
    if turn.error is not None:
        reply.note = FAILED.format(turn.error)
    elif not turn.ids:
        reply.note = NO_IDS if turn.text or turn.reasoning else ""
    elif turn.calls:
        reply.note = LAST_RUN
    return reply


def reply_of_result(result: Generation) -> Reply:
    """Return a finished result; of a turn with calls, its last run."""
    asked = [message for message in result.messages if message["role"] == "user"]
    return Reply(
        label=str(asked[-1]["content"]) if asked else "",
        ids=list(result.ids),
        made=_made(len(result.ids), len(result.recipe.given), len(result.recipe.prompt), result.rounds),
        scores=list(result.logprobs),
        note=LAST_RUN if len(result.steps) > 1 else "",
        prompt=result.recipe.prompt,
    )


def _last_run(rounds: Rounds) -> Sequence[Round]:
    """The rounds of the last of several runs."""
    first = max((i for i, one in enumerate(rounds) if one.round == 0), default=0)
    return rounds[first:]


def _made(n: int, n_given: int, n_prompt: int, rounds: Sequence[Round]) -> list[Made]:
    made: list[Made] = ["given" if i < n_given else "first" if rounds else "plain" for i in range(n)]
    for one in rounds:
        _mark(made, one, n_prompt)
    return made


def _mark(made: list[Made], round: Round, n_prompt: int) -> int:
    """Say of the tokens of a round how they came about; return the place of the first."""
    first = round.start + 1 - n_prompt
    for i in range(min(round.emitted, len(made) - first)):
        made[first + i] = "accepted" if i < round.accepts else (round.kind or "accepted")
    return first


class Reader:
    """Reads a run into its reply, from where it stopped reading.

    Attributes:
        n_runs: that have begun; with another one the reply begins anew.
        changed_from: the first token of which something has changed since `read` was called before.
    """

    def __init__(self, ticket: Pollable, label: str = "") -> None:
        self.shown = Reply(label=label, is_live=True)
        self.n_runs = 0
        self.changed_from = 0
        self._ticket, self._seen, self._n_prompt, self._n_given = ticket, 0, 0, 0

    def read(self) -> None:
        """Take in what is new."""
        self.changed_from = len(self.shown.ids)
        events, is_over = self._ticket.poll(self._seen)
        self._seen += len(events)
        for event in events:
            self._take(event)
        self.shown.is_live = not is_over

    def _take(self, event: Event) -> None:
        reply = self.shown
        match event:
            case PromptUsage():
                self._n_given, self._n_prompt = event.n_given, event.n_prompt - event.n_given
                self.n_runs += 1
                reply.ids, reply.made, reply.scores = [], [], []
                reply.note = LAST_RUN if self.n_runs > 1 else ""
                self.changed_from = 0
            case Token() if event.id is not None:
                reply.made.append("given" if len(reply.ids) < self._n_given else "plain")
                reply.ids.append(event.id)
                if event.logprob is not None:
                    reply.scores.append(event.logprob)
            case Round():
                first = _mark(reply.made, event, self._n_prompt)
                if event.round == 0 and 0 < first <= len(reply.made):
                    first -= 1
                    reply.made[first] = "first"
                self.changed_from = min(self.changed_from, first)
            case Failed():
                reply.note = FAILED.format(event.message)
            case _:
                pass


# what travels


def arrays_of(reply: Reply, first: int) -> tuple[int, int, list[memoryview]]:
    """Return the tokens from `first` on as buffers.

    Returns:
        (n, k, buffers) of n tokens with k alternatives each, little-endian: ids int32 [n], how they came about
        uint8 [n], logprobs float32 [n], entropies float32 [n], ranks int32 [n], ids of the alternatives int32 [n, k],
        their logprobs float32 [n, k]. Where nothing is known a logprob is a NaN, a rank 0, an alternative -1.
    """
    ids, made = reply.ids[first:], reply.made[first:]
    scores = reply.scores[first:]
    n, k = len(ids), max((len(one.top) for one in scores), default=0)
    logprobs, entropies = np.full((2, n), math.nan, "<f4")
    ranks = np.zeros(n, "<i4")
    top_ids, top_logprobs = np.full((n, k), _NO_TOKEN, "<i4"), np.full((n, k), math.nan, "<f4")
    for i, one in enumerate(scores):
        logprobs[i], entropies[i], ranks[i] = one.logprob, one.entropy, one.rank
        for j, (token, logprob) in enumerate(one.top):
            top_ids[i, j], top_logprobs[i, j] = token, logprob
    told = (
        np.array(ids, "<i4"),
        np.array([protocol.MADE.index(one) for one in made], np.uint8),
        *(logprobs, entropies, ranks, top_ids, top_logprobs),
    )
    return n, k, [array.ravel().data.cast("B") for array in told if array.nbytes]


class Spelling:
    """The texts of ids, each told once to those who listen."""

    def __init__(self, texts: Texts) -> None:
        self._decode = texts.decode
        self._known: dict[int, str] = {}
        self._told: set[int] = set()

    def text(self, token: int) -> str:
        """Return the text of one token; a part of a character is U+FFFD."""
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def fresh(self, reply: Reply, first: int, *, all_again: bool = False) -> list[tuple[int, str]]:
        """Return (id, text) of what the tokens from `first` on hold and was not told yet."""
        if all_again:
            self._told.clear()
        met = dict.fromkeys(reply.ids[first:])
        for one in reply.scores[first:]:
            met |= dict.fromkeys(token for token, _ in one.top)
        new = [token for token in met if token not in self._told]
        self._told.update(new)
        return [(token, self.text(token)) for token in new]


# what it comes to


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What the scores of a reply add up to.

    Attributes:
        n: tokens that count: those that were given do not.
        perplexity: e to the mean of what each token cost, None without tokens.
        entropy: mean, nats.
        lowest: places of the least likely tokens, the least likely first.
    """

    n: int
    perplexity: float | None
    entropy: float | None
    lowest: tuple[int, ...]


def sums_of(reply: Reply, most: int = 5) -> Sums:
    """Return the sums over the tokens that the model chose."""
    places = [i for i, made in enumerate(reply.made[: len(reply.scores)]) if made != "given"]
    if not places:
        return Sums(n=0, perplexity=None, entropy=None, lowest=())
    logprobs = [reply.scores[i].logprob for i in places]
    lowest = sorted(places, key=lambda i: (reply.scores[i].logprob, i))[:most]
    return Sums(
        n=len(places),
        perplexity=math.exp(min(-sum(logprobs) / len(places), 700.0)),
        entropy=sum(reply.scores[i].entropy for i in places) / len(places),
        lowest=tuple(lowest),
    )


Visible: Mapping[str, str] = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def visible(text: str, blank: Callable[[str], str] = lambda mark: mark) -> str:
    """Return a token's text with marks for its white space."""
    return "".join(blank(Visible[one]) if one in Visible else one for one in text) or "∅"
