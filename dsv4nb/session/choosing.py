"""Rows of logits → the tokens of one reply: grammar, bias, penalties, draw, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4nb.encoding.grammar import Matcher, compile_constraint
from dsv4nb.engine.logprobs import logprob_of
from dsv4nb.engine.plain_choice import GREEDY, can_draw
from dsv4nb.engine.processors import Mask, Processor
from dsv4nb.engine.protocol import Row
from dsv4nb.engine.rejection import Drawn, decide, draw
from dsv4nb.engine.sampler import choose
from dsv4nb.engine.speculate import Choice
from dsv4nb.session.request import ChatTokens, Request


class Chooser:
    """Chooses the tokens of one reply; a `Judge`.

    A row is treated as plain decoding treats it after the tokens in front of it: mask, bias and penalties are those of
    the place where it stands, drafts included (dspark.md 5).

    Args:
        vocab_size: of the network's rows.

    Attributes:
        drafts_by, decides_by: the sampler, where it alone makes a draft or a token; see `Judge`.
    """

    def __init__(self, request: Request, tokens: ChatTokens, vocab_size: int) -> None:
        self._config, self._eos = request.config, request.eos
        self._n_logprobs = request.logprobs
        self._processor = Processor(request.config, request.prompt, vocab_size)
        self._matcher: Matcher | None = None
        if request.constraint is not None:
            self._matcher = compile_constraint(request.constraint, tokens).matcher(vocab_size)
        spec = request.spec
        self._draws_drafts = spec is not None and spec.mode == "rejection" and not request.config.is_greedy
        self._is_coupled = spec is None or spec.proposal == "coupled"
        sees_rows = self._matcher is not None or not self._processor.is_neutral or self._draws_drafts
        plain = request.config if can_draw(request.config) and not sees_rows else None
        self.drafts_by = plain if plain is None or self._is_coupled else GREEDY
        self.decides_by = plain
        self._drawn: list[Drawn] = []  # drafts of the round, in rejection mode
        self._masks: list[Mask] = []  # along the drafts of the round

    def choose(self, row: Row, position: int) -> Choice:
        """Choose the token at `position` behind everything that was said, and count it as said.

        Args:
            row: [V] logits that predict `position`; not changed.

        Raises:
            EngineError: the row holds a NaN, or nothing that is allowed.
        """
        choice = self._choice(row, position, (), None if self._matcher is None else self._matcher.mask())
        self.push(choice.token)
        return choice

    def push(self, token: int) -> None:
        """Count a token as said."""
        self._processor.push(token)
        if self._matcher is not None and token not in self._eos:
            self._matcher.advance(token)

    # for rounds

    def draft(self, row: Row, position: int, ahead: Sequence[int]) -> int:
        """Choose a draft; see `Judge`. It is masked, biased and penalised as the model's own row will be."""
        mask = None
        if self._matcher is not None:
            masks = self._matcher.masks_along(ahead)
            mask = masks[-1] if len(masks) > len(ahead) else None  # behind an end anything can be drafted
        processed = self._processor.apply(row, ahead, mask)
        if self._draws_drafts:
            if not ahead:
                self._drawn = []
            self._drawn.append(draw(processed, self._config, position))
            return self._drawn[-1].token
        if self._is_coupled:
            return choose(processed, self._config, position)
        return int(processed.argmax())

    def legal(self, drafts: Sequence[int]) -> int:
        """Return how many drafts the grammar lets be verified; all without one."""
        if self._matcher is None:
            return len(drafts)
        self._masks = self._matcher.masks_along(drafts)
        return len(self._masks) - 1

    def decide(self, row: Row, position: int, ahead: Sequence[int], draft: int | None) -> Choice:
        """Choose the model's token behind `ahead`; see `Judge`."""
        mask = None if self._matcher is None else self._masks[len(ahead)]
        if not self._draws_drafts:
            return self._choice(row, position, ahead, mask)
        processed = self._processor.apply(row, ahead, mask)
        drawn = None if draft is None else self._drawn[len(ahead)]
        return self._told(row, decide(processed, self._config, position, drawn))

    def told(self, token: int, rows: Sequence[Row], place: int) -> Choice:
        """Return what is told of a token that the engine chose; see `Judge`. Only then is its row looked at."""
        return Choice(token=token) if self._n_logprobs is None else self._told(rows[place], token)

    def is_end(self, token: int) -> bool:
        """Whether `token` ends the reply."""
        return token in self._eos

    def _choice(self, row: Row, position: int, ahead: Sequence[int], mask: Mask | None) -> Choice:
        return self._told(row, choose(self._processor.apply(row, ahead, mask), self._config, position))

    def _told(self, row: Row, token: int) -> Choice:
        logprob = None if self._n_logprobs is None else logprob_of(row, token, self._n_logprobs)
        return Choice(token=token, logprob=logprob)
