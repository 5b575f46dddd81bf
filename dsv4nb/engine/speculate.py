"""One round of speculation: draft, verify, and walk along what the model itself chooses (dspark.md 3.7).

The tokens of a round are the model's own choices; the drafts only decide how many of them one forward gives. What the
caller then commits is a prefix of the rows, which leaves the caches as single steps would have left them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.engine.accept import Plan, plan
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.protocol import MAX_ROWS, ChooseDraft, DecodeState, Engine, Proposal, Row, Verified
from dsv4nb.events import TokenLogprob
from dsv4nb.rounds import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A token that the model chose.

    Attributes:
        logprob: when it is reported.
    """

    token: int
    logprob: TokenLogprob | None = None


class Judge(Protocol):
    """Chooses tokens. `ahead` are the drafts between the pending token, which counts as said, and the row."""

    @property
    def drafts_by(self) -> SamplerConfig | None:
        """The sampler that alone is `draft`; None where it is more."""
        ...

    @property
    def decides_by(self) -> SamplerConfig | None:
        """The sampler that alone chooses in `decide`; None where more does."""
        ...

    def draft(self, row: Row, position: int, ahead: Sequence[int]) -> int:
        """Choose a draft from the drafter's row, for `position`."""
        ...

    def legal(self, drafts: Sequence[int]) -> int:
        """Return how many of the drafts can be accepted at all."""
        ...

    def decide(self, row: Row, position: int, ahead: Sequence[int], draft: int | None) -> Choice:
        """Choose the token at `position` from the model's row.

        Args:
            draft: what was drafted for it, None behind the last draft.
        """
        ...

    def told(self, token: int, rows: Sequence[Row], place: int) -> Choice:
        """Return what is told of a token that the engine chose from a row."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether nothing is chosen behind `token`."""
        ...


class Line(Protocol):
    """The sequence that a round goes on with."""

    @property
    def pos(self) -> int:
        """Committed tokens, and the position of the pending one."""
        ...

    @property
    def room(self) -> int:
        """Rows that fit behind the committed ones."""
        ...

    def draft(self, pending: int, choose: ChooseDraft) -> Proposal: ...

    def draft_and_verify(
        self, pending: int, rows: int, drafts_by: SamplerConfig, config: SamplerConfig
    ) -> tuple[Proposal, Verified] | None:
        """Draft, and run so many rows of pending token and drafts; None where that is to be done one by one."""
        ...

    def verify(self, tokens: Sequence[int], config: SamplerConfig | None) -> Verified:
        """Run rows from `pos` on without committing them; `config` may be chosen by at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A round, before anything of it is committed.

    Attributes:
        choices: what the model chose, row by row: the accepted drafts, then the token behind them.
        verified: the rows of the verify forward.
        draft_ms, verify_ms: what drafting, and the forward with the choices, took; of the latter what was left of it,
            where the round was begun before it was asked for.
    """

    proposal: Proposal
    plan: Plan
    choices: tuple[Choice, ...]
    verified: Verified = field(repr=False)
    draft_ms: float
    verify_ms: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the choices."""
        return tuple(choice.token for choice in self.choices)


def play(
    line: Line, pending: int, judge: Judge, config: SpecConfig, *, costs: Costs | None, tokens_left: int
) -> Played:
    """Play one round; the line is left with the verified rows pending.

    Args:
        pending: chosen for line.pos and not run yet; the judge counts it as said.
        tokens_left: that the reply may still have, one at least. With one there is nothing to draft for.

    Raises:
        DrafterFault: the drafter computes no numbers; no rows are pending.
        EngineError: of the forward, or a row cannot be chosen from.
    """
    start, began = line.pos, time.perf_counter()
    proposal, found = Proposal(ids=()), None
    if tokens_left > 1 and line.room > 1 and config.depth != 1:
        proposal, found = _drafted(line, pending, judge, config, tokens_left)
    drafts = proposal.ids
    bound = plan(
        config,
        proposal.conf_logits,
        len(drafts),
        costs=costs,
        legal=judge.legal(drafts),
        room=line.room,
        tokens_left=tokens_left,
    )
    drafted = time.perf_counter() if proposal.ms is None else began + 1e-3 * proposal.ms
    verified = drafts[: bound.t_batch - 1]
    if found is None:
        found = line.verify((pending, *verified), judge.decides_by)
    assert len(found.rows) == bound.t_batch, bound
    choices: list[Choice] = []
    for i in range(len(verified) + 1):
        draft, token = verified[i] if i < len(verified) else None, found.token(i)
        if token is None:
            choices.append(judge.decide(found.rows[i], start + 1 + i, verified[:i], draft))
        else:
            choices.append(judge.told(token, found.rows, i))
        token = choices[-1].token
        if token != draft or judge.is_end(token):
            break
    return Played(
        proposal=proposal,
        plan=bound,
        choices=tuple(choices),
        verified=found,
        draft_ms=1e3 * (drafted - began),
        verify_ms=max(0.0, 1e3 * (time.perf_counter() - drafted)),  # of a round that was begun before it was asked for
    )


def _drafted(
    line: Line, pending: int, judge: Judge, config: SpecConfig, tokens_left: int
) -> tuple[Proposal, Verified | None]:
    """Draft, and run the rows of the round at once where nothing has to be known of the drafts before."""
    drafts_by, decides_by = judge.drafts_by, judge.decides_by
    if config.window == "off" and drafts_by is not None and decides_by is not None:
        rows = min(config.depth or MAX_ROWS, line.room, tokens_left)
        if (both := line.draft_and_verify(pending, rows, drafts_by, decides_by)) is not None:
            return both
    return line.draft(pending, _draft_choice(judge, line.pos + 1)), None


def _draft_choice(judge: Judge, first: int) -> ChooseDraft:
    """The judge's choice of drafts, of which that in slot 0 stands at `first`."""
    if judge.drafts_by is not None:
        return PlainChoice(config=judge.drafts_by, first=first)
    return lambda row, slot, ahead: judge.draft(row, first + slot, ahead)


