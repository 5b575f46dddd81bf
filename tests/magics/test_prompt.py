"""Variables before the prompt, and values in it."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from dsv4nb.magics.prompt import attached, filled


class RangeIndex:
    """Counts the rows of a table."""


class Index:
    """Names the rows of a table."""


class Frame:
    """What a data frame of pandas looks like from here."""

    def __init__(self, index: Any) -> None:
        self.index, self.shape = index, (2, 1)

    def to_csv(self, *, index: bool) -> str:
        return ",a\nx,1\ny,2\n" if index else "a\n1\n2\n"


def test_text_goes_in_as_it_is_behind_a_label() -> None:
    block = attached("notes", {"notes": "first line\n{second}"}).block
    assert block == "`notes` (str, 19 characters):\n```text\nfirst line\n{second}\n```"


def test_nothing_in_a_text_closes_its_fence() -> None:
    block = attached("notes", {"notes": "```python\nx\n```` and ```"}).block
    assert block.splitlines()[1] == "`````text" and block.splitlines()[-1] == "`````"


@pytest.mark.parametrize(("index", "text"), [(RangeIndex(), "a\n1\n2"), (Index(), ",a\nx,1\ny,2")])
def test_a_table_goes_in_as_csv_with_names_of_rows_if_it_has_them(index: Any, text: str) -> None:
    block = attached("df", {"df": Frame(index)}).block
    assert block == f"`df` (Frame, 2 rows, 1 column):\n```csv\n{text}\n```"


def test_anything_else_goes_in_as_python_shows_it() -> None:
    assert attached("n", {"n": {"a": 1}}).block == "`n` (dict):\n```python\n{'a': 1}\n```"


def test_a_missing_variable_is_named_with_a_near_one() -> None:
    with pytest.raises(UsageError, match=r"--with names 'note', and there is no such variable; did you mean notes\?"):
        attached("note", {"notes": "", "_note": ""})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no braces", "no braces"),
        ("{n} and {n + 1}", "3 and 4"),
        ("{n:02d}{x:.1f}{s!r}{s:>{n}}", "032.5'é'  é"),
        ("{s!a} {d[k]} {{n}}", "'\\xe9' 7 {n}"),
        ("{sum(i * n for i in range(3))} {len(s)}", "9 1"),
    ],
)
def test_values_take_the_place_of_expressions(text: str, expected: str) -> None:
    names = {"n": 3, "x": 2.46, "s": "é", "k": "key", "d": {"key": 7}}
    assert filled(text, names) == expected
    assert set(names) == {"n", "x", "s", "k", "d"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{nope}", "{nope} failed: NameError: name 'nope' is not defined"),
        ("{1 / 0}", "{1 / 0} failed: ZeroDivisionError: division by zero"),
        ("{1 +}", "{1 +} failed: SyntaxError"),
        ("{n:zz}", "{n} failed: ValueError"),
        ("{}", "{} holds no expression"),
        ("if (a) {", "Single '{' encountered in format string; braces that are text are written twice: {{ }}"),
        ("}", "Single '}' encountered in format string; braces"),
    ],
)
def test_a_failing_expression_is_named_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        filled(text, {"n": 3})
    assert said in str(caught.value) and "\n" not in str(caught.value)
