"""How far into the caches a forward on a GPU looks, pure.

A captured graph has fixed shapes: it reads as many entries at position 10 as at the last one that it serves. So there
are a few extents, each twice the one before. A forward takes the smallest that holds its rows, which the host knows,
and a graph is captured for each. What lies behind the entries that a row sees changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator

FEWEST = 2048  # positions of the smallest, in which no indexer has to choose: it would take all the entries there are


def extent_of(positions: int, max_seq: int) -> int:
    """Return the positions that a forward covers which ends before position `positions`: 2048, 4096 … `max_seq`."""
    return min(max(FEWEST, 1 << (positions - 1).bit_length()), max_seq)


def extents(max_seq: int) -> Iterator[int]:
    """Yield all of them, the smallest first."""
    size = extent_of(0, max_seq)
    yield size
    while size < max_seq:
        size = extent_of(size + 1, max_seq)
        yield size
