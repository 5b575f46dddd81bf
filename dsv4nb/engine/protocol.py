"""The Engine protocol: the one seam everything above the engine is tested through.

State is addressed by absolute position. `forward_rows` runs rows provisionally; `commit` keeps the
first n of them, which is one assignment to `pos` (dspark.md 3.6, design 1). Plain decoding is
`forward_rows` of one row and `commit(state, 1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]  # [V] logits on the host

MAX_ROWS = 8  # rows of one decode or verify forward; the tile every matrix product is padded to


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt that is in the cache.

    Attributes:
        logits: [V] float32 of the last prompt position; it predicts position `pos`.
        pos: tokens committed, absolute.
        computed: rows that were run for this call.
    """

    logits: Row
    pos: int
    computed: int


class DecodeState(Protocol):
    """The caches of one sequence; opaque above the engine."""

    @property
    def pos(self) -> int:
        """Committed tokens: positions 0 … pos-1 are in every cache."""
        ...


class Engine(Protocol):
    """Runs the network on token ids. One thread at a time may call it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq(self) -> int:
        """Positions a state has room for, provisional rows included."""
        ...

    def new_state(self) -> DecodeState:
        """Make an empty sequence at position 0."""
        ...

    def prefill(
        self,
        state: DecodeState,
        tokens: Sequence[int],
        *,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Prefilled:
        """Append `tokens` to `state` in chunks and commit them.

        Args:
            tokens: ids, at least one; they go to positions state.pos …
            should_stop: asked before each chunk; True raises `Cancelled` with finished chunks committed.
            on_progress: called with (rows done, rows in all) after each chunk.

        Raises:
            EngineError: the tokens do not fit `max_seq`; nothing was run.
            Cancelled: `should_stop` said so.
        """
        ...

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Run 1 … MAX_ROWS rows at positions state.pos … without committing them.

        A row's logits are the same bits alone and in any batch. Rows of an earlier call that were not
        committed are forgotten.

        Returns:
            [T, V] float32 logits; row i predicts position state.pos + i + 1.

        Raises:
            EngineError: there are no rows, too many, or they do not fit `max_seq`; nothing was run.
        """
        ...

    def commit(self, state: DecodeState, n: int) -> None:
        """Keep the first `n` rows of the last `forward_rows`, 0 <= n <= T, and forget the others.

        Raises:
            EngineError: the last forward left fewer rows.
        """
        ...

    def close(self) -> None:
        """Free the weights; idempotent."""
        ...


class Cancelled(Exception):
    """A run was asked to stop between two chunks; not an error."""
