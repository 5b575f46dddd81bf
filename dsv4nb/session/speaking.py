"""The tokens of one reply, one after the other or in rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dsv4nb.engine.accept import sigmoid
from dsv4nb.engine.logprobs import margin_of, probability_of
from dsv4nb.engine.protocol import Proposal, Row, Verified
from dsv4nb.engine.speculate import Choice, Played, Speculator, play
from dsv4nb.errors import DrafterFault
from dsv4nb.events import Draft, Placed, Round, Route, StopReason, TokenLogprob
from dsv4nb.rounds import DraftStatus, RoundStop
from dsv4nb.session.choosing import Chooser
from dsv4nb.session.emission import Emission
from dsv4nb.session.journal import Journal
from dsv4nb.session.live import Live
from dsv4nb.session.request import ChatTokens
from dsv4nb.session.timings import FIRST_TOKEN


class Speaking:
    """Goes on with a reply, by rounds as long as its request speculates and the drafter works.

    Attributes:
        rounds: played so far.
        note: why the reply became plain, "" when it did not.
    """

    def __init__(
        self,
        live: Live,
        chooser: Chooser,
        emission: Emission,
        journal: Journal,
        tokens: ChatTokens,
        speculator: Speculator,
    ) -> None:
        self.rounds: list[Round] = []
        self.note = ""
        self._live, self._chooser, self._emission, self._journal = live, chooser, emission, journal
        self._tokens, self._speculator = tokens, speculator
        self._spec = journal.request.spec
        if self._spec is not None and speculator.fault:
            self._give_up(speculator.fault)
        self._costs = None
        if self._spec is not None and self._spec.window == "auto":
            self._costs = speculator.measured()
        self._pending = -1

    @property
    def route(self) -> Route:
        """How the tokens were chosen: plain where no round was played because the drafter does not work."""
        request = self._journal.request
        if self.note and not self.rounds:
            return "plain_greedy" if request.config.is_greedy else "plain_sampled"
        return request.route

    def first(self, row: Row) -> None:
        """Choose the first token from the prompt's last row."""
        self._take(self._chooser.choose(row, self._live.pos))
        self._journal.marks.mark(FIRST_TOKEN)

    def go_on(self) -> None:
        """Run the pending token and choose what follows: one token, or a round of them."""
        if self._spec is not None:
            try:
                self._round()
                return
            except DrafterFault as error:
                self._speculator.fault = str(error)
                self._give_up(str(error))
        began = time.perf_counter()
        verified = self._live.step(self._pending, self._chooser.decides_by)
        if (token := verified.token(0)) is None:
            self._take(self._chooser.choose(verified.rows[0], self._live.pos))
        else:
            self._chooser.push(token)
            self._take(self._chooser.told(token, verified.rows, 0))
        self._speculator.saw_plain(1e3 * (time.perf_counter() - began))

    def _take(self, choice: Choice) -> None:
        self._pending = choice.token
        self._emission.accept((choice.token,), _logprobs((choice,)))

    def _give_up(self, fault: str) -> None:
        self._spec, self.note = None, f"plain: {fault}"

    def _round(self) -> None:
        assert self._spec is not None
        live, emission, start, pending = self._live, self._emission, self._live.pos, self._pending
        left = max(1, self._journal.request.max_new - len(emission.ids))
        began = time.perf_counter()
        played = play(live, pending, self._chooser, self._spec, costs=self._costs, tokens_left=left)
        tokens, before = played.tokens, len(emission.ids)
        end = emission.accept(tokens, _logprobs(played.choices))
        deciding = time.perf_counter()
        # as in single steps, the token that ended the reply is not run
        kept = (pending, *tokens[: min(end, len(tokens) - 1)])
        live.commit(kept, played.verified.rows)
        if end == len(tokens):
            for token in tokens:
                self._chooser.push(token)
            self._pending = tokens[-1]
        done = time.perf_counter()
        ms = {
            "draft": played.draft_ms,
            "verify": played.verify_ms,
            "commit": 1e3 * (done - deciding),
            "total": 1e3 * (done - began),
        }
        self._tell(played, start, pending, end, len(emission.ids) - before, ms)

    def _tell(self, played: Played, start: int, pending: int, end: int, emitted: int, ms: dict[str, float]) -> None:
        """Record a round; `end` is the place among its tokens of the one that ended the reply."""
        assert self._spec is not None
        tokens, plan = played.tokens, played.plan
        has_ended, last = end < len(tokens), len(tokens) - 1
        drafts = self._drafts(played, start, end if has_ended else None)
        is_behind = last == plan.t_batch - 1 or tokens[last] != drafts[last].id  # else it is an accepted end
        round = Round(
            round=len(self.rounds),
            start=start,
            pending=self._placed(pending, start),
            drafts=drafts,
            vt_drafts=plan.vt_drafts,
            t_cap=plan.t_cap,
            t_batch=plan.t_batch,
            accepts=last if is_behind else last + 1,
            next=self._placed(tokens[last], start + 1 + last) if is_behind and end >= last else None,
            kind="bonus" if last == plan.t_batch - 1 else "correction" if is_behind else None,
            emitted=emitted,
            stop=_stop(self._emission.stop_reason, tokens[end], self._chooser) if has_ended else None,
            mode=self._spec.mode,
            proposal=self._spec.proposal,
            ms=ms,
            plain_ms=self._speculator.plain_ms,
            window_reason=plan.reason,
        )
        self.rounds.append(round)
        self._journal.append(round)

    def _drafts(self, played: Played, start: int, end: int | None) -> tuple[Draft, ...]:
        proposal, tokens, survival = played.proposal, played.tokens, 1.0
        drafts = []
        for i, token in enumerate(proposal.ids):
            logit = proposal.conf_logits[i] if proposal.conf_logits else None
            confidence = None if logit is None else sigmoid(logit)
            survival *= confidence or 0.0
            margin, q = _shown(proposal, i)
            is_run = i < played.plan.t_batch - 1
            drafts.append(
                Draft(
                    id=token,
                    text=self._text(token),
                    pos=start + 1 + i,
                    conf_logit=logit,
                    conf=confidence,
                    survival=None if logit is None else survival,
                    margin=margin,
                    q=q,
                    p=_p(played.verified, i, token) if is_run else None,
                    target_choice=tokens[i] if i < len(tokens) else None,
                    status=_status(i, token, tokens, end, is_run=is_run),
                )
            )
        return tuple(drafts)

    def _placed(self, token: int, pos: int) -> Placed:
        return Placed(id=token, text=self._text(token), pos=pos)

    def _text(self, token: int) -> str:
        return self._tokens.token_bytes(token).decode("utf-8", "replace")


