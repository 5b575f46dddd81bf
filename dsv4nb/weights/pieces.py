"""Stored tensors → the pieces in which their files are read, pure.

A batch is tensors of one shape, dtype and placement, which are taken together and stand under each other on each rank,
such as a matrix of some experts. A piece fits the memory that one read goes into; every byte is in one piece, whoever
has it: what several ranks have is read once and copied to each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dsv4nb.weights.placement import Part, Placement, Stored

Span = tuple[int, int]  # bytes [first, last) of a stored tensor


class Piece(NamedTuple):
    """Bytes that are read one after the other: the same ones of each of some tensors.

    Attributes:
        names: of the tensors; `row` is the place of the first of them in its batch.
        first, last: the bytes [first, last) of each.
        holders: ranks that have them.
    """

    names: tuple[str, ...]
    row: int
    first: int
    last: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return len(self.names) * (self.last - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors that are taken together.

    Attributes:
        stored: what each of them is.
        parts: of each rank, what it holds of every one of the tensors.
        spans: of each rank, the bytes of a tensor that are copied to it; None where it holds nothing. Columns are cut
            out on the rank's device, since copies of whole rows are faster.
    """

    names: tuple[str, ...]
    stored: Stored
    parts: tuple[Part | None, ...]
    spans: tuple[Span | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return len(self.names) * self.stored.nbytes

    def held_bytes(self, rank: int) -> int:
        """Return the bytes that `rank` holds."""
        part = self.parts[rank]
        if part is None:
            return 0
        extent = self.stored.shape[part.axis] if self.stored.shape else 1
        return self.nbytes * (part.last - part.first) // extent

    @property
    def copied_bytes(self) -> int:
        """Bytes that the ranks get, all together."""
        return len(self.names) * sum(span[1] - span[0] for span in self.spans if span is not None)


def batch_of(names: tuple[str, ...], entries: Mapping[str, Stored], placement: Placement) -> Batch:
    """Return the batch of tensors of one shape, dtype and placement."""
    stored, parts = entries[names[0]], placement.parts(names[0])
    return Batch(names=names, stored=stored, parts=parts, spans=tuple(_span(stored, part) for part in parts))


def pieces_of(batch: Batch, limit: int) -> Iterator[Piece]:
    """Cut a batch into pieces of `limit` bytes at most, each for the same ranks."""
    names = batch.names
    for first, last, holders in _shared(batch.spans):
        step = max(limit // (last - first), 1)
        for row in range(0, len(names), step):
            some = names[row : row + step]
            for start in range(first, last, limit):
                yield Piece(names=some, row=row, first=start, last=min(start + limit, last), holders=holders)


def _span(stored: Stored, part: Part | None) -> Span | None:
    if part is None:
        return None
    if part.axis or not stored.shape:
        return 0, stored.nbytes
    row = stored.nbytes // stored.shape[0]
    return part.first * row, part.last * row


def _shared(spans: Sequence[Span | None]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (first, last, ranks) of bytes that the same ranks have."""
    held = {rank: span for rank, span in enumerate(spans) if span is not None}
    for first, last in pairwise(sorted({edge for span in held.values() for edge in span})):
        holders = tuple(rank for rank, span in held.items() if span[0] <= first and last <= span[1])
        if holders:
            yield first, last, holders
