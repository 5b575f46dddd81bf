"""Rows of logits → the tokens of one reply: grammar, bias, penalties, draw, log-probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsv4nb.encoding.grammar import Matcher, compile_constraint
from dsv4nb.engine.logprobs import logprob_of
from dsv4nb.engine.processors import Processor
from dsv4nb.engine.sampler import choose
from dsv4nb.events import TokenLogprob
from dsv4nb.session.request import ChatTokens, Request


class Chooser:
    """Chooses the tokens of one reply, one position after the other.

    Args:
        vocab_size: of the network's rows.
    """

    def __init__(self, request: Request, tokens: ChatTokens, vocab_size: int) -> None:
        self._config, self._eos = request.config, request.eos
        self._n_logprobs = request.logprobs
        self._processor = Processor(request.config, request.prompt, vocab_size)
        self._matcher: Matcher | None = None
        if request.constraint is not None:
            self._matcher = compile_constraint(request.constraint, tokens).matcher(vocab_size)

    def choose(self, row: npt.NDArray[np.float32], position: int) -> tuple[int, TokenLogprob | None]:
        """Choose the token at `position` and count it as said.

        Args:
            row: [V] logits that predict `position`; not changed.

        Raises:
            EngineError: the row holds a NaN, or nothing that is allowed.
        """
        mask = None if self._matcher is None else self._matcher.mask()
        token = choose(self._processor.apply(row, mask=mask), self._config, position)
        logprob = None if self._n_logprobs is None else logprob_of(row, token, self._n_logprobs)
        self._processor.push(token)
        if self._matcher is not None and token not in self._eos:
            self._matcher.advance(token)
        return token, logprob
