"""What rounds come to, as the acceptance panel and its saved picture show it: dspark.md 7.1, in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.rounds import Costs, Draft, Reliability, Round, Rounds, SpecTotals
from dsv4nb.rounds.counterfactual import Counterfactual
from dsv4nb.rounds.totals import Curve
from dsv4nb.tables import decimal, percent
from dsv4nb.widgets.acceptance_story import Piece, Story
from dsv4nb.widgets.protocol import STATUSES

LETTERS = {status: letter for letter, status in STATUSES.items()}
_STEPS = ("draft", "verify", "commit", "total")
_FAR = 1e300  # stands for an infinite margin, which JSON cannot say


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number with its name and what it is made of."""

    name: str
    value: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Totals, curves and calibration of some rounds.

    Attributes:
        n: how many rounds.
        curves: (name, by position); [0] is the first draft.
        accepts: [a]: rounds that accepted exactly a drafts.
        confidence, survival: how true these are.
    """

    n: int
    facts: tuple[Fact, ...]
    curves: tuple[tuple[str, Curve], ...]
    accepts: tuple[int, ...]
    confidence: Reliability
    survival: Reliability

    def message(self) -> dict[str, Any]:
        """Return what travels."""
        return {
            "n": self.n,
            "facts": [[fact.name, fact.value, fact.hint] for fact in self.facts],
            "curves": [[name, list(map(_short, curve))] for name, curve in self.curves],
            "accepts": list(self.accepts),
            "confidence": _told(self.confidence),
            "survival": _told(self.survival),
        }


def figures_of(rounds: Sequence[Round]) -> Figures:
    """Return what `rounds` come to; of none everything is empty."""
    own = Rounds(rounds)
    totals, calibration = own.totals, own.calibration()
    return Figures(
        n=len(own),
        facts=tuple(_facts(totals)),
        curves=(
            ("of rounds", totals.position_rates),
            ("of verified", totals.position_rates_over_proposals),
            ("of reached", totals.position_rates_conditional),
        ),
        accepts=totals.accepts,
        confidence=calibration.conf,
        survival=calibration.survival,
    )


def _facts(totals: SpecTotals) -> list[Fact]:
    if not totals.rounds:
        return []
    kept = totals.accepted + totals.verifying
    facts = [
        Fact(
            name="draft acceptance rate",
            value=percent(totals.acceptance_rate),
            hint=f"{totals.accepted:,} accepted of {totals.drafted:,} verified drafts",
        ),
        Fact(
            name="mean acceptance length",
            value=decimal(totals.mean_acceptance_length),
            hint="1 + accepted drafts per round, the model's own token counted",
        ),
        Fact(
            name="verify rate",
            value=percent(totals.verify_rate),
            hint=f"{kept:,} kept of {totals.drafted + totals.verifying:,} rows run",
        ),
        Fact(
            name="tokens/round",
            value=decimal(totals.tokens_per_round),
            hint=f"{totals.emitted:,} tokens in {totals.rounds:,} rounds",
        ),
    ]
    if "total" in totals.ms:
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in totals.ms.items() if name != "total")
        facts.append(Fact(name="ms/round", value=decimal(totals.ms["total"], 1), hint=parts))
    if totals.tokens_per_s is not None:
        facts.append(Fact(name="tok/s", value=decimal(totals.tokens_per_s, 1), hint="over the rounds that were timed"))
    if totals.speed_up is not None:
        hint = f"estimated against the plain route, {decimal(totals.plain_ms, 1)} ms a token"
        facts.append(Fact(name="speed-up", value=f"{totals.speed_up:.2f}×", hint=hint))
    return facts


def wire_rounds(story: Story, start: int = 0) -> list[list[Any]]:
    """Return the rounds from index `start` on as what travels; their fields are those of `protocol.ROUND`."""
    parts = (story.replies[start:], story.rounds[start:], story.before[start:])
    return [_wire(*one) for one in zip(*parts, strict=True)]


def _wire(reply: int, round: Round, before: Piece) -> list[Any]:
    return [
        reply,
        round.round,
        round.start,
        round.pending.text,
        [_wire_draft(round, draft) for draft in round.drafts],
        round.accepts,
        round.verified,
        None if round.next is None else round.next.text,
        round.kind,
        round.emitted,
        round.stop,
        [_short(round.ms.get(name)) for name in _STEPS],
        round.window_reason,
        *before,
    ]


def _wire_draft(round: Round, draft: Draft) -> list[Any]:
    numbers = (draft.conf, draft.survival, draft.margin, draft.q, draft.p)
    return [draft.text, _chosen(round, draft), LETTERS[draft.status], *map(_short, numbers)]


def _chosen(round: Round, draft: Draft) -> str | None:
    """What the model chose in the place of a draft, None where it chose nothing."""
    if draft.target_choice is None:
        return None
    for told in (draft, round.next):
        if told is not None and (told.id, told.pos) == (draft.target_choice, draft.pos):
            return told.text
    return f"token {draft.target_choice}"


def _short(value: float | None) -> float | None:
    """Four digits, which is what is shown; None where JSON or the rounds have no number."""
    if value is None or math.isnan(value):
        return None
    return math.copysign(_FAR, value) if math.isinf(value) else float(f"{value:.4g}")


def _told(told: Reliability) -> dict[str, Any]:
    return {
        "n": told.n,
        "ece": _short(told.ece),
        "auc": _short(told.auc),
        "bins": [[one.n, _short(one.predicted), _short(one.observed)] for one in told.bins],
    }


def sweep_points(rounds: Sequence[Round], costs: Costs | None) -> tuple[list[dict[str, Any]], str]:
    """Return what the slot window would have made of `rounds`, all drafts first and then each tau, and why not.

    The numbers are those of `Rounds.sweep`.
    """
    try:
        return [_point(one) for one in Rounds(rounds).sweep(costs=costs)], ""
    except RequestError as error:
        return [], str(error)


def _point(one: Counterfactual) -> dict[str, Any]:
    return {
        "tau": one.spec.tau,
        "rows": one.rows,
        "drafted": one.drafted,
        "tokens": list(one.tokens),
        "accepted": list(one.accepted),
        "ms_per_token": None if one.ms_per_token is None else list(one.ms_per_token),
        "unknown": one.unknown,
        "departures": one.departures,
    }
