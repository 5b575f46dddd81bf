"""What is kept out of training, decided by a stable hash before anything is generated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from dsv4nb.toy.corpus.world import ADJECTIVES, CITIES, NOUNS, PEOPLE

HELD_OUT_SHARE = 8  # one in so many


def is_held_out(kind: str, item: object) -> bool:
    """Whether `item` belongs to the evaluation; the same on every machine and run."""
    return zlib.crc32(f"{kind}/{item}".encode()) % HELD_OUT_SHARE == 0


def is_held_out_pair(a: int, b: int) -> bool:
    """Whether the operand pair is evaluation only, in any operation and order; one-digit operands never are."""
    low, high = sorted((a, b))
    return low >= 10 and is_held_out("operands", f"{low},{high}")


def is_held_out_phrase(adjective: str, noun: str) -> bool:
    """Whether the two-word phrase is evaluation only."""
    return is_held_out("phrase", f"{adjective} {noun}")


def _split(kind: str, items: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (
        tuple(i for i in items if not is_held_out(kind, i)),
        tuple(i for i in items if is_held_out(kind, i)),
    )


TRAIN_CITIES, HELD_OUT_CITIES = _split("city", CITIES)
TRAIN_PEOPLE, HELD_OUT_PEOPLE = _split("person", PEOPLE)
_PHRASES = [(a, n) for a in ADJECTIVES for n in NOUNS]
TRAIN_PHRASES = tuple(f"{a} {n}" for a, n in _PHRASES if not is_held_out_phrase(a, n))
HELD_OUT_PHRASES = tuple(f"{a} {n}" for a, n in _PHRASES if is_held_out_phrase(a, n))
