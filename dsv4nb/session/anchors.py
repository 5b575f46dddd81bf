"""The snapshots that a conversation can fall back to, several under a budget of bytes.

An anchor of a running turn is pending: it counts once the turn has succeeded, and a turn that was stopped or failed
leaves the anchors as they were. Anchors are found by their ids, so those of all branches of a conversation can stand
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dsv4nb.engine.protocol import Row, Snapshot
from dsv4nb.errors import EngineError, RequestError
from dsv4nb.session.reuse import starts_with


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Anchor:
    """A position to go on from.

    Attributes:
        ids: what was committed there, from position 0 on.
        snapshot: the caches there; it belongs to the anchor.
        logits: [V] behind the last id, None when they were not kept.
        id: names it among all that there ever were.

    Raises:
        EngineError: the snapshot is of another position.
    """

    ids: tuple[int, ...]
    snapshot: Snapshot
    logits: Row | None = None
    id: int = field(default_factory=itertools.count(1).__next__)

    def __post_init__(self) -> None:
        if self.snapshot.pos != len(self.ids):
            raise EngineError(f"a snapshot at position {self.snapshot.pos} is no anchor of {len(self.ids)} tokens")


class Anchors:
    """Keeps anchors while their snapshots together fit into a budget, the least recently used out first.

    The newest committed anchor and the newest pending one are kept whatever they take, and so are pinned ones. A
    snapshot is released as soon as no anchor here has it. One thread at a time may call the methods.

    Args:
        budget_bytes: of `Snapshot.nbytes`, 1 or more.

    Raises:
        RequestError: the budget is no positive integer.
    """

    def __init__(self, budget_bytes: int) -> None:
        if type(budget_bytes) is not int or budget_bytes < 1:
            raise RequestError(
                f"budget_bytes is {budget_bytes!r}; it must be an integer, 1 or more", param="budget_bytes"
            )
        self.budget_bytes = budget_bytes
        self._committed: tuple[Anchor, ...] = ()  # least recently used first
        self._pending: tuple[Anchor, ...] = ()  # in the order taken
        self._newest: Anchor | None = None  # of the committed ones
        self._pinned: frozenset[int] = frozenset()

    @property
    def committed(self) -> tuple[Anchor, ...]:
        """The anchors that can be restored, least recently used first; a copy that stays as it is."""
        return self._committed

    @property
    def pending(self) -> tuple[Anchor, ...]:
        """The anchors of the running turn, in the order taken."""
        return self._pending

    @property
    def nbytes(self) -> int:
        """What all snapshots take together, pending ones included."""
        return _bytes((*self._committed, *self._pending))

    def is_pinned(self, anchor: Anchor) -> bool:
        """Whether an anchor stays whatever comes."""
        return anchor.id in self._pinned

    def pin(self, id: int, is_pinned: bool = True) -> None:
        """Keep a committed anchor whatever comes, or no longer.

        Raises:
            RequestError: there is no such anchor, or pinned ones would take more than the budget.
        """
        anchor = self.get(id)
        if not is_pinned:
            self._pinned -= {id}
            return
        pinned = [other for other in self._committed if other.id in self._pinned | {id}]
        nbytes = _bytes(pinned)
        if nbytes > self.budget_bytes:
            raise RequestError(
                f"anchor {id} of {len(anchor.ids)} tokens cannot be pinned: pinned snapshots would take "
                f"{nbytes / 2**20:.1f} of {self.budget_bytes / 2**20:.1f} MiB; unpin another, or load with a larger "
                "cache_mib",
                param="id",
            )
        self._pinned |= {id}

    def delete(self, id: int) -> None:
        """Forget a committed anchor, pinned or not.

        Raises:
            RequestError: there is no such anchor.
        """
        anchor = self.get(id)
        if anchor is self._newest:
            self._newest = None
        self._keep(_without(self._committed, anchor), self._pending)

    def get(self, id: int) -> Anchor:
        """Return a committed anchor.

        Raises:
            RequestError: there is no such anchor.
        """
        for anchor in self._committed:
            if anchor.id == id:
                return anchor
        known = ", ".join(str(anchor.id) for anchor in self._committed) or "none"
        raise RequestError(f"there is no anchor {id}; those there are: {known}", param="id")

    def longest(self, prompt: Sequence[int]) -> Anchor | None:
        """Return the committed anchor of the longest strict prefix of `prompt`, every id compared."""
        for anchor in sorted(self._committed, key=lambda anchor: -len(anchor.ids)):
            if len(anchor.ids) < len(prompt) and starts_with(prompt, anchor.ids):
                return anchor
        return None

    def touch(self, anchor: Anchor) -> None:
        """Note that a committed anchor was used."""
        if anchor in self._committed:
            self._committed = (*_without(self._committed, anchor), anchor)

    def make_room(self, nbytes: int) -> None:
        """Release what has to go before a snapshot of `nbytes` is taken, so that the budget holds meanwhile."""
        self._keep(self._committed, self._pending, room=nbytes)

    def add(self, anchor: Anchor) -> None:
        """Take over an anchor of the running turn; it replaces a pending one of the same ids."""
        others = tuple(other for other in self._pending if other.ids != anchor.ids)
        self._keep(self._committed, (*others, anchor))

    def commit(self) -> None:
        """The turn succeeded: its anchors can be restored; each replaces a committed one of the same ids."""
        if not self._pending:
            return
        ids = {anchor.ids for anchor in self._pending}
        others = tuple(other for other in self._committed if other.ids not in ids)
        pinned = {other.ids for other in self._committed if other.id in self._pinned}
        self._pinned |= {anchor.id for anchor in self._pending if anchor.ids in pinned}
        self._newest = self._pending[-1]
        self._keep((*others, *self._pending), ())

    def drop_pending(self) -> None:
        """The turn was stopped or failed: forget its anchors."""
        self._keep(self._committed, ())

    def clear(self) -> None:
        """Forget all anchors."""
        self._newest = None
        self._keep((), ())

    def _keep(self, committed: tuple[Anchor, ...], pending: tuple[Anchor, ...], *, room: int = 0) -> None:
        """Make these the anchors, less what the budget has no room for; release all others."""
        before = (*self._committed, *self._pending)
        self._committed, self._pending = committed, pending
        last = pending[-1] if pending else None
        for anchor in (*committed, *pending):
            if self.nbytes + room <= self.budget_bytes:
                break
            if anchor is not self._newest and anchor is not last and anchor.id not in self._pinned:
                self._committed = _without(self._committed, anchor)
                self._pending = _without(self._pending, anchor)
        self._pinned &= {anchor.id for anchor in self._committed}
        kept = {id(anchor.snapshot) for anchor in (*self._committed, *self._pending)}
        dropped: dict[int, Callable[[], None]] = {
            id(anchor.snapshot): anchor.snapshot.release for anchor in before if id(anchor.snapshot) not in kept
        }
        failed: BaseException | None = None
        for release in dropped.values():  # all of them, also when one fails
            try:
                release()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed


def _without(anchors: tuple[Anchor, ...], anchor: Anchor) -> tuple[Anchor, ...]:
    return tuple(other for other in anchors if other is not anchor)


def _bytes(anchors: Iterable[Anchor]) -> int:
    """Return what the snapshots take, shared ones once."""
    return sum({id(anchor.snapshot): anchor.snapshot.nbytes for anchor in anchors}.values())