def run_rows(engine: Engine, state: DecodeState, tokens: Sequence[int], config: SamplerConfig | None) -> Verified:
    """Run rows without committing them, and choose from them by `config` where there is one and the engine can."""
    draw = None if config is None else getattr(engine, "draw_rows", None)
    if draw is None:
        return Verified(rows=tuple(engine.forward_rows(state, tokens)))
    drawn: Verified = draw(state, tokens, config)
    return drawn


class Speculator:
    """What speculation knows of one engine, over all its runs.

    Attributes:
        plain_ms: what one token takes on the plain route, smoothed; None until it was seen.
        fault: why drafting was given up, "" while it works.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._costs: Costs | None = None
        self.plain_ms: float | None = None
        self.fault = ""

    @property
    def costs(self) -> Costs | None:
        """The costs, None until they were measured."""
        return self._costs

    def measured(self) -> Costs:
        """Return the costs, measuring them on first use: on the thread that runs the engine."""
        if self._costs is None:
            self._costs = measure(self._engine)
        return self._costs

    def saw_plain(self, ms: float) -> None:
        """Note what a plain step took."""
        self.plain_ms = ms if self.plain_ms is None else 0.9 * self.plain_ms + 0.1 * ms


_REPEATS = 5
_PROMPT = 16


def measure(engine: Engine) -> Costs:
    """Time drafting and forwards of every width on a short sequence of its own; medians of five.

    Positions move on between the repeats, since on some engines a forward's cost depends on where it starts.
    """
    state = engine.new_state()
    widths = range(1, engine.block_size + 2)
    drafting: list[float] = []
    verifying: dict[int, list[float]] = {width: [] for width in widths}
    try:
        engine.prefill(state, [0] * min(_PROMPT, engine.max_seq // 2))
        for _ in range(_REPEATS):
            began = time.perf_counter()
            engine.draft(state, 0, PlainChoice(config=GREEDY, first=state.pos + 1))
            drafting.append(time.perf_counter() - began)
            for width in widths:
                began = time.perf_counter()
                run_rows(engine, state, [0] * width, GREEDY)
                verifying[width].append(time.perf_counter() - began)
            engine.forward_rows(state, [0])
            engine.commit(state, 1)
    finally:
        engine.release(state)
    return Costs.measured(1e3 * float(np.median(drafting)), [1e3 * float(np.median(verifying[w])) for w in widths])
