"""How a prompt is cut into chunks.

Where a prompt goes the way of decode rows, every cut gives the same bits, so the plan is free to serve speed alone:
chunks begin at multiples of their size and fill whole tiles of eight rows, wherever a prompt begins. A short tail is
one small chunk, not rows one by one, and needs no plan of its own. Between two chunks a run can be stopped and tells
how far it is.

A GPU has kernels for whole chunks too, "fast", which add in another order than decode rows do. There a row's bits
depend on which of the two ways it went, and that is the plan's alone: the same rows cut at the same places are the same
bits again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

from dsv4nb.engine.cache import PREFILL_ROWS

PrefillForm = Literal["fast", "exact"]
FORMS: tuple[PrefillForm, ...] = get_args(PrefillForm)
FAST_ROWS = 2048  # rows of one fast chunk
FAST_ROWS_MAX = 4096
FEW_ROWS = 512  # up to here chunks come in steps of 64 rows, beyond it in steps of 256: see `padded_rows`
FEWEST_ROWS = 32  # fewer read less as decode rows: a chunk reads the experts of a layer almost all


def chunk_plan(pos: int, count: int, chunk: int = PREFILL_ROWS) -> list[tuple[int, int]]:
    """Cut `count` rows from position `pos` on at the multiples of `chunk`.

    Returns:
        (first, last + 1) of each chunk, counted from the first row; none for no rows.
    """
    if count == 0:
        return []
    edges = [pos, *range(pos // chunk * chunk + chunk, pos + count, chunk), pos + count]
    return [(first - pos, last - pos) for first, last in pairwise(edges)]


def fast_plan(count: int, chunk: int = FAST_ROWS) -> list[tuple[int, int]]:
    """Cut `count` rows into chunks of `chunk` rows from the first one on, and a rest; see `is_fast`."""
    return [(first, min(first + chunk, count)) for first in range(0, count, chunk)]


def padded_rows(tokens: int) -> int:
    """Return of how many rows a chunk of so many tokens is: few lengths are launched, and each can be a graph."""
    step = 64 if tokens <= FEW_ROWS else 256
    return -(-tokens // step) * step


def is_fast(rows: int) -> bool:
    """Tell whether a piece of a `fast_plan` goes through the kernels of a chunk; shorter ones are decode rows."""
    return rows >= FEWEST_ROWS
