"""The Engine protocol: the one seam everything above the engine is tested through.

State is addressed by absolute position. `forward_rows` runs rows provisionally; `commit` keeps the
first n of them, which is one assignment to `pos` (dspark.md 3.6, design 1). Plain decoding is
`forward_rows` of one row and `commit(state, 1)`.

A state grows along one sequence and never goes back. `capture` keeps a position of it, and `restore` makes any
number of new states there, each of which goes on as a cold run of the same tokens would, bit for bit. Finished
compressed entries lie in blocks that states and snapshots share, so both calls cost the same at any position.
A prompt may be given to `prefill` in pieces, to capture a position inside it: how it is cut changes no bit.

When a call raises, its state stands where the last commit left it and can be used on; chunks that were finished
before stay committed. Whoever wants the state of before the call captures it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dsv4nb.config import SamplerConfig

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


ChooseDraft = Callable[[Row, int, Sequence[int]], int]
"""Chooses one draft: (its row of logits [V], its slot from 0, the drafts before it) -> an id. An engine that knows what
a `PlainChoice` is may choose by itself as that would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a drafter says may come after the pending token.

    Attributes:
        ids: the drafts, in order.
        conf_logits: one per draft, what the confidence head says before the sigmoid; () when there is no such head.
        rows: [V] float32 logits that each draft was chosen from, the ones before it considered; () when there are none.
            Looking at one may copy it from a device.
        margins: how far the best of each row stands above the second; () where it is to be found in the rows.
        probs: softmax of each row at its draft, for show; likewise.
        ms: what drafting took on the device's clock; None where the caller can tell by its own.
    """

    ids: tuple[int, ...]
    conf_logits: tuple[float, ...] = ()
    rows: Sequence[Row] = ()
    margins: tuple[float, ...] = ()
    probs: tuple[float, ...] = ()
    ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Rows that were run and are not committed.

    Attributes:
        rows: T of [V] float32 logits. Looking at one may copy it from a device.
        ids: what the asked sampler chooses from each, -1 from a row that it refuses; () where the rows are to be asked.
        probs: softmax of each row but the last at the token that was run behind it, for show; () likewise.
    """

    rows: Sequence[Row]
    ids: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()

    def token(self, place: int) -> int | None:
        """Return what was chosen from a row, None where the row is to be asked."""
        return self.ids[place] if self.ids and self.ids[place] >= 0 else None


class DecodeState(Protocol):
    """The caches of one sequence; opaque above the engine."""

    @property
    def pos(self) -> int:
        """Committed tokens: positions 0 … pos-1 are in every cache."""
        ...


class Snapshot(Protocol):
    """Everything needed to go on at one position of a sequence; never changes.

    It belongs to the engine that made it. Its memory is given back by `release`, or when it is forgotten.
    """

    @property
    def pos(self) -> int:
        """Committed tokens at the time of capture."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes this snapshot takes beside what it shares: window rows, source rows, and the last, partly filled
        blocks; full blocks are not counted. The same at any position but for those last blocks."""
        ...

    def release(self) -> None:
        """Give the memory back; idempotent, from any thread. What was restored from it is not touched."""
        ...


