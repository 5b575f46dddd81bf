"""One run's caches: begun from the longest known prefix, and kept for later runs when the run ends well.

Between runs there are no states, only snapshots with the ids that they stand for. So a run that fails or is cancelled
takes nothing with it: what was known before is still known, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.protocol import ChooseDraft, DecodeState, Engine, Proposal, Row, Verified
from dsv4nb.engine.speculate import run_rows
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.reuse import Decision, anchor_length


@dataclass(slots=True)
class Ledger:
    """The ids that the last run of one chat left committed; the next one is compared with them.

    Attributes:
        n_reused, n_prompt: how many of them were not computed by that run, and how many are its prompt; 0 where no
            run of this chat left them.
    """

    ids: tuple[int, ...] = ()
    n_reused: int = 0
    n_prompt: int = 0


class Live:
    """The caches while a run goes on.

    Args:
        prefixes: of earlier runs, None for a run that neither takes nor leaves anything.
        ledger: of the chat.

    Attributes:
        ids: committed so far, always as many as the state's position.
        decision: where the run starts, and why.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], prefixes: Prefixes | None, ledger: Ledger | None = None
    ) -> None:
        self.ids: list[int] = []
        self._start = None if prefixes is None else prefixes.decide(prompt, ledger.ids if ledger else ())
        self.decision = _afresh(prompt) if self._start is None else self._start.decision
        self._engine, self._prompt, self._prefixes, self._ledger = engine, prompt, prefixes, ledger
        self._state: DecodeState | None = None
        self._rows: Sequence[Row] = ()  # of the last forward; to look at one may mean to copy it from a device
        self._place = 0  # the row behind the ids

    @property
    def n_prompt(self) -> int:
        """Tokens that are read before anything is chosen."""
        return len(self._prompt)

    @property
    def pos(self) -> int:
        """Committed tokens."""
        return len(self.ids)

    def begin(
        self,
        *,
        keep_at: Sequence[int] = (),
        should_stop: Callable[[], bool],
        on_progress: Callable[[int], None],
    ) -> Row:
        """Bring the caches to the end of the prompt; return the row that predicts the next token.

        Args:
            keep_at: lengths of beginnings of the prompt that later runs are going to share.
            on_progress: called with the tokens committed, after each chunk.

        Raises:
            Cancelled: `should_stop` said so before a chunk.
        """
        prompt, n_prompt = self._prompt, len(self._prompt)
        if self._prefixes is None or self._start is None:
            self._state = self._engine.new_state()
        else:
            self._state, ids, row = self._prefixes.resume(self._engine, self._start)
            self.ids, self._rows = list(ids), () if row is None else (row,)
        state = self._state
        for stop in self._stops(n_prompt, keep_at):
            done = len(self.ids)
            try:
                prefilled = self._engine.prefill(
                    state,
                    prompt[done:stop],
                    should_stop=should_stop,
                    on_progress=lambda n, _, done=done: on_progress(done + n),  # type: ignore[misc]
                )
                self._rows = (prefilled.logits,)
            finally:
                self.ids += prompt[done : state.pos]  # as many as were committed
            if stop < n_prompt:
                self._mark()
        return self._rows[self._place]

    @property
    def room(self) -> int:
        """Rows that fit behind the committed ones."""
        return self._engine.max_seq - len(self.ids)

    def step(self, token: int, config: SamplerConfig | None = None) -> Verified:
        """Commit `token`; return the row that predicts the one behind it, and what `config` may choose from it."""
        verified = self.verify((token,), config)
        self.commit((token,), verified.rows)
        return verified

    def draft(self, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft what may follow `pending`, which stands at `pos`."""
        assert self._state is not None
        return self._engine.draft(self._state, pending, choose)

    def draft_and_verify(
        self, pending: int, rows: int, drafts_by: SamplerConfig, config: SamplerConfig
    ) -> tuple[Proposal, Verified] | None:
        """Draft behind `pending` and run rows without waiting in between, None where the engine cannot."""
        assert self._state is not None
        run = getattr(self._engine, "draft_and_draw", None)
        if run is None:
            return None
        self._rows = ()
        both: tuple[Proposal, Verified] = run(self._state, pending, rows, drafts_by=drafts_by, config=config)
        return both

    def verify(self, tokens: Sequence[int], config: SamplerConfig | None = None) -> Verified:
        """Run `tokens` from `pos` on without committing them, and choose by `config` where the engine can."""
        assert self._state is not None
        self._rows = ()  # rows that are held would be copied from their device
        return run_rows(self._engine, self._state, tokens, config)

    def commit(self, tokens: Sequence[int], rows: Sequence[Row]) -> None:
        """Keep the first of the rows that were run, those of `tokens`."""
        assert self._state is not None
        self._engine.commit(self._state, len(tokens))
        self.ids += tokens
        self._rows, self._place = rows, len(tokens) - 1

    def keep(self) -> None:
        """The run ended well: later ones may go on from its end and from the marks on its way."""
        if self._prefixes is not None and self._start is not None:
            self._mark()
            self._prefixes.commit(self._engine, self._prompt, self._start)
            if self._ledger is not None:
                self._ledger.ids = tuple(self.ids)
                self._ledger.n_reused, self._ledger.n_prompt = self.decision.length, len(self._prompt)

    def close(self) -> None:
        """Give the caches back, and forget what was not kept. Idempotent."""
        if self._prefixes is not None:
            self._prefixes.drop()
        state, self._state = self._state, None
        if state is not None:
            self._engine.release(state)

    def _stops(self, n_prompt: int, keep_at: Sequence[int]) -> list[int]:
        """The lengths at which prefill pauses: marks on the way, and the end; none where nothing is to be computed."""
        if len(self.ids) == n_prompt:
            return []
        marks = set()
        if self._prefixes is not None:
            marks = {anchor_length(n_prompt, self._prefixes.policy), *keep_at}
        return [*sorted(m for m in marks if m is not None and len(self.ids) < m < n_prompt), n_prompt]

    def _mark(self) -> None:
        assert self._prefixes is not None and self._state is not None
        row = self._rows[self._place].copy() if self._rows else None  # alone: the others of its forward are let go
        self._prefixes.mark(self._engine, self._state, self.ids, row)


def _afresh(prompt: Sequence[int]) -> Decision:
    return Decision(
        kind="reset", length=0, computed=len(prompt), reason="A request on its own starts afresh: all rows to compute."
    )
