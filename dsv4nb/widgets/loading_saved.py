"""A load in a saved notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from dsv4nb.tables import as_html, as_text

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLoad:
    """What a panel shows, as a value."""

    title: str
    state: Mapping[str, Any]

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    @property
    def headline(self) -> str:
        """What is shown, in one line."""
        told = self.state
        words: dict[str, str] = {
            "waiting": "No load yet.",
            "loaded": f"{told['name']} is loaded.",
            "cancelled": told["error"],
            "failed": told["error"],
        }
        return words.get(str(told["state"]), f"Loading {told['name']}: {told['phase']}")

    def _facts(self) -> list[tuple[str, str]]:
        told = self.state
        if told["facts"]:
            return [(label, text) for label, text in told["facts"]]
        facts = []
        if told["total"]:
            facts.append(("read", f"{_size(told['done'])} of {_size(told['total'])}"))
        if told["shard"]:
            facts.append(("file", f"{told['shard']}, {told['n_shard']} of {told['n_shards']}"))
        facts += [(f"on {device}", _size(held)) for device, held in told["placed"]]
        return facts

    def __str__(self) -> str:
        blocks = (self.title, self.headline, as_text(self._facts()))
        return "\n\n".join(block for block in blocks if block)

    def _repr_html_(self) -> str:
        title = f"<p><strong>{escape(self.title)}</strong></p>" if self.title else ""
        return f"{title}<p>{escape(self.headline)}</p>{as_html(self._facts())}"


def _size(n_bytes: int) -> str:
    for unit, name in _UNITS:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes} B"
