"""Rows as text, as HTML that needs no kernel, and as a data frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dsv4nb.errors import RequestError

Facts = Sequence[tuple[str, str]]
Grid = Sequence[Sequence[str]]


def as_text(facts: Facts, grid: Grid = ()) -> str:
    """Return facts as lines, and below them a table whose first row names its columns and whose first column names
    its rows."""
    lines = [f"{label:<12}{value}" for label, value in facts]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    for name, *cells in grid:
        lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip())
    return "\n".join(lines)


def as_html(facts: Facts, grid: Grid = ()) -> str:
    """Return the same as tables."""
    cells = [_row((("th", "left", label), ("td", "left", value))) for label, value in facts]
    tables = [cells] if facts else []
    if grid:
        header, *body = grid
        rows = [_row([("th", "right", cell) for cell in header])]
        rows += [_row([("th", "left", name), *(("td", "right", cell) for cell in cells)]) for name, *cells in body]
        tables.append(rows)
    return "".join(f"<table>{''.join(rows)}</table>" for rows in tables)


def _row(cells: Sequence[tuple[str, str, str]]) -> str:
    told = (f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>' for tag, side, text in cells)
    return f"<tr>{''.join(told)}</tr>"


def percent(share: float | None) -> str:
    """Return a share as people read it; a dash where there was nothing to count."""
    return "–" if share is None else f"{share:.1%}".replace("%", " %")


def decimal(value: float | None, digits: int = 2) -> str:
    """Return a number as people read it; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def data_frame(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> Any:
    """Return a pandas data frame.

    Raises:
        RequestError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError("a data frame needs pandas, which is not installed; pip install pandas") from error
    return pandas.DataFrame([dict(row) for row in rows], columns=list(columns))
