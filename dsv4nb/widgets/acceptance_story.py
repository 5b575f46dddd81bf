"""The rounds that an acceptance panel shows, with the text that each of them found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsv4nb.events import Done, Event, Failed, PromptUsage, Token
from dsv4nb.rounds import Round
from dsv4nb.rounds.records import by_reply
from dsv4nb.session.thoughts import Apart
from dsv4nb.stream import transcript
from dsv4nb.stream.frames import Pollable

PLAIN = "No rounds: this reply was not speculated."
STOPPED = "No rounds: this reply was stopped before its first one."

Piece = tuple[str, str]  # reasoning and content


class TurnLike(transcript.TurnLike, Protocol):
    """What a chat remembers of a turn, and where its rounds began; `dsv4nb.session.tree.Turn` is one."""

    @property
    def marks(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(slots=True, kw_only=True)
class Story:
    """One reply, or rounds of several.

    Attributes:
        label: what was asked, "" where nobody knows.
        replies: per round, which reply it is of, from 0.
        before: per round, the text between the round before it, or the beginning, and it.
        note: why there are no rounds, or how the reply failed; "" when there is nothing to say.
        turn: of the chat, None when it has not ended or there is no chat.
    """

    label: str = ""
    rounds: list[Round] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)
    before: list[Piece] = field(default_factory=list)
    note: str = ""
    turn: TurnLike | None = None
    is_live: bool = False

    @property
    def mode(self) -> str:
        """exact or rejection; exact before the first round."""
        return self.rounds[0].mode if self.rounds else "exact"


def story_of_turn(turn: TurnLike) -> Story:
    """Return what a chat wrote down."""
    ends = [(0, 0), *turn.marks]
    before = [(turn.reasoning[r0:r1], turn.text[c0:c1]) for (r0, c0), (r1, c1) in zip(ends, turn.marks, strict=False)]
    story = _story_of(turn.rounds, before, turn.user)
    story.turn = turn
    if turn.error is not None:
        story.note = f"Failed: {turn.error}"
    elif not turn.rounds and turn.stop_reason == "cancelled":
        story.note = STOPPED
    return story


def story_of_rounds(rounds: Sequence[Round], label: str = "") -> Story:
    """Return rounds alone: the text before each is that of the tokens they tell of, from the first pending one on."""
    before: list[Piece] = []
    last: Round | None = None
    for round in rounds:
        is_first = last is None or round.round <= last.round
        before.append(("", round.pending.text if is_first else _added(last)))
        last = round
    return _story_of(rounds, before, label)


def _story_of(rounds: Sequence[Round], before: list[Piece], label: str) -> Story:
    replies = [reply for reply, _ in by_reply(rounds)]
    return Story(label=label, rounds=list(rounds), replies=replies, before=before, note="" if rounds else PLAIN)


def _added(round: Round | None) -> str:
    """The text of the tokens that a round added."""
    if round is None:
        return ""
    texts = [draft.text for draft in round.drafts[: round.accepts]]
    texts += [] if round.next is None else [round.next.text]
    return "".join(texts[: round.emitted])


class Reader:
    """Reads a run into its story, from where it stopped reading."""

    def __init__(self, ticket: Pollable, label: str = "") -> None:
        self.shown = Story(label=label, is_live=True)
        self._ticket, self._seen = ticket, 0
        self._apart = Apart()
        # text since the last round began: up to where the next one begins, and behind it
        self._settled: tuple[list[str], list[str]] = ([], [])
        self._loose: tuple[list[str], list[str]] = ([], [])
        self._is_marked, self._n_given = False, 0

    def read(self) -> None:
        """Take in what is new."""
        events, is_over = self._ticket.poll(self._seen)
        self._seen += len(events)
        for event in map(self._apart, events):
            self._take(event)
        self.shown.is_live = not is_over
        if is_over and not (self.shown.rounds or self.shown.note):
            self.shown.note = PLAIN

    def _take(self, event: Event) -> None:
        match event:
            case Token():
                if event.channel in ("reasoning", "content"):
                    self._loose[event.channel == "content"].append(event.text)
                if not self._is_marked and event.id is not None:
                    if self._n_given == 0:
                        self._mark()  # what was given and a run's first token come before its first round
                    self._n_given -= 1
            case Round():
                if not self._is_marked:
                    self._mark()
                reasoning, content = self._settled
                self.shown.replies.append(self._reply(event))
                self.shown.rounds.append(event)
                self.shown.before.append(("".join(reasoning), "".join(content)))
                self._settled = ([], [])
                self._mark()
            case PromptUsage():
                self._is_marked, self._n_given = False, event.n_given
            case Done() if event.spec_note:
                self.shown.note = event.spec_note
            case Failed():
                self.shown.note = f"Failed: {event.message}"
            case _:
                pass

    def _reply(self, round: Round) -> int:
        if not self.shown.rounds:
            return 0
        return self.shown.replies[-1] + (round.round <= self.shown.rounds[-1].round)

    def _mark(self) -> None:
        """The next round begins here, as far as is known."""
        for settled, loose in zip(self._settled, self._loose, strict=True):
            settled += loose
        self._loose, self._is_marked = ([], []), True
