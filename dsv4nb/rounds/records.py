"""The record of speculation: what each round drafted and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dsv4nb.config import SpecMode, SpecProposal
from dsv4nb.tables import as_html, as_text, percent

DraftStatus = Literal["accepted", "rejected", "unreached", "not_verified", "past_stop"]
RoundKind = Literal["correction", "bonus"]
RoundStop = Literal["eos", "stop_string", "budget", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A token and where it stands.

    Attributes:
        pos: absolute, the prompt counted.
    """

    id: int
    text: str
    pos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One drafted token of a round. Its probabilities are of the raw rows, before any setting of the request.

    Attributes:
        pos: absolute, the prompt counted.
        conf_logit: what the drafter's confidence head says of its own draft, None when it has none; `conf` the same
            in [0, 1]: how likely the draft survives, given that those before it did.
        survival: product of the confidences up to this one.
        margin: between the drafter's best logit and its second, None when the drafter tells no logits.
        q: the drafter's probability of this token, None likewise.
        p: the model's, None where its row was not run.
        target_choice: what the model chose in this place, None where nothing was chosen.
        status: unreached stands behind a rejected draft; not_verified was cut by the window, the depth or the budget;
            past_stop was run and stands behind the end of the reply.
    """

    id: int
    text: str
    pos: int
    conf_logit: float | None
    conf: float | None
    survival: float | None
    margin: float | None
    q: float | None
    p: float | None
    target_choice: int | None
    status: DraftStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of speculation: some drafts, one verify forward. A route without a drafter has none.

    Attributes:
        round: number in its reply, from 0.
        start: position of the pending token, whose row is the first of the forward.
        pending: that token.
        drafts: all that were drafted, those that were not run included.
        vt_drafts: drafts that the confidence window lets pass.
        t_cap: rows that drafts, window, depth and room allow.
        t_batch: rows that were run, the pending token's included; fewer than `t_cap` where the budget cut the round.
        accepts: drafts that were accepted. Behind a stop string and the budget there may be some more than the reply
            took; behind an end token nothing is judged.
        next: the token that the model chose behind them, which the next round starts from; None when the reply ended
            before it.
        kind: correction: a draft was rejected, and the model's own choice stands in its place; bonus: every verified
            draft was accepted; None: an accepted draft ended the reply, and those behind it were not judged.
        emitted: tokens that the reply grew by. The reply's first token comes before its first round.
        stop: what ended the reply in this round, None when it went on.
        mode, proposal: as in `SpecConfig`.
        ms: what it took, of "draft", "verify", "commit" and "total".
        plain_ms: what one token takes on the plain route, as far as it was measured.
        window_reason: what bounded the rows, in words.
    """

    round: int
    start: int
    pending: Placed
    drafts: tuple[Draft, ...]
    vt_drafts: int
    t_cap: int
    t_batch: int
    accepts: int
    next: Placed | None
    kind: RoundKind | None
    emitted: int
    stop: RoundStop | None
    mode: SpecMode
    proposal: SpecProposal
    ms: Mapping[str, float]
    plain_ms: float | None
    window_reason: str

    @property
    def verified(self) -> int:
        """Drafts that the forward ran."""
        return max(0, self.t_batch - 1)

    def grid(self) -> list[list[str]]:
        """Return the round as a table, a row per token; the first row names the columns."""
        rows = [["", "token", "confidence", "q", "p", "the model chose", ""]]
        rows.append([str(self.pending.pos), repr(self.pending.text), "", "", "", "", "pending"])
        for draft in self.drafts:
            chosen = {"accepted": draft.text, "rejected": self.next.text if self.next else None}.get(draft.status)
            rows.append(
                [
                    str(draft.pos),
                    repr(draft.text),
                    *map(percent, (draft.conf, draft.q, draft.p)),
                    "" if chosen is None else repr(chosen),
                    draft.status.replace("_", " "),
                ]
            )
        if self.next is not None:
            rows.append([str(self.next.pos), repr(self.next.text), "", "", "", "", f"next, a {self.kind}"])
        return rows

    def __str__(self) -> str:
        return as_text((), self.grid())

    def _repr_html_(self) -> str:
        return as_html((), self.grid())

    @property
    def judged(self) -> int:
        """Of these, the drafts that could be accepted: without those behind an end token."""
        return self.accepts if self.kind is None else self.verified


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecUsage:
    """What speculation came to in one request.

    Attributes:
        drafted: drafts that were verified.
    """

    rounds: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> SpecUsage | None:
        """Return the sums, None when nothing was speculated."""
        if not rounds:
            return None
        verified, accepted = sum(r.verified for r in rounds), sum(r.accepts for r in rounds)
        return cls(rounds=len(rounds), drafted=verified, accepted=accepted)


def by_reply(rounds: Sequence[Round]) -> Iterator[tuple[int, Round]]:
    """Number the replies of pooled rounds, from 0: one begins where the number of the round does not grow."""
    reply, last = -1, None
    for round in rounds:
        if last is None or round.round <= last:
            reply += 1
        last = round.round
        yield reply, round
