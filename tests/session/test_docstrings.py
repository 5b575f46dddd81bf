from __future__ import annotations

import random
import sys

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.session.docstrings import Documented, read_docstring

GOOGLE = """Tell the weather
    of a city.

    Asks nobody.

    Args:
        city: name of it,
            in English
        days (int, optional): how many: 1 to 7
        nobody: is no parameter

    Returns:
        str: days of it
    """
NUMPY = """Tell the weather
    of a city.

    Parameters
    ----------
    city : str
        name of it,
        in English
    days, hours : int, optional
        how many: 1 to 7

    Returns
    -------
    str
        days of it
    """
REST = """Tell the weather
    of a city.

    :param city: name of it,
        in English
    :param int days: how many: 1 to 7
    :type city: str
    :returns: days of it
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_the_three_styles_say_the_same(text: str) -> None:
    assert read_docstring(text, ["city", "days"]) == Documented(
        summary="Tell the weather of a city.",
        parameters={"city": "name of it, in English", "days": "how many: 1 to 7"},
    )


def test_numpy_may_describe_several_at_once() -> None:
    assert read_docstring(NUMPY, ["hours"]).parameters == {"hours": "how many: 1 to 7"}


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (None, ""),
        ("", ""),
        ("  \n ", ""),
        ("One.", "One."),
        ("One\n    and a half.\n\n    Two.", "One and a half."),
        ("One.\n:param x: it", "One."),
        ("One.\nArgs:\n    x: it", "One."),
        ("Uses\n\n:class:`Foo` here.\n\nArgs:\n    x: it", "Uses"),
    ],
)
def test_the_summary_is_the_first_paragraph(text: str | None, summary: str) -> None:
    assert read_docstring(text, ["x"]).summary == summary


def test_a_role_at_the_start_of_a_line_hides_no_arguments() -> None:
    assert read_docstring("Uses\n\n:class:`Foo` here.\n\nArgs:\n    x: it", ["x"]).parameters == {"x": "it"}


def test_no_text_is_too_odd() -> None:
    draw = random.Random(4)
    pieces = (
        "Args:",
        "Parameters",
        "-----",
        "x: a",
        "x (int): b",
        ":param x: c",
        ":",
        "::",
        "    ",
        "\n",
        "\n\n",
        "é (",
    )
    for _ in range(3000):
        text = "".join(draw.choice(pieces) + draw.choice(("", "\n", " ")) for _ in range(draw.randint(0, 12)))
        read = read_docstring(text, ["x"])
        assert set(read.parameters) <= {"x"} and "\n" not in read.summary


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docstring_parser", None)
    assert read_docstring("", ["x"]) == Documented()
    with pytest.raises(RequestError, match="pip install docstring_parser"):
        read_docstring("One.", ["x"])
