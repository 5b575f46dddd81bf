"""Prefixes in host memory: what an engine dumped of them, under a budget, the least recently used out first.

A stored prefix is lent out as it lies; a lookup copies nothing. Storing one costs a copy from the device, so it is done
after a reply, and only for a prompt that was not found.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy.typing as npt

from dsv4nb.errors import RequestError
from dsv4nb.session.reuse import DEFAULT, starts_with

MIB = 1 << 20

# nothing is stored; no strict prefix of the prompt is long enough; the whole prompt is stored, and a strict prefix of
# it is not; what is stored begins otherwise
Miss = Literal["empty", "short", "whole", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPrefix:
    """A prefix as it was stored. It may be used after it left the cache; nobody changes it.

    Attributes:
        id: names it among all that were ever stored.
        arrays: what the engine dumped at position `length`.
    """

    id: int
    ids: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def length(self) -> int:
        """Its tokens, which is the position of its arrays."""
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """A stored prefix, for a table.

    Attributes:
        hits: how often a request started from it.
        idle_s: since it was stored or last used.
        is_pinned: whether it stays until it is deleted.
    """

    id: int
    tokens: int
    mib: float
    hits: int
    idle_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """What is stored, and what came of it.

    Attributes:
        tokens, bytes: of all entries together.
        misses: how many of each kind, all kinds named.
        evictions: entries that went to make room; not those that were deleted.
    """

    entries: int
    tokens: int
    bytes: int
    budget_bytes: int
    hits: int
    misses: Mapping[Miss, int]
    evictions: int


@dataclass(slots=True)
class _Entry:
    prefix: HostPrefix
    nbytes: int
    used_at: float
    hits: int = 0
    is_pinned: bool = False


class HostCache:
    """Stores prefixes of at least `floor` tokens; every method may be called from any thread.

    Args:
        budget_mib: of all arrays together, 0 or more; 0 stores nothing.
        floor: tokens, 1 or more.

    Raises:
        RequestError: a value is outside its range.
    """

    def __init__(self, budget_mib: float, *, floor: int = DEFAULT.host_floor) -> None:
        is_number = isinstance(budget_mib, int | float) and not isinstance(budget_mib, bool)
        if not is_number or not math.isfinite(budget_mib) or budget_mib < 0:
            raise RequestError(
                f"budget_mib is {budget_mib!r}; it must be a number of MiB, 0 (off) or more", param="budget_mib"
            )
        if type(floor) is not int or floor < 1:
            raise RequestError(f"floor is {floor!r}; it must be an integer, 1 or more", param="floor")
        self.budget_bytes, self.floor = int(budget_mib * MIB), floor
        self._entries: dict[int, _Entry] = {}  # by id, least recently used first
        self._numbers = itertools.count(1)
        self._hits, self._evictions = 0, 0
        self._misses: Counter[Miss] = Counter()
        self._lock = threading.Lock()

    def find(self, prompt: Sequence[int]) -> HostPrefix | Miss:
        """Return the longest strict prefix of `prompt` that is stored, every id compared, or why there is none.

        Neither counts nor keeps it from being evicted: `count` does, once it is known whether it is needed.
        """
        with self._lock:
            stored = [entry.prefix for entry in self._entries.values()]
        if not stored:
            return "empty"
        if len(prompt) <= self.floor:
            return "short"
        fits = (prefix for prefix in stored if prefix.length <= len(prompt))
        miss: Miss = "differs"
        for prefix in sorted(fits, key=lambda prefix: -prefix.length):
            if starts_with(prompt, prefix.ids):
                if prefix.length < len(prompt):
                    return prefix
                miss = "whole"
        return miss

    def count(self, found: HostPrefix | Miss) -> None:
        """Count what `find` returned for a request that was served from here, or computed its whole prompt.

        A request that the live cache or an anchor served is no hit and no miss.
        """
        with self._lock:
            if not isinstance(found, HostPrefix):
                self._misses[found] += 1
                return
            self._hits += 1
            entry = self._entries.pop(found.id, None)
            if entry is not None:
                entry.hits, entry.used_at = entry.hits + 1, time.monotonic()
                self._entries[found.id] = entry

    def wants(self, ids: Sequence[int]) -> bool:
        """Tell whether `insert` would look at arrays of `ids`: they are long enough, not stored, and not switched off.

        Ask before the engine copies them.
        """
        with self._lock:
            return self._wants(tuple(ids))

    def _wants(self, ids: tuple[int, ...]) -> bool:
        is_stored = any(entry.prefix.ids == ids for entry in self._entries.values())
        return self.budget_bytes > 0 and len(ids) >= self.floor and not is_stored

    def insert(self, ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> int | None:
        """Store a prefix, and evict what it takes the room of.

        Args:
            arrays: what the engine dumped at position len(ids); they are taken over, not copied.

        Returns:
            Its id; None when it is not wanted, or larger than what is not pinned leaves; then nothing was evicted.
        """
        ids, arrays = tuple(ids), MappingProxyType(dict(arrays))
        nbytes = sum(array.nbytes for array in arrays.values())
        with self._lock:
            pinned = sum(entry.nbytes for entry in self._entries.values() if entry.is_pinned)
            if not self._wants(ids) or pinned + nbytes > self.budget_bytes:
                return None
            over = self._bytes() + nbytes - self.budget_bytes
            for id, entry in list(self._entries.items()):
                if over <= 0:
                    break
                if not entry.is_pinned:
                    over -= self._entries.pop(id).nbytes
                    self._evictions += 1
            prefix = HostPrefix(id=next(self._numbers), ids=ids, arrays=arrays)
            self._entries[prefix.id] = _Entry(prefix, nbytes, time.monotonic())
        return prefix.id

    def prefix(self, id: int) -> HostPrefix:
        """Return an entry as it was stored; this is no use of it.

        Raises:
            RequestError: there is no such entry.
        """
        with self._lock:
            return self._entry(id).prefix

    def pin(self, id: int, is_pinned: bool = True) -> None:
        """Keep an entry from being evicted, or allow it again.

        Raises:
            RequestError: there is no such entry.
        """
        with self._lock:
            self._entry(id).is_pinned = is_pinned

    def delete(self, id: int) -> None:
        """Forget an entry, pinned or not.

        Raises:
            RequestError: there is no such entry.
        """
        with self._lock:
            self._entry(id)
            del self._entries[id]

    def clear(self) -> None:
        """Forget all entries, pinned ones too; the counts go on."""
        with self._lock:
            self._entries.clear()

    def stats(self) -> HostStats:
        """Return what is stored and what was counted."""
        with self._lock:
            return HostStats(
                entries=len(self._entries),
                tokens=sum(entry.prefix.length for entry in self._entries.values()),
                bytes=self._bytes(),
                budget_bytes=self.budget_bytes,
                hits=self._hits,
                misses=MappingProxyType({miss: self._misses[miss] for miss in get_args(Miss)}),
                evictions=self._evictions,
            )

    def entries(self) -> list[HostEntry]:
        """Return the rows of a table, the most recently used first."""
        now = time.monotonic()
        with self._lock:
            return [
                HostEntry(
                    id=id,
                    tokens=entry.prefix.length,
                    mib=entry.nbytes / MIB,
                    hits=entry.hits,
                    idle_s=max(0.0, now - entry.used_at),
                    is_pinned=entry.is_pinned,
                )
                for id, entry in reversed(self._entries.items())
            ]

    def _bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    def _entry(self, id: int) -> _Entry:
        entry = self._entries.get(id)
        if entry is None:
            known = ", ".join(map(str, self._entries)) or "none"
            raise RequestError(f"the host cache has no entry {id!r}; stored are: {known}", param="id")
        return entry
