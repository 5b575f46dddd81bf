from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from dsv4nb.session.tool_text import LIMIT, MAX_ROWS, result_text


class Colour(enum.Enum):
    RED = 1


class Size(str, enum.Enum):  # noqa: UP042  the older spelling
    LARGE = "large"


@dataclasses.dataclass
class Point:
    x: float
    near: Any = None


class Thing:
    def __repr__(self) -> str:
        return "<a thing>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        (float("nan"), "NaN"),
        ({"z": 1, "a": [1, {"é": None}]}, '{"z": 1, "a": [1, {"é": null}]}'),
        (OrderedDict(z=1, a=2), '{"z": 1, "a": 2}'),
        (types.MappingProxyType({"z": 1}), '{"z": 1}'),
        ((1, "b"), '[1, "b"]'),
        ({3, 1, 2}, "[1, 2, 3]"),
        ({1: "a"}, '{"1": "a"}'),
        ({(1, 2): "a"}, "{(1, 2): 'a'}"),
        (Point(1.5, Point(2.0)), '{"x": 1.5, "near": {"x": 2.0, "near": null}}'),
        ([Point], "[\"<class 'tests.session.test_tool_text.Point'>\"]"),
        (Colour.RED, "RED"),
        (Size.LARGE, "large"),
        ([Colour.RED, Size.LARGE], '["RED", "large"]'),
        (Thing(), "<a thing>"),
        ([Thing()], '["<a thing>"]'),
        (b"ab", "b'ab'"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (np.int64(3), "3"),
        (np.float32(0.1), "0.1"),
        (np.bool_(True), "true"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        (np.array([0.1, 2], np.float32), "[0.1, 2.0]"),
        ({"mean": np.float64(0.5), "n": np.int8(2), "rows": np.arange(3)}, '{"mean": 0.5, "n": 2, "rows": [0, 1, 2]}'),
        (torch.tensor([1, 2]), "[1, 2]"),
        (torch.tensor(2.5), "2.5"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_reads_well(value: object, text: str) -> None:
    assert result_text(value).replace(f"{__name__}.", "tests.session.test_tool_text.") == text


def test_what_json_cannot_hold_is_shown_as_python_does() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert result_text(loop) == "[1, [...]]"
    point = Point(1.0)
    point.near = point
    assert result_text(point) == "Point(x=1.0, near=...)"


def test_a_large_array_shows_its_corners() -> None:
    array = np.arange(5000).reshape(50, 100)
    assert result_text(array) == repr(array)
    assert json.loads(result_text({"a": array})) == {"a": repr(array)}


class Table:
    """What is used of a pandas DataFrame."""

    def __init__(self, n: int, *, index: object) -> None:
        self.n, self.index = n, index

    def __len__(self) -> int:
        return self.n

    def head(self, n: int) -> Table:
        return Table(min(n, self.n), index=self.index)

    def to_csv(self, *, index: bool) -> str:
        return ("i,a\n" if index else "a\n") + "".join(f"{i},{i}\n" if index else f"{i}\n" for i in range(self.n))


RangeIndex = type("RangeIndex", (), {})


def test_a_table_is_csv_with_the_names_of_its_rows_if_it_has_some() -> None:
    assert result_text(Table(2, index=RangeIndex())) == "a\n0\n1\n"
    assert result_text(Table(2, index=["x", "y"])) == "i,a\n0,0\n1,1\n"
    assert json.loads(result_text([Table(1, index=RangeIndex())])) == ["a\n0\n"]


def test_a_long_table_tells_its_length() -> None:
    lines = result_text(Table(1200 + MAX_ROWS, index=RangeIndex())).splitlines()
    assert len(lines) == MAX_ROWS + 2 and lines[-2:] == [str(MAX_ROWS - 1), "[1,200 more rows left out]"]


def test_a_long_text_is_cut_and_says_so() -> None:
    assert result_text("a" * LIMIT) == "a" * LIMIT
    assert result_text("a" * (LIMIT + 1234)) == "a" * LIMIT + "\n[1,234 more characters left out]"
    assert result_text(["é" * LIMIT]) == '["' + "é" * (LIMIT - 2) + "\n[4 more characters left out]"


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert result_text("a\ud800b") == "a?b"
    assert result_text(["\ud800"]) == '["?"]'
    assert result_text("😀") == "😀"
