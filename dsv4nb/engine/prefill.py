"""How a prompt is cut into chunks."""

from __future__ import annotations

from itertools import pairwise

from dsv4nb.engine.cache import PREFILL_ROWS


def chunk_plan(pos: int, count: int, chunk: int = PREFILL_ROWS) -> list[tuple[int, int]]:
    """Cut `count` rows from position `pos` on at the multiples of `chunk`.

    Returns:
        (first, last + 1) of each chunk, counted from the first row.
    """
    edges = [pos, *range(pos // chunk * chunk + chunk, pos + count, chunk), pos + count]
    return [(first - pos, last - pos) for first, last in pairwise(edges)]
