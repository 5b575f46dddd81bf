"""What every engine refuses before it touches anything, in the same words, and how it runs a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb.engine.cache import Part
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled
from dsv4nb.errors import EngineError


class Held(Protocol):
    """A state or a snapshot, as far as a check looks at it."""

    @property
    def pos(self) -> int: ...
    @property
    def is_released(self) -> bool: ...


class Provisional(Held, Protocol):
    """A state with rows that may still be rejected."""

    pending: int

    def commit(self, n: int) -> None: ...


Own = TypeVar("Own", bound=Held)


def require_few_rows(tokens: Sequence[int]) -> None:
    """Refuse more rows than one forward runs.

    Raises:
        EngineError: there are more than `MAX_ROWS`.
    """
    if len(tokens) > MAX_ROWS:
        raise EngineError(f"forward_rows got {len(tokens)} rows; at most {MAX_ROWS} fit", param="tokens")


def require_tokens(tokens: Sequence[int], pos: int, max_seq: int, vocab_size: int) -> None:
    """Refuse tokens that cannot be run from position `pos` on.

    Raises:
        EngineError: there are none, they do not fit, or one is no id.
    """
    if len(tokens) == 0:
        raise EngineError("no tokens to run", param="tokens")
    if pos + len(tokens) > max_seq:
        raise EngineError(
            f"{len(tokens)} tokens after {pos} committed ones pass max_seq {max_seq}; "
            "shorten the prompt or load with a larger max_seq",
            param="tokens",
        )
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise EngineError(f"token id {bad} is outside the vocabulary of {vocab_size}", param="tokens")


def require_commit(n: int, pending: int) -> None:
    """Refuse to keep rows that the last forward did not leave.

    Raises:
        EngineError: there are fewer.
    """
    if not 0 <= n <= pending:
        raise EngineError(f"commit({n}): the last forward left {pending} rows", param="n")


def require_draft(pos: int, pending: int, vocab_size: int, *, has_drafter: bool) -> None:
    """Refuse a draft that nothing can be drafted with, from, or behind.

    Raises:
        EngineError: there is no drafter, no position is committed, or `pending` is no id.
    """
    if not has_drafter:
        raise EngineError("the engine has no drafter; load a checkpoint that has one", param="drafter")
    if pos == 0:
        raise EngineError("nothing is committed yet, so there is nothing to draft from", param="state")
    if not 0 <= pending < vocab_size:
        raise EngineError(f"token id {pending} is outside the vocabulary of {vocab_size}", param="pending")


def require_pos(pos: int, max_seq: int) -> None:
    """Refuse a position that no state can stand at.

    Raises:
        EngineError: it is none.
    """
    if not isinstance(pos, int) or not 0 <= pos <= max_seq:
        raise EngineError(f"pos {pos} is no position from 0 to max_seq {max_seq}", param="pos")


def require_state(
    state: object, kind: type[Own], is_ours: Callable[[Own], bool], *, even_released: bool = False
) -> Own:
    """Return a state of this engine.

    Raises:
        EngineError: it is another engine's, or was released.
    """
    if not isinstance(state, kind) or not is_ours(state):
        raise EngineError(f"the state is a {type(state).__name__}; it must come from this engine's new_state()")
    if state.is_released and not even_released:
        raise EngineError(f"the state at position {state.pos} was released; take a new one")
    return state


def require_snapshot(snapshot: object, kind: type[Own], is_ours: Callable[[Own], bool]) -> Own:
    """Return a snapshot of this engine.

    Raises:
        EngineError: it is another engine's, or was released.
    """
    if not isinstance(snapshot, kind) or not is_ours(snapshot):
        what = type(snapshot).__name__
        raise EngineError(f"the snapshot is a {what}; it must come from this engine's capture() or load()")
    if snapshot.is_released:
        raise EngineError(f"the snapshot at position {snapshot.pos} was released; keep it until it is restored")
    return snapshot


def require_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], expected: Sequence[Part], pos: int, dtype_of: Callable[[Part], type[Any]]
) -> None:
    """Refuse arrays that are not the live rows of a sequence at `pos`.

    Raises:
        EngineError: one is missing, unknown, or of another shape or dtype; it names the array and what was found.
    """
    names = [part.name for part in expected]
    if missing := [name for name in names if name not in arrays]:
        raise EngineError(f"arrays without {', '.join(missing)}; this layout has {len(names)}", param=missing[0])
    if unknown := sorted(arrays.keys() - set(names)):
        raise EngineError(f"arrays with {', '.join(unknown)}; this layout has none of that name", param=unknown[0])
    for part in expected:
        found, dtype = arrays[part.name], np.dtype(dtype_of(part))
        if not isinstance(found, np.ndarray) or found.shape != part.shape or found.dtype != dtype:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise EngineError(
                f"the array {part.name} at position {pos} is {dtype} {list(part.shape)}; found {what}", param=part.name
            )


Result = TypeVar("Result")


def run_chunks(
    state: Provisional,
    tokens: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    run: Callable[[Sequence[int], bool], Result],
    *,
    should_stop: Callable[[], bool] | None,
    on_progress: Callable[[int, int], None] | None,
) -> Result:
    """Run a prompt chunk by chunk, committing each.

    Args:
        chunks: (first, last + 1) of each, at least one.
        run: called with a chunk and whether it is the last one.

    Returns:
        What the last `run` returned.

    Raises:
        Cancelled: `should_stop` said so before a chunk.
    """
    for first, last in chunks:
        if should_stop is not None and should_stop():
            raise Cancelled
        result = run(tokens[first:last], last == len(tokens))
        state.commit(last - first)
        if on_progress is not None:
            on_progress(last, len(tokens))
    return result


@contextmanager
def all_or_nothing(state: Provisional) -> Iterator[None]:
    """Let no rows of a forward stay pending that did not come to its end, head included."""
    try:
        yield
    except BaseException:
        state.pending = 0
        raise


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise what torch says when a device has no memory left as what Python says."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryError(str(error)) from error
