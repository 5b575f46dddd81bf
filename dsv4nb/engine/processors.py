"""The processed row that the sampler chooses from: mask, bias, penalties, in this order (dspark.md 5).

A row is processed as plain decoding would do it after the tokens before it, so a row of a verify forward is processed
with the drafts in front of it. Each step reads and writes float32 logits. Inside a step the touched logits are
float64: a penalty is not a float32 number, n times it even less, and so each step rounds once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.protocol import Row
from dsv4nb.errors import EngineError, RequestError

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]


class Processor:
    """Processes the rows of one sequence; holds what the penalties count and nothing else.

    Args:
        config: values of the request.
        prompt: its ids. Those outside the vocabulary take their place in the window and are not counted.
        vocab_size: V, the width of a row.

    Raises:
        RequestError: `logit_bias` has an id that the vocabulary has not.
    """

    def __init__(self, config: SamplerConfig, prompt: Sequence[int], vocab_size: int) -> None:
        for token, _ in config.logit_bias[-1:]:  # the largest id
            if token >= vocab_size:
                raise RequestError(f"logit_bias has the id {token}; ids are 0 to {vocab_size - 1}", param="logit_bias")
        self._config = config
        self._vocab_size = vocab_size
        self._biased = np.array([token for token, _ in config.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in config.logit_bias], np.float64)
        counted = prompt if config.penalty_scope == "all" else ()
        self._window = _Window(counted, config.penalty_last_n, vocab_size) if config.has_penalties else None

    @property
    def is_neutral(self) -> bool:
        """Whether a row without a mask stays as it is, so that a choice made on the device is the same."""
        return self._window is None and not self._biased.size

    def push(self, token: int) -> None:
        """Append a committed token; it counts for every later row."""
        assert 0 <= token < self._vocab_size, token
        if self._window is not None:
            self._window.push(token)

    def apply(self, row: Row, ahead: Sequence[int] = (), mask: Mask | None = None) -> Row:
        """Return the row that follows the committed tokens and `ahead`; neither `row` nor the counts change.

        Args:
            row: [V] float32 logits of the model.
            ahead: drafts between the last committed token and this row, in order.
            mask: [V], True where a token is allowed; None allows all.

        Returns:
            [V] float32; `row` itself when there is nothing to do.

        Raises:
            EngineError: the mask is not of this form, or mask and bans leave no token.
        """
        if mask is None and self.is_neutral:
            return row
        assert row.shape == (self._vocab_size,) and row.dtype == np.float32, (row.shape, row.dtype)
        processed = row.copy() if mask is None else _masked(row, mask)
        with np.errstate(over="ignore", invalid="ignore"):  # the sampler judges rows that hold an infinity or a NaN
            processed[self._biased] += self._biases
            _require_a_choice(processed, mask)
            if self._window is not None:
                _penalise(processed, self._window.counts_after(ahead), self._config)
        return processed


def _masked(row: Row, mask: Mask) -> Row:
    """A copy of the row with -inf where the mask allows nothing."""
    if mask.shape != row.shape or mask.dtype != np.bool_:
        raise EngineError(
            f"the mask is {mask.dtype} {list(mask.shape)}; it must be bool [{row.shape[0]}], True where allowed",
            param="mask",
        )
    return np.where(mask, row, np.float32(-np.inf))


def _require_a_choice(row: Row, mask: Mask | None) -> None:
    if row.max() != -np.inf:  # a NaN is the sampler's to name
        return
    allowed = row.shape[0] if mask is None else np.count_nonzero(mask)
    raise EngineError(
        f"no token is left: of {row.shape[0]} the mask allows {allowed}, and logit_bias or a logit of -inf bans those; "
        "loosen the mask or the bias",
        param="logit_bias" if mask is None else "mask",
    )


def _penalise(row: Row, counts: Counts, config: SamplerConfig) -> None:
    """Apply the three penalties in place, once to each distinct id of the window (dspark.md 5.1).

    Args:
        counts: [V] occurrences in the window.
    """
    seen = np.flatnonzero(counts > 0)
    logits = row[seen].astype(np.float64)
    if config.repetition_penalty != 1:
        ratio = config.repetition_penalty
        logits = np.where(logits > 0, logits / ratio, logits * ratio)
    logits -= config.frequency_penalty * counts[seen]
    logits -= config.presence_penalty
    row[seen] = logits


class _Window:
    """How often each id stands among the last tokens of a sequence.

    Args:
        tokens: the sequence so far.
        last_n: tokens in the window, 0 = all of them.
    """

    def __init__(self, tokens: Sequence[int], last_n: int, vocab_size: int) -> None:
        tokens = tokens[-last_n:] if last_n else tokens
        self._last_n = last_n
        # what is counted for good need not be remembered in order
        self._tokens = deque(tokens if last_n else ())
        ids = np.array(tokens, np.int64)
        ids = ids[(ids >= 0) & (ids < vocab_size)]
        self._counts: Counts = np.bincount(ids, minlength=vocab_size).astype(np.int32)

    def push(self, token: int) -> None:
        """Append a token; the oldest falls out of a full window."""
        _count(self._counts, (token,), 1)
        if self._last_n:
            self._tokens.append(token)
            if len(self._tokens) > self._last_n:
                _count(self._counts, (self._tokens.popleft(),), -1)

    def counts_after(self, ahead: Sequence[int]) -> Counts:
        """Return the counts [V] with `ahead` appended; the window stays. Not to be changed."""
        if len(ahead) == 0:
            return self._counts
        counts = self._counts.copy()
        _count(counts, ahead, 1)
        if self._last_n:
            fallen = max(len(self._tokens) + len(ahead) - self._last_n, 0)
            _count(counts, islice(chain(self._tokens, ahead), fallen), -1)
        return counts


def _count(counts: Counts, tokens: Iterable[int], step: int) -> None:
    for token in tokens:
        if 0 <= token < counts.shape[0]:
            counts[token] += step