class Engine(Protocol):
    """Runs the network on token ids. One thread at a time may call it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq(self) -> int:
        """Positions a state has room for, provisional rows included."""
        ...

    @property
    def block_size(self) -> int:
        """Drafts that one call of `draft` makes; 0 without a drafter."""
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
            EngineError: the tokens do not fit `max_seq`, or the state was released; nothing was run.
            Cancelled: `should_stop` said so.
            MemoryError: the caches cannot grow; this state and all others are as after the last chunk.
        """
        ...

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Run 1 … MAX_ROWS rows at positions state.pos … without committing them.

        A row's logits are the same bits alone and in any batch. Rows of an earlier call that were not
        committed are forgotten.

        Returns:
            [T, V] float32 logits; row i predicts position state.pos + i + 1.

        Raises:
            EngineError: there are no rows, too many, they do not fit `max_seq`, or the state was released; nothing
                was run.
            MemoryError: the caches cannot grow; this state and all others are as before, without pending rows.
        """
        ...

    def commit(self, state: DecodeState, n: int) -> None:
        """Keep the first `n` rows of the last `forward_rows`, 0 <= n <= T, and forget the others.

        Raises:
            EngineError: the last forward left fewer rows.
        """
        ...

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft what may follow `pending`, the token at state.pos that is chosen and not run yet.

        Nothing that a later call can see is changed, and rows that a forward left pending stay so. Draft i stands at
        position state.pos + 1 + i.

        Args:
            choose: called once per draft, in order, on this thread.

        Raises:
            EngineError: there is no drafter, no position is committed, or the state was released.
            DrafterFault: the drafter computes a NaN or an infinity; the state can be used on without it.
        """
        ...

    def capture(self, state: DecodeState) -> Snapshot:
        """Keep what is needed to go on at state.pos; the state goes on undisturbed, rows pending included.

        Copies the window rows and source rows in use and shares the entries. Costs the same at any position.

        Raises:
            EngineError: the state was released.
            MemoryError: there is no room for the copies; nothing was changed.
        """
        ...

    def restore(self, snapshot: Snapshot) -> DecodeState:
        """Make a new state at snapshot.pos, with no rows pending; the snapshot stays usable.

        States restored from one snapshot, and the state it was captured from, do not affect each other. No logits
        come with it: those of the last position are what its capturer kept, or what a prefill of one more token gives.

        Raises:
            EngineError: the snapshot was released, or another engine made it.
            MemoryError: there is no room for the state; nothing was changed.
        """
        ...

    def release(self, state: DecodeState) -> None:
        """Give the memory of `state` back; idempotent, and done as well when a state is forgotten.

        Every later call with it, this one excepted, raises `EngineError`. Snapshots taken of it stay usable.
        """
        ...

    def dump(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """Return everything a snapshot holds, shared entries included, as arrays by name; copies.

        With `snapshot.pos` they are all that `load` needs, in this process or another one.

        Raises:
            EngineError: the snapshot was released, or another engine made it.
        """
        ...

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], pos: int) -> Snapshot:
        """Make a snapshot at `pos` of what `dump` returned; the arrays are copied.

        Names, shapes and dtypes are checked, values are not: whether they belong to this model and these tokens is
        for the caller to know.

        Raises:
            EngineError: `pos` is outside 0 … max_seq, or an array is missing, unknown, or of another shape or dtype
                than `layout` and `pos` ask for; it names the array, what was expected and what was found. Nothing
                was allocated.
            MemoryError: there is no room; nothing was changed.
        """
        ...

    def layout(self) -> str:
        """Return one short line that says how `dump` lays a sequence out; equal lines, exchangeable arrays."""
        ...

    def state_bytes(self, positions: int) -> dict[str, int]:
        """Return what the caches of one state of so many positions take, in bytes per class of cache.

        The classes are "window", "compressor", "indexer" (the latter two: entries, in whole blocks), "source" and,
        with a drafter, "drafter"; their sum is the state.
        """
        ...

    @property
    def blocks_in_use(self) -> int:
        """Blocks of entries that some state or snapshot holds; 0 once all of them are released."""
        ...

    def close(self) -> None:
        """Free the weights; idempotent."""
        ...


class DrawingEngine(Engine, Protocol):
    """An engine that can choose tokens where its rows are, so that no row must leave the device."""

    def draw_rows(self, state: DecodeState, tokens: Sequence[int], config: SamplerConfig) -> Verified:
        """Run rows as `forward_rows` does, and choose from each as `sampler.choose` does with the bits that it returns.

        Row i chooses the token at position state.pos + i + 1. Rows that are looked at later are the same bits still,
        whatever was run since.

        Args:
            config: whose draw is the race, or which is greedy; its bias and its penalties are for the caller to apply.

        Raises:
            EngineError, MemoryError: as of `forward_rows`.
        """
        ...

    def draft_and_draw(
        self, state: DecodeState, pending: int, rows: int, *, drafts_by: SamplerConfig, config: SamplerConfig
    ) -> tuple[Proposal, Verified]:
        """Draft by one sampler, run `pending` and the first drafts, and choose by another, with one wait for all of it.

        The same as `draft` and then `draw_rows` of `rows` tokens, of a whole block at most.

        Raises:
            EngineError, MemoryError, DrafterFault: as of these; no rows are pending then.
        """
        ...


class Cancelled(Exception):
    """A run was asked to stop between two chunks; not an error."""
