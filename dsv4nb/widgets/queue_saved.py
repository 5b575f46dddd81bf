"""The queue in a saved notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from dsv4nb.session.waiting import Past, Waiting
from dsv4nb.tables import Grid, as_html, as_text, decimal

EMPTY = "No request is waiting or running."


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedQueue:
    """What a panel shows, as a value.

    Attributes:
        more: requests that wait behind those of `waiting`.
    """

    title: str
    waiting: tuple[Waiting, ...]
    more: int
    past: tuple[Past, ...]

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    @property
    def _more(self) -> str:
        return f"and {self.more:,} more"

    def _open(self) -> Grid:
        head = ["request", "state", "prompt", "read", "tokens", "tok/s", "since", "about"]
        return [
            head,
            *(
                [
                    *(f"#{one.id}", one.state, f"{one.n_prompt:,}", f"{one.n_read:,}", f"{one.n_tokens:,}"),
                    *(decimal(one.tokens_per_s, 1), f"{one.waited_s:.1f} s", one.about),
                ]
                for one in self.waiting
            ),
        ]

    def _ended(self) -> Grid:
        head = ["ended", "outcome", "prompt", "cached", "tokens", "tok/s", "waited", "ran", "about"]
        return [
            head,
            *(
                [
                    *(f"#{one.id}", one.outcome, f"{one.n_prompt:,}", f"{one.n_cached:,}", f"{one.n_tokens:,}"),
                    *(decimal(one.tokens_per_s, 1), f"{one.queue_s:.2f} s", f"{one.run_s:.2f} s", one.about),
                ]
                for one in self.past
            ),
        ]

    def __str__(self) -> str:
        blocks = [self.title, as_text((), self._open()) if self.waiting else EMPTY]
        if self.more:
            blocks.append(self._more)
        if self.past:
            blocks.append(as_text((), self._ended()))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        parts = [f"<p><strong>{escape(self.title)}</strong></p>"]
        parts.append(as_html((), self._open()) if self.waiting else f"<p>{EMPTY}</p>")
        if self.more:
            parts.append(f"<p>{self._more}</p>")
        if self.past:
            parts.append(as_html((), self._ended()))
        return "".join(parts)
