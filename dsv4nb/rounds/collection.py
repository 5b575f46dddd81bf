"""The rounds of a reply as a value: a table, data, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, overload

from dsv4nb.config import SpecConfig
from dsv4nb.errors import RequestError
from dsv4nb.rounds.calibration import N_BINS, Calibration, calibration_of
from dsv4nb.rounds.costs import Costs
from dsv4nb.rounds.counterfactual import TAUS, Counterfactual, Sweep, counterfactual_of, sweep
from dsv4nb.rounds.dicts import from_dict, to_dict
from dsv4nb.rounds.records import Round, SpecUsage, by_reply
from dsv4nb.rounds.temperatures import Temperatures, fit_temperatures
from dsv4nb.rounds.totals import SpecTotals
from dsv4nb.tables import data_frame

_STEPS = ("draft", "verify", "commit", "total")
_ROUND = (
    "reply", "round", "start", "pending_id", "pending", "drafts", "conf", "vt_drafts", "t_cap", "t_batch", "verified",
    "accepts", "next_id", "next", "kind", "emitted", "stop", "mode", "proposal", *(f"{name}_ms" for name in _STEPS),
    "plain_ms", "window_reason",
)  # fmt: skip
_DRAFT = (
    "reply", "round", "draft", "id", "text", "pos", "conf_logit", "conf", "survival", "margin", "q", "p",
    "target_choice", "status",
)  # fmt: skip


class Rounds(tuple[Round, ...]):
    """The rounds of one reply, or of several: those of two replies are pooled with `+`, a part is a slice."""

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> Round: ...
    @overload
    def __getitem__(self, key: slice, /) -> Rounds: ...
    def __getitem__(self, key: SupportsIndex | slice, /) -> Round | Rounds:
        found = super().__getitem__(key)
        return Rounds(found) if isinstance(found, tuple) else found

    def __add__(self, other: tuple[Round, ...], /) -> Rounds:  # type: ignore[override]
        return Rounds((*self, *other)) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: tuple[Round, ...], /) -> Rounds:
        return Rounds((*other, *self)) if isinstance(other, tuple) else NotImplemented

    @property
    def usage(self) -> SpecUsage | None:
        """Rounds, verified and accepted drafts; None when nothing was speculated."""
        return SpecUsage.of(self)

    @property
    def totals(self) -> SpecTotals:
        """Every rate, curve and time that they add up to."""
        return SpecTotals.of(self)

    def calibration(self, *, temperatures: Sequence[float] | None = None, bins: int = N_BINS) -> Calibration:
        """Return how true the drafter's confidences are; see `calibration_of`."""
        return calibration_of(self, temperatures=temperatures, bins=bins)

    def fit_temperatures(self) -> Temperatures:
        """Return what would make the confidences true; see the function of this name."""
        return fit_temperatures(self)

    def counterfactual(self, spec: SpecConfig, *, costs: Costs | None = None) -> Counterfactual:
        """Return what another window or depth would have made of the rounds; see `counterfactual_of`."""
        return counterfactual_of(self, spec, costs=costs)

    def sweep(
        self,
        taus: Sequence[float] = TAUS,
        *,
        floor: int | None = None,
        depth: int | None = None,
        costs: Costs | None = None,
    ) -> Sweep:
        """Return the same for several slot windows, and for none first; see the function of this name."""
        return sweep(self, taus, floor=floor, depth=depth, costs=costs)

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per round.

        Columns have the names of `Round`; `verified` is how many drafts were run. Of tokens there is the text, and
        the id beside it; of `drafts` and `conf` a tuple. `reply` counts pooled replies from 0: a new one begins
        where the number of the round does not grow.

        Raises:
            RequestError: pandas is not installed.
        """
        return data_frame([_round_row(reply, round) for reply, round in by_reply(self)], _ROUND)

    def drafts_frame(self) -> Any:
        """Return a pandas data frame with a row per draft, those that were not run included.

        Columns have the names of `Draft`; `reply` and `round` are those of `to_frame`, `draft` counts from 1.

        Raises:
            RequestError: pandas is not installed.
        """
        rows = [
            {"reply": reply, "round": round.round, "draft": k, **{name: getattr(draft, name) for name in _DRAFT[3:]}}
            for reply, round in by_reply(self)
            for k, draft in enumerate(round.drafts, 1)
        ]
        return data_frame(rows, _DRAFT)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return every field of every round as JSON-able data; a NaN is None there."""
        return [to_dict(round) for round in self]

    @classmethod
    def from_dicts(cls, raw: Sequence[Mapping[str, Any]]) -> Rounds:
        """Return what `to_dicts` wrote.

        Raises:
            RequestError: one is no round, or one that cannot have happened.
        """
        found = []
        for number, one in enumerate(raw):
            try:
                found.append(from_dict(one))
            except RequestError as error:
                raise RequestError(f"rounds[{number}]: {error}", param=error.param) from error
        return cls(found)

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(self.to_dicts(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Rounds:
        """Return what `to_json` wrote.

        Raises:
            RequestError: the text is no list of rounds.
        """
        try:
            raw = json.loads(text)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the rounds cannot be read: {error}", param="text") from error
        if not isinstance(raw, list):
            raise RequestError(f"the rounds are a {type(raw).__name__}; they must be a list", param="text")
        return cls.from_dicts(raw)

    def __str__(self) -> str:
        return str(self.totals)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.totals._repr_html_()


def _round_row(reply: int, round: Round) -> dict[str, object]:
    names = ("round", "start", "vt_drafts", "t_cap", "t_batch", "verified", "accepts", "kind", "emitted", "stop",
             "mode", "proposal", "plain_ms", "window_reason")  # fmt: skip
    return {
        **{name: getattr(round, name) for name in names},
        **{f"{name}_ms": round.ms.get(name) for name in _STEPS},
        "reply": reply,
        "pending_id": round.pending.id,
        "pending": round.pending.text,
        "drafts": tuple(draft.text for draft in round.drafts),
        "conf": tuple(draft.conf for draft in round.drafts),
        "next_id": None if round.next is None else round.next.id,
        "next": None if round.next is None else round.next.text,
    }
