"""Many requests at once: what they begin with in common is computed once."""

from __future__ import annotations

import string
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.session.reuse import common_prefix

WORTH = 16  # tokens of the shortest beginning that is kept for the others
_ABOVE = 1 << 62  # more than any id


def shared_beginnings(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return, for each prompt, at which lengths its run should keep what later ones begin with."""
    later: list[tuple[int, ...]] = []  # sorted, so that those with a common beginning stand together
    marks: list[tuple[int, ...]] = []
    for prompt in map(tuple, reversed(prompts)):
        low = high = place = bisect_left(later, prompt)
        lengths = []
        while (n := max(_common(later[low - 1 : low], prompt), _common(later[high : high + 1], prompt))) >= WORTH:
            lengths.append(n)
            # leave out all that begin with these n, and ask again
            low = bisect_left(later, prompt[:n], 0, low)
            high = bisect_left(later, (*prompt[:n], _ABOVE), high)
        marks.append(tuple(n for n in reversed(lengths) if n < len(prompt)))
        later.insert(place, prompt)
    return marks[::-1]


def _common(neighbour: Sequence[Sequence[int]], prompt: Sequence[int]) -> int:
    return common_prefix(prompt, neighbour[0]) if neighbour else 0


def rows_of(table: object) -> list[dict[str, Any]]:
    """Return the rows of a data frame, or of a sequence of mappings.

    Raises:
        RequestError: it is neither.
    """
    if hasattr(table, "to_dict") and hasattr(table, "columns"):
        return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    if isinstance(table, Mapping | str) or not isinstance(table, Iterable):
        raise RequestError(
            f"rows is {type(table).__name__}; it must be a data frame or a list of mappings", param="rows"
        )
    rows = list(table)
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise RequestError(f"row {i} is {type(row).__name__}; it must be a mapping of columns", param="rows")
    return [{str(name): value for name, value in row.items()} for row in rows]


def filled(template: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the template with each row's values in the place of {column}; {{ and }} are braces.

    Raises:
        RequestError: the template is none, or names a column that a row lacks.
    """
    if not isinstance(template, str) or not template:
        raise RequestError(f"template is {template!r}; it must be text such as 'What is {{x}}?'", param="template")
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise RequestError(f"template cannot be read: {error}; write {{{{ for a brace", param="template") from error
    for name in names:
        if not name.isidentifier():
            raise RequestError(f"template names {{{name}}}; it must be the name of a column", param="template")
        for i, row in enumerate(rows):
            if name not in row:
                has = ", ".join(row) or "none"
                raise RequestError(f"row {i} has no column {name!r}; it has {has}", param="template")
    return [template.format_map(row) for row in rows]
