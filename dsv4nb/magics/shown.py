"""What `%dsv4` shows of itself and of a model, as text and as HTML that needs no kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dsv4nb.events import Timings
from dsv4nb.tables import Facts, Grid, as_html, as_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The models that are loaded, by their variable, as a person reads them."""

    models: Mapping[str, Any]

    def __repr__(self) -> str:
        if not self.models:
            return "no model is loaded; %dsv4 load PATH loads one"
        return "\n\n".join(f"{name}\n{model.info}" for name, model in self.models.items())

    def _repr_html_(self) -> str:
        if not self.models:
            return f"<p>{escape(repr(self))}</p>"
        return "".join(
            f"<p><code>{escape(name)}</code></p>{html_of(model.info)}" for name, model in self.models.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The marks of a request, each with a bar from the mark before it."""

    timings: Timings | None

    def __repr__(self) -> str:
        if self.timings is None:
            return "no request has ended yet"
        marks = self.timings.marks
        total = marks[-1][1] or 1.0
        lines, before = [], 0.0
        for label, at in marks:
            start, end = round(40 * before / total), round(40 * at / total)
            lines.append(f"{label:<16}{1e3 * at:10.1f} ms  {' ' * start}{'█' * max(1, end - start)}")
            before = at
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The requests that have not ended, in the order in which they run."""

    waiting: Sequence[Any]

    def __repr__(self) -> str:
        if not self.waiting:
            return "no request is waiting or running"
        lines = [f"{'state':<10}{'prompt':>8}{'since':>10}"]
        lines += [f"{one.state:<10}{one.n_prompt:>8,}{one.waited_s:>8.1f} s" for one in self.waiting]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value that later cells ask for.

    Attributes:
        origin: set, %config or model.
    """

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What later cells ask for that do not say."""

    settings: tuple[Setting, ...]

    def grid(self) -> Grid:
        """Return the rows of the table, its header first."""
        return [("", "value", "from"), *((one.name, one.value, one.origin) for one in self.settings)]

    def __repr__(self) -> str:
        if not self.settings:
            return "nothing is set; the checkpoint's own values apply"
        return as_text((), self.grid())

    def _repr_html_(self) -> str:
        return as_html((), self.grid()) if self.settings else f"<p>{escape(repr(self))}</p>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Facts as (label, text)."""

    facts: Facts

    def __repr__(self) -> str:
        return as_text(self.facts)

    def _repr_html_(self) -> str:
        return as_html(self.facts)


def html_of(value: object) -> str:
    """Return a value as HTML, its text if it has none."""
    show = getattr(value, "_repr_html_", None)
    return str(show()) if show is not None else f"<pre>{escape(str(value))}</pre>"
