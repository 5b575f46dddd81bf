"""Reading JSON that others wrote: one spelling per object, finite numbers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: broken JSON or UTF-8, not an object, a repeated key, NaN or Infinity.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite)
    except RecursionError as e:
        raise ValueError("JSON is nested too deeply") from e
    if not isinstance(value, dict):
        raise ValueError(f"JSON is a {type(value).__name__}, not an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises OSError, or ValueError as `parse_object` does."""
    return parse_object(path.read_bytes())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
