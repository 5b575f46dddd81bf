"""What the doctor found, as text and as HTML that needs no kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from dsv4nb.doctor.machine import Facts
from dsv4nb.tables import as_html, as_text

Outcome = Literal["ok", "failed", "skipped"]

_WIDTH = 84  # of what is told in words, in characters
_LEFT = 'style="text-align:left;vertical-align:top"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise, and whether it held.

    Attributes:
        name: of the promise.
        compared: what was held against what, and how much of it.
        result: skipped when there was nothing to compare, or no time; `detail` says which.
        detail: the first difference, the error, or why it was skipped; "" when there is nothing to say.
        seconds: it took.
    """

    name: str
    compared: str
    result: Outcome
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The checks of one model.

    Attributes:
        checks: those that are over, in their order; `planned` how many there are.
        seconds: they took together, what waited in the queue included.
        machine: what they ran on, and what is known of the notebook.
    """

    model: str
    checks: tuple[Check, ...]
    planned: int
    seconds: float
    machine: Facts = ()

    @property
    def ok(self) -> bool:
        """Whether all checks are over, none failed, and at least one was not skipped."""
        results = {check.result for check in self.checks}
        return len(self.checks) == self.planned and "ok" in results and "failed" not in results

    @property
    def title(self) -> str:
        """The report in one line."""
        done, left = len(self.checks), self.planned - len(self.checks)
        told = [f"{done} checks" if not left else f"{done} of {self.planned} checks so far"]
        for result in ("ok", "failed", "skipped"):
            n = sum(check.result == result for check in self.checks)
            told += [f"{n} {result}"] if n else []
        return f"{self.model}: {', '.join(told)}, {self.seconds:.1f} s"

    def __str__(self) -> str:
        names = max((len(check.name) for check in self.checks), default=0)
        lines = [self.title]
        for check in self.checks:
            head = f"{check.name:<{names}}  {check.result:<7}  {check.seconds:5.1f} s  "
            told = [line for text in (check.compared, check.detail) for line in textwrap.wrap(text, _WIDTH)]
            lines += [f"{head if i == 0 else ' ' * len(head)}{line}" for i, line in enumerate(told)]
        return "\n".join([*lines, "", as_text(self.machine)] if self.machine else lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head = _row("th", [escape(name) for name in ("check", "result", "seconds", "compared")])
        body = "".join(_row("td", _cells(check)) for check in self.checks)
        machine = as_html(self.machine) if self.machine else ""
        return f"<p>{escape(self.title)}</p><table>{head}{body}</table>{machine}"


def _cells(check: Check) -> list[str]:
    result = "<b>failed</b>" if check.result == "failed" else check.result
    told = "<br>".join(escape(text) for text in (check.compared, check.detail) if text)
    return [escape(check.name), result, f"{check.seconds:.1f}", told]


def _row(tag: str, cells: Sequence[str]) -> str:
    told = (f"<{tag} {_LEFT}>{cell}</{tag}>" for cell in cells)
    return f"<tr>{''.join(told)}</tr>"
