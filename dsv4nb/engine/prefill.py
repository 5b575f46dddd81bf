"""How a prompt is cut into chunks.

Every cut gives the same bits, so the plan is free to serve speed alone: chunks begin at multiples of their size and
fill whole tiles of eight rows, wherever a prompt begins. A short tail is one small chunk, not rows one by one, and
needs no plan of its own. Between two chunks a run can be stopped and tells how far it is.
"""

from __future__ import annotations

from itertools import pairwise

from dsv4nb.engine.cache import PREFILL_ROWS


def chunk_plan(pos: int, count: int, chunk: int = PREFILL_ROWS) -> list[tuple[int, int]]:
    """Cut `count` rows from position `pos` on at the multiples of `chunk`.

    Returns:
        (first, last + 1) of each chunk, counted from the first row; none for no rows.
    """
    if count == 0:
        return []
    edges = [pos, *range(pos // chunk * chunk + chunk, pos + count, chunk), pos + count]
    return [(first - pos, last - pos) for first, last in pairwise(edges)]
