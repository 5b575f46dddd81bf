"""The caches in a saved notebook: as text, and as tables that need neither kernel nor JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dsv4nb.tables import Facts as Rows
from dsv4nb.tables import Grid, as_html, as_text
from dsv4nb.widgets.cache_facts import Facts

LISTED = 20  # decisions of a saved form


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCache:
    """What a panel shows, as a value.

    Attributes:
        shown: key of the strip that is told of.
    """

    title: str
    model: str
    facts: Facts
    shown: str = ""

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _ledger(self) -> Rows:
        facts, strips = self.facts, self.facts.strips
        strip = next((one for one in strips if one.key == self.shown), strips[0] if strips else None)
        if strip is None or not strip.ids:
            return [("ledger", "nothing is committed yet")]
        n = len(strip.ids)
        parts = [f"{n:,} tokens of {strip.label}"]
        if strip.n_prompt:
            computed, generated = strip.n_prompt - strip.n_reused, n - strip.n_prompt
            parts.append(f"{strip.n_reused:,} reused, {computed:,} computed, {generated:,} generated")
        if facts.window:
            parts.append(f"window from token {max(0, n - facts.window):,}")
        at = ", ".join(f"{position:,}" for position in strip.anchors) or "none"
        return [("ledger", "; ".join(parts)), ("anchors at", at)]

    def _bytes(self) -> Grid:
        rows = [
            [f"{one.device} {name}", size(part.used), size(part.reserved)]
            for one in self.facts.devices
            for name, part in one.classes.items()
        ]
        totals = [[f"{one.device} all", size(one.used), size(one.reserved)] for one in self.facts.devices]
        stats = self.facts.stats
        budgets = [
            ["anchors' own", size(stats.anchor_bytes), size(stats.budget_bytes)],
            ["host memory", size(stats.host.bytes), size(stats.host.budget_bytes)],
        ]
        budgets.append(["free memory", "", size(self.facts.free_bytes)])
        return [["bytes", "in use", "of"], *rows, *totals, *budgets]

    def _log(self) -> Grid:
        rows = [
            [
                *(f"#{one.number}", one.at.strftime("%H:%M:%S"), one.decision.kind, f"{one.decision.length:,}"),
                *(f"{one.decision.computed:,}", one.decision.reason),
            ]
            for one in self.facts.log[:LISTED]
        ]
        return [["start", "time", "kind", "reused", "computed", "why"], *rows] if rows else []

    def _stored(self) -> Grid:
        facts = self.facts
        rows = [
            [
                *(f"anchor {one.id}", f"{one.tokens:,}", size(one.nbytes), "pinned" if one.is_pinned else ""),
                facts.anchor_names[one.id],
            ]
            for one in reversed(facts.stats.anchors)
            if one.id in facts.anchor_names
        ]
        rows += [
            [
                *(f"host {one.id}", f"{one.tokens:,}", f"{one.mib:.1f} MiB", "pinned" if one.is_pinned else ""),
                facts.host_names[one.id],
            ]
            for one in facts.host
            if one.id in facts.host_names
        ]
        return [["snapshot", "tokens", "bytes", "", "ends with"], *rows] if rows else []

    def __str__(self) -> str:
        head = " · ".join(part for part in (self.title, self.model) if part)
        grids = [as_text((), self._bytes()), *(_text(grid) for grid in (self._log(), self._stored()) if grid)]
        starts = [("starts", self.facts.stats.rows()[0][1])]
        return "\n\n".join([head, as_text([*self._ledger(), *starts]), *grids])

    def _repr_html_(self) -> str:
        head = f'<p><strong>{escape(self.title)}</strong> <span style="opacity:.75">{escape(self.model)}</span></p>'
        grids = as_html((), self._bytes()) + "".join(_html(grid) for grid in (self._log(), self._stored()) if grid)
        starts = [("starts", self.facts.stats.rows()[0][1])]
        return f"{head}{as_html([*self._ledger(), *starts])}{grids}"


def _text(grid: Grid) -> str:
    """Return a table of words: everything stands at the left."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in grid)


def _html(grid: Grid) -> str:
    head, *rows = grid
    lines = [_row("th", head), *(_row("td", cells) for cells in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    told = (f'<{tag} style="text-align:left">{escape(text)}</{tag}>' for text in cells)
    return f"<tr>{''.join(told)}</tr>"


def size(nbytes: int) -> str:
    """Return bytes as people read them."""
    if nbytes < 2**20:
        return f"{nbytes / 2**10:,.0f} KiB"
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.1f} GiB"
