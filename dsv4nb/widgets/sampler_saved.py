"""The values of sampling in a saved notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dsv4nb.tables import Grid, as_html, as_text
from dsv4nb.widgets.sampler_controls import GROUPS, Control, words


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSampler:
    """What a panel shows, as a value.

    Attributes:
        rows: (name, value, what the default is when it is another, or "") each.
    """

    title: str
    rows: tuple[tuple[str, str, str], ...]
    code: str

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    @property
    def _grid(self) -> Grid:
        return [["option", "value", "changed from"], *self.rows]

    def __str__(self) -> str:
        return "\n\n".join([self.title, as_text((), self._grid), self.code])

    def _repr_html_(self) -> str:
        return (
            f"<p><strong>{escape(self.title)}</strong></p>{as_html((), self._grid)}"
            f"<pre><code>{escape(self.code)}</code></pre>"
        )


def rows_of(
    controls: Sequence[Control], chosen: Mapping[str, Any], usual: Mapping[str, Any]
) -> tuple[tuple[str, str, str], ...]:
    """Return what is set, control by control."""
    found = []
    for control in controls:
        name, default = control.name, usual[control.name]
        value = chosen.get(name, default)
        changed = words(name, default) if name in chosen else ""
        found.append((f"{GROUPS[control.group]}: {control.label}", words(name, value), changed))
    return tuple(found)
