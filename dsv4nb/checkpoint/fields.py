"""Strict reading of one JSON object: every key is used or named, nothing has a default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dsv4nb.errors import CheckpointError


class Fields:
    """The keys of one object of a file, read one by one.

    Args:
        raw: the parsed object.
        source: file, as messages name it.
        prefix: path of the object inside the file, e.g. "rope_scaling.".
    """

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw = raw
        self._read: set[str] = set()
        self.source = source
        self.prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the key is there."""
        return name in self.raw

    def value(self, name: str) -> Any:
        """The value of a required key, unchecked."""
        self._read.add(name)
        if name not in self.raw:
            raise CheckpointError(f"{self.source} lacks {self.prefix}{name}", param=self.prefix + name)
        return self.raw[name]

    def integer(self, name: str, low: int = 1, high: int | None = None) -> int:
        """A whole number in [low, high]."""
        v = self.value(name)
        self.require(type(v) is int and low <= v, name, f"a whole number, at least {low}")
        self.require(high is None or v <= high, name, f"at most {high}")
        return int(v)

    def number(self, name: str, low: float = 0.0) -> float:
        """A finite number > low."""
        v = self.value(name)
        ok = type(v) in (int, float) and math.isfinite(v) and v > low
        self.require(ok, name, f"a finite number > {low:g}")
        return float(v)

    def fixed(self, name: str, *allowed: object) -> None:
        """Check a key that must be there and have a value this version implements."""
        v = self.value(name)
        ok = any(type(v) is type(a) and v == a for a in allowed)
        self.require(ok, name, " or ".join(repr(a) for a in allowed) + ", the only one implemented")

    def choice(self, name: str, allowed: Iterable[str]) -> str:
        """A word out of `allowed`."""
        v = self.value(name)
        names = tuple(allowed)
        self.require(isinstance(v, str) and v in names, name, "one of " + ", ".join(names))
        return str(v)

    def integers(self, name: str, is_valid: Callable[[int], bool], each: str) -> tuple[int, ...]:
        """A list of whole numbers that are all valid; `each` says what valid is."""
        v = self.value(name)
        ok = isinstance(v, list) and all(type(x) is int and is_valid(x) for x in v)
        self.require(ok, name, f"a list of whole numbers, each {each}")
        return tuple(v)

    def inside(self, name: str) -> Fields:
        """The object under a required key."""
        v = self.value(name)
        self.require(isinstance(v, dict), name, "an object")
        return Fields(v, self.source, f"{self.prefix}{name}.")

    def require(self, holds: bool, name: str, limit: str) -> None:
        """Refuse `name` unless `holds`; the message gives the value and the limit."""
        if not holds:
            raise CheckpointError(
                f"{self.source}: {self.prefix}{name} is {self.raw.get(name)!r}; it must be {limit}",
                param=self.prefix + name,
            )

    def finish(self, ignored: Mapping[str, str]) -> None:
        """Refuse every key that was not read; `ignored` maps keys to the reason they may be skipped."""
        for name in sorted(self.raw.keys() - self._read - ignored.keys()):
            raise CheckpointError(
                f"{self.source} has the unknown field {self.prefix}{name}; refusing to guess what it changes. "
                "Remove it if it changes nothing, or load with a version that knows it.",
                param=self.prefix + name,
            )
