"""What the long runs go over: the bundled model, and random ones with every kind of layer. For scripts of this folder.

A random model says any bytes, and what it said seldom comes back as the same ids once it is rendered as text. So half
of what runs on one lets it say printable ASCII alone, one id a character, which always comes back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4nb.checkpoint.inventory import Drafter
from dsv4nb.model import Model, load
from dsv4nb.testing.tiny_checkpoint import Format, write_tiny_checkpoint
from dsv4nb.testing.tiny_tokenizer import write_tiny_tokenizer

KINDS = ("toy", "tiny")
# the tiny ones in turn
FORMATS: tuple[tuple[Format, Drafter], ...] = (
    ("fp8fp4", "none"), ("bf16", "dspark"), ("fp8fp4", "dspark"), ("bf16", "none")
)  # fmt: skip
CONTRACTS = ("ref_fp8_round", "fp32_full")
WORDS = ("Anna", "went", "to", "Rome", "Paris", "on", "Monday", "with", "a", "golden", "key", "and", "sang")
LENGTHS = {"toy": (1, 3, 12, 60, 150), "tiny": (1, 3, 12, 40, 70)}  # words of a message; at most 400 tokens or so


def write_model(kind: str, folder: Path, number: int = 0) -> str | Path:
    """Return what `load` takes: "toy", or a random checkpoint in `folder`, another one for each number."""
    if kind == "toy":
        return "toy"
    path = folder / f"tiny{number}"
    if not path.is_dir():
        fmt, drafter = FORMATS[number % len(FORMATS)]
        write_tiny_tokenizer(write_tiny_checkpoint(path, fmt=fmt, drafter=drafter, seed=number))
    return path


@contextmanager
def opened(kind: str, folder: Path, number: int = 0, **options: Any) -> Iterator[Model]:
    """Load a model; of eight tiny ones the last four compute without rounding."""
    contract = {} if kind == "toy" else {"contract": CONTRACTS[number // len(FORMATS) % len(CONTRACTS)]}
    with load(write_model(kind, folder, number), **contract, **options) as model:
        yield model


def text(kind: str, rng: random.Random) -> str:
    """Return a message."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice(LENGTHS[kind])))


def printable(model: Model) -> dict[int, float]:
    """Return the bias under which a tiny model says printable ASCII and its end, now and then."""
    said = {model.encode(chr(code))[0] for code in range(0x20, 0x7F)}
    return {i: 3.0 if i == model.eos else -math.inf for i in range(model.limits.vocab_size) if i not in said}
