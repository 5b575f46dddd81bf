"""A docstring → what it says of the whole and of each parameter: Google, NumPy and reST style."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field

from dsv4nb.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """What a docstring says.

    Attributes:
        summary: the first paragraph on one line, "" when there is none.
        parameters: description by name, of those that have one.
    """

    summary: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None, names: Collection[str]) -> Documented:
    """Read a docstring in the style that describes most of `names`.

    Raises:
        RequestError: the package that knows the styles is not installed.
    """
    text = inspect.cleandoc(text or "")
    if not text:
        return Documented()
    try:
        from docstring_parser import DocstringStyle, ParseError, parse
    except ImportError as error:
        raise RequestError(
            "docstrings of tools are read with docstring_parser, which is not installed; pip install docstring_parser",
            param="tools",
        ) from error
    best = Documented(summary=_one_line(text.partition("\n\n")[0]))
    for style in (DocstringStyle.GOOGLE, DocstringStyle.NUMPYDOC, DocstringStyle.REST):
        try:
            parsed = parse(text, style)
        except (ParseError, IndexError):  # text that looks like this style's and is not, such as a lone "::"
            continue
        described = {
            name.strip(): _one_line(description)
            for parameter in parsed.params
            if (description := parameter.description)
            for name in parameter.arg_name.split(",")  # NumPy: "x, y : float"
            if name.strip() in names
        }
        if len(described) > len(best.parameters):
            summary = parsed.short_description or ""
            if not parsed.blank_after_short_description and parsed.long_description:
                summary += "\n" + parsed.long_description.partition("\n\n")[0]
            best = Documented(summary=_one_line(summary), parameters=described)
    return best


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())
