"""Known answers of the sampler: numbers that others published, and draws that must never become others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsv4nb.config import SamplerConfig
from dsv4nb.doctor.plan import Compared, Comparison, Plan
from dsv4nb.engine.sampler import choose, exponential, philox_rounds, uniform
from dsv4nb.handle import Model

# counter, key, result: what Random123 publishes for philox4x32-10
_PHILOX = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)

# seed, position, memra's keyed uniform number
_UNIFORMS = (
    (0, 0, 0.8833108082136426),
    (0, 1, 0.43550389312347204),
    (0, 2, 0.5371701282200345),
    (7, 0, 0.3898297483912715),
    (7, 160, 0.7839042818505566),
    (20260822, 1, 0.48337457467992573),
)

_TIES = (((1, 3, 3, 2, 3), 1), ((0, 0, 0), 0), ((-1, -5, -1), 0), ((2, 2.5, -np.inf, 2.5), 1))

# ids at positions 0, 1, … of the row with the logit 2 sin(id) for 64 ids, by the formulas of the race and of the walk
# in float64: the winner is ahead by 0.029 at least, and no walk ends nearer than 0.0013 to a border
_SEED = 7
_DRAWS: Mapping[str, tuple[Mapping[str, Any], Sequence[int]]] = {
    "gumbel": ({}, (13, 27, 1, 59, 58, 57, 33, 39, 7, 47, 53, 51)),
    "gumbel, top-k 8": ({"top_k": 8}, (52, 27, 58, 20, 58, 27, 33, 39, 14, 52, 8, 8)),
    "gumbel, top-p 0.5, T 0.7": (
        {"top_p": 0.5, "temperature": 0.7},
        (52, 27, 58, 20, 58, 27, 33, 39, 14, 2, 8, 8),
    ),
    "inverse CDF": ({"sampler": "inverse_cdf"}, (2, 20, 14, 9, 34, 8, 2, 26, 58, 15, 58, 33)),
}


def _philox() -> Compared:
    for counter, key, expected in _PHILOX:
        low, high = _words(key)
        found = philox_rounds(np.array([_words(counter)], np.uint32).T.copy(), (low, high))[:, 0].tolist()
        if found != _words(expected):
            said = " ".join(f"{word:08x}" for word in found)
            return _told("philox vector", _PHILOX, f"philox of counter {counter}, key {key}: {said}, not {expected}")
    return _told("philox vector", _PHILOX)


def _uniforms() -> Compared:
    for seed, position, expected in _UNIFORMS:
        if (found := uniform(seed, position)) != expected:
            what = f"the keyed uniform number of seed {seed}, position {position}: {found!r}, not {expected!r}"
            return _told("keyed uniform number", _UNIFORMS, what)
    return _told("keyed uniform number", _UNIFORMS)


def _ties() -> Compared:
    for logits, expected in _TIES:
        if (found := choose(np.array(logits, np.float32), SamplerConfig(temperature=0), 0)) != expected:
            return _told("greedy tie", _TIES, f"greedy over {list(logits)}: id {found}, not {expected}")
    return _told("greedy tie", _TIES)


def _arrivals() -> Compared:
    words = (0, 1, 2**31, 2**32 - 129, 2**32 - 1)
    with np.errstate(all="ignore"):
        times = exponential(np.array(words, np.uint32))
    if not (np.isfinite(times).all() and (times > 0).all() and (np.diff(times) >= 0).all()):
        return _told("arrival time", words, f"the arrival times of the words {list(words)} are {times.tolist()}")
    return _told("arrival time", words)


def _draws() -> Compared:
    row = (2 * np.sin(np.arange(64))).astype(np.float32)
    drawn = [id for _, ids in _DRAWS.values() for id in ids]
    for name, (options, ids) in _DRAWS.items():
        config = SamplerConfig(seed=_SEED, **options)
        for position, expected in enumerate(ids):
            if (found := choose(row, config, position)) != expected:
                return _told("draw", drawn, f"{name}, seed {_SEED}, position {position}: id {found}, not {expected}")
    return _told("draw", drawn)


def _told(noun: str, answers: Sequence[object], difference: str = "") -> Compared:
    return Compared(counts={noun: len(answers)}, difference=difference)


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _comparisons(model: Model) -> list[Comparison]:
    return [_philox, _uniforms, _ties, _arrivals, _draws]


PLAN = Plan(name="sampler", told="draws against known answers", weight=1, comparisons=_comparisons)
