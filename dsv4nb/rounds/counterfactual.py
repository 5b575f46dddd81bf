"""What another window would have made of recorded rounds, from their stored confidences.

Each round is judged alone: the same drafts from the same place, another number of them verified. A draft that the
model accepted, or refused, would have met the same fate. How far drafts that were not run would have come is unknown,
so numbers are bounds, which meet when every fate is known: always in rounds that were recorded with the window off.

A round that accepts fewer drafts than it did is followed by one that starts elsewhere, from drafts that nobody made.
Where that happens (`departures`) the sums are an estimate: they take the recorded rounds for what the others would
have been like. Where it does not, they are exactly what the other window would have done for the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4nb.config import SpecConfig
from dsv4nb.errors import RequestError
from dsv4nb.rounds.costs import Costs, leading
from dsv4nb.rounds.records import Draft, Round, by_reply
from dsv4nb.tables import Facts, Grid, as_html, as_text, data_frame, decimal, percent

TAUS = tuple(i / 20 for i in range(1, 20))

_SET = ("window", "tau", "floor", "depth")
_COUNTED = ("rounds", "rows", "drafted", "unknown", "departures", "ms")
_BOUNDED = ("accepted", "tokens", "acceptance_rate", "tokens_per_round", "ms_per_token")
_COLUMNS = (*_SET, *_COUNTED, *(f"{name}_{end}" for name in _BOUNDED for end in ("low", "high")))


class Bounds(NamedTuple):
    """Between what and what a number lies."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """What a window would have made of some rounds.

    Attributes:
        spec: the window and the depth in question.
        rows: verified by all rounds, the pending tokens' included.
        drafted: drafts among them.
        accepted: bounds of the drafts that would have been accepted; `tokens` of those that replies would have grown
            by in these rounds.
        unknown: rounds of which it is not known how many drafts would have been accepted.
        departures: rounds that would have been followed by others than they were.
        ms: of all rounds, None without costs.
    """

    spec: SpecConfig
    rounds: int
    rows: int
    drafted: int
    accepted: Bounds
    tokens: Bounds
    unknown: int
    departures: int
    ms: float | None

    @property
    def is_exact(self) -> bool:
        """Whether the window would have made these very rounds, so that the numbers are no estimate."""
        return not self.unknown and not self.departures

    @property
    def acceptance_rate(self) -> Bounds | None:
        """Accepted by verified drafts, None when none would have been verified."""
        return _by(self.accepted, self.drafted)

    @property
    def tokens_per_round(self) -> Bounds | None:
        """None without rounds."""
        return _by(self.tokens, self.rounds)

    @property
    def ms_per_token(self) -> Bounds | None:
        """None without costs or tokens."""
        if self.ms is None or not self.tokens.low:
            return None
        return Bounds(self.ms / self.tokens.high, self.ms / self.tokens.low)

    def row(self) -> dict[str, object]:
        """Return the numbers by name; a bound has two, `_low` and `_high`."""
        told: dict[str, object] = {name: getattr(self.spec, name) for name in _SET}
        told |= {name: getattr(self, name) for name in _COUNTED}
        for name in _BOUNDED:
            told[f"{name}_low"], told[f"{name}_high"] = getattr(self, name) or (None, None)
        return told


class Sweep(tuple[Counterfactual, ...]):
    """The same rounds under several windows."""

    __slots__ = ()

    @property
    def best(self) -> Counterfactual | None:
        """The one that takes the least time per token, unknown drafts taken for refused; None without costs."""
        timed = [(one.ms_per_token.high, i) for i, one in enumerate(self) if one.ms_per_token is not None]
        return self[min(timed)[1]] if timed else None

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per window.

        Raises:
            RequestError: pandas is not installed.
        """
        return data_frame([one.row() for one in self], _COLUMNS)

    def rows(self) -> Facts:
        """Return the window that costs suggest, as (label, text)."""
        return [] if self.best is None else [("fastest", _window(self.best.spec))]

    def grid(self) -> Grid:
        """Return the table, a line per window."""
        header = ["window", "rows a round", "accepted", "tokens a round", "ms a token", "unknown", "departures"]
        return [header, *(_line(one) for one in self)]

    def __str__(self) -> str:
        return as_text(self.rows(), self.grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows(), self.grid())


def counterfactual_of(rounds: Sequence[Round], spec: SpecConfig, *, costs: Costs | None = None) -> Counterfactual:
    """Return what the window and the depth of `spec` would have made of `rounds`, round by round.

    No round has more rows than there were tokens to want, as far as the rounds of its reply tell: where one was cut by
    the budget or reached it. With mode "rejection" texts depend on the window, so a window that cuts a
    refused draft departs too.

    Raises:
        RequestError: the window is "auto", which is a matter of the engine's costs; it is "slot" and no draft has a
            confidence; or `costs` lacks a forward of as many rows as a round would have verified.
    """
    if spec.window == "auto":
        raise RequestError("spec_window is 'auto'; it must be 'off' or 'slot', whose tau a sweep tries", param="spec")
    drafts = [draft for round in rounds for draft in round.drafts]
    if spec.window == "slot" and drafts and all(draft.conf_logit is None for draft in drafts):
        limit = "drafts with confidence logits, which this drafter does not give; try depths instead"
        raise RequestError(f"spec_window is 'slot'; it needs {limit}", param="spec")
    others = [_other(round, spec, wanted) for round, wanted in zip(rounds, _wanted(rounds), strict=True)]
    return Counterfactual(
        spec=spec,
        rounds=len(others),
        rows=sum(other.rows for other in others),
        drafted=sum(max(0, other.rows - 1) for other in others),
        accepted=_sum([other.accepted for other in others]),
        tokens=_sum([other.tokens for other in others]),
        unknown=sum(other.accepted.low < other.accepted.high for other in others),
        departures=sum(other.departs for other in others),
        ms=None if costs is None else sum(_ms(other.rows, costs) for other in others),
    )


