"""What a run cost, as a person reads it: how its tokens were chosen, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsv4nb.events import Done

# (from, to): the marks of `Timings` that a phase lies between
_PHASES = {
    "Prepare": ("called", "queued"),
    "Queue": ("queued", "started"),
    "Prefill": ("started", "prefilled"),
    "First token": ("prefilled", "first_token"),
    "Decode": ("first_token", "ended"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a run.

    Attributes:
        note: what was done in it, "" when the name says it.
        start_s: since the call.
    """

    name: str
    note: str
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run of a turn.

    Attributes:
        choice: how tokens were chosen.
        first_token_s: since the call, None when none came.
        phases: what happened, in order; what did not is missing.
    """

    choice: str
    first_token_s: float | None
    phases: tuple[Phase, ...]

    @property
    def first_token(self) -> str:
        """The time to the first token in words, "" when none came."""
        return "" if self.first_token_s is None else f"first token {duration(self.first_token_s)}"

    def jsonable(self) -> dict[str, Any]:
        """Return what a page draws: rows of name, note, start and length in seconds, and the length in words."""
        rows = [[p.name, p.note, round(p.start_s, 6), round(p.seconds, 6), duration(p.seconds)] for p in self.phases]
        return {"choice": self.choice, "rows": rows}


def run_facts(done: Done) -> RunFacts:
    """Return the facts of a run that ended."""
    config = done.config
    return RunFacts(
        choice="greedy" if done.route.endswith("greedy") else f"sampled, seed {config.seed}",
        first_token_s=done.timings.first_token_s,
        phases=tuple(_phases(done)),
    )


def duration(seconds: float) -> str:
    """Return a time in the unit in which it is a short number."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _phases(done: Done) -> Iterator[Phase]:
    at = dict(done.timings.marks)
    notes = {"Prefill": _prompt(done), "Decode": f"{done.n_tokens:,} tokens"}
    for name, (first, last) in _PHASES.items():
        if first in at and last in at:
            yield Phase(name=name, note=notes.get(name, ""), start_s=at[first], seconds=at[last] - at[first])


def _prompt(done: Done) -> str:
    computed = f"{done.n_prompt - done.n_cached:,} tokens"
    return f"{computed}, {done.n_cached:,} cached" if done.n_cached else computed
