"""What a tool returned → text that a model reads."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import math
from typing import Any

LIMIT = 20_000  # characters of a result; 5,000 tokens or so
MAX_ROWS = 200  # of a table
MAX_ITEMS = 1000  # of an array; of a larger one numpy and torch show the corners

_JSON = (dict, list, tuple, bool, int, float, type(None))


def result_text(value: object) -> str:
    """Return text as it is, JSON as JSON, a table as CSV, anything else as Python shows it; at most `LIMIT` characters.

    A longer text is cut, and says how much was left out. Half surrogate pairs, which no tokenizer takes, become
    question marks.
    """
    plain = value if isinstance(value, _JSON) else _plain(value)
    if isinstance(plain, str):
        text = str.__str__(plain)  # an Enum of text has another one
    else:
        try:
            text = json.dumps(plain, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError):  # keys that are no text, a list that holds itself
            text = repr(value)
    text = text.encode(errors="replace").decode()
    left_out = len(text) - LIMIT
    return text if left_out <= 0 else f"{text[:LIMIT]}\n[{left_out:,} more characters left out]"


def _plain(value: Any) -> Any:
    """Return what stands for `value` in JSON; packages that may not be installed are known by their looks."""
    if isinstance(value, str):
        return value
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, collections.abc.Set):
        return sorted(value, key=repr)
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, type):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    if hasattr(value, "to_csv") and hasattr(value, "index"):  # pandas
        return _table(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy, torch
        return _array(value)
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    return repr(value)


def _array(value: Any) -> Any:
    """Return a number, nested lists, or the text in which the package shows a large array."""
    if math.prod(value.shape) > MAX_ITEMS:
        return repr(value)
    if getattr(value.dtype, "kind", "") == "f" and value.dtype.itemsize < 8:
        value = value.astype(str).astype(float)  # 0.1, which is 0.10000000149011612 in twice as many bits
    return value.tolist()


def _table(value: Any) -> str:
    has_names = type(value.index).__name__ != "RangeIndex"
    head = value.head(MAX_ROWS).to_csv(index=has_names)
    more = len(value) - MAX_ROWS
    return head if more <= 0 else f"{head}[{more:,} more rows left out]"