def _shown(proposal: Proposal, place: int) -> tuple[float | None, float | None]:
    """How clearly the drafter's best stands out, and how likely it found its draft; None where it does not say."""
    if proposal.margins:
        return proposal.margins[place], proposal.probs[place]
    if not proposal.rows:
        return None, None
    row = proposal.rows[place]
    return margin_of(row), probability_of(row, proposal.ids[place])


def _p(verified: Verified, place: int, draft: int) -> float:
    """How likely the model found a draft."""
    return verified.probs[place] if verified.probs else probability_of(verified.rows[place], draft)


def _status(place: int, draft: int, tokens: Sequence[int], end: int | None, *, is_run: bool) -> DraftStatus:
    """What became of the draft at `place`; `tokens` were chosen, and the one at `end` ended the reply."""
    if not is_run:
        return "not_verified"
    if end is not None and place > end:
        return "past_stop"
    if place >= len(tokens):
        return "unreached"
    return "accepted" if tokens[place] == draft else "rejected"


def _stop(reason: StopReason | None, token: int, chooser: Chooser) -> RoundStop:
    if chooser.is_end(token):
        return "eos"
    return {"length": "budget", "tool_calls": "tool_calls"}.get(str(reason), "stop_string")  # type: ignore[return-value]


def _logprobs(choices: Sequence[Choice]) -> list[TokenLogprob] | None:
    told = [choice.logprob for choice in choices if choice.logprob is not None]
    return told or None