def sweep(
    rounds: Sequence[Round],
    taus: Sequence[float] = TAUS,
    *,
    floor: int | None = None,
    depth: int | None = None,
    costs: Costs | None = None,
) -> Sweep:
    """Return what all drafts, and then each tau of a slot window, would have made of `rounds`; see `counterfactual_of`.

    Raises:
        RequestError: a tau, the floor or the depth is outside its range, or as `counterfactual_of` says.
    """
    off = SpecConfig(depth=depth)
    slots = [SpecConfig(window="slot", tau=tau, floor=floor, depth=depth) for tau in taus]
    return Sweep(counterfactual_of(rounds, spec, costs=costs) for spec in (off, *slots))


def slot_drafts(drafts: Sequence[Draft], tau: float, floor: int) -> int:
    """Return how many drafts a slot window lets pass.

    These are the leading ones whose confidence is at least `tau`, `floor` of them in any case. A draft without a
    confidence ends them, as a NaN does.
    """
    run = leading([math.nan if draft.conf_logit is None else draft.conf_logit for draft in drafts], tau)
    return min(max(run, floor), len(drafts))


class _Other(NamedTuple):
    """A round under another window."""

    rows: int
    accepted: Bounds
    tokens: Bounds
    departs: bool


def _wanted(rounds: Sequence[Round]) -> list[float]:
    """Tokens that each round's reply could still have, infinite where no round tells where the budget ends."""
    ends: dict[int, int] = {}
    for reply, round in by_reply(rounds):
        if round.t_batch < round.t_cap or round.stop == "budget":
            ends[reply] = round.start + round.t_batch
    return [ends.get(reply, math.inf) - round.start for reply, round in by_reply(rounds)]


def _other(round: Round, spec: SpecConfig, wanted: float) -> _Other:
    rows = 1 + len(round.drafts)
    if spec.window == "slot":
        floor = 0 if spec.floor is None else spec.floor
        rows = 1 + slot_drafts(round.drafts, 0.5 if spec.tau is None else spec.tau, floor)
    if spec.depth is not None:
        rows = min(rows, spec.depth)
    rows = int(min(rows, wanted))
    verified = max(0, rows - 1)
    low = min(verified, round.accepts)
    # a refusal and an end token settle all behind them; without one, what was not run may have been accepted
    high = low if round.kind is None or round.accepts < round.judged else verified
    most = math.inf if round.stop is None else round.emitted
    # the end of the reply is reached by its last token, or by the end token, which it does not grow by
    needed = round.emitted + (round.stop == "eos")
    departs = low < round.accepts and low + 1 < needed
    if round.mode == "rejection":
        departs |= low == verified == round.accepts < round.judged
    return _Other(rows, Bounds(low, high), Bounds(min(low + 1, most), min(high + 1, most)), departs)


def _sum(bounds: Sequence[Bounds]) -> Bounds:
    return Bounds(sum(low for low, _ in bounds), sum(high for _, high in bounds))


def _by(bounds: Bounds, whole: int) -> Bounds | None:
    return Bounds(bounds.low / whole, bounds.high / whole) if whole else None


def _ms(rows: int, costs: Costs) -> float:
    if rows > len(costs.verify):
        known = f"it must say what 1 to {rows} rows take"
        raise RequestError(f"verify of costs has {len(costs.verify)} numbers; {known}", param="costs")
    return costs.draft + costs.other + (costs.verify[rows - 1] if rows else 0.0)


def _window(spec: SpecConfig) -> str:
    told = "off" if spec.window == "off" else f"slot {0.5 if spec.tau is None else spec.tau:g}"
    told += f", floor {spec.floor}" if spec.floor else ""
    return told + (f", depth {spec.depth}" if spec.depth else "")


def _line(one: Counterfactual) -> list[str]:
    rows = one.rows / one.rounds if one.rounds else None
    told = (_told(one.acceptance_rate, percent), _told(one.tokens_per_round, decimal), _told(one.ms_per_token, decimal))
    return [_window(one.spec), decimal(rows), *told, str(one.unknown), str(one.departures)]


def _told(bounds: Bounds | None, say: Callable[[float | None], str]) -> str:
    """Both bounds, or the number where they meet."""
    if bounds is None:
        return say(None)
    low, high = map(say, bounds)
    return low if low == high else f"{low} to {high}"
