"""Rounds as JSON-able dictionaries, so that a finished reply is data, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args

from dsv4nb.config import SpecMode, SpecProposal
from dsv4nb.errors import RequestError
from dsv4nb.rounds.records import Draft, DraftStatus, Placed, Round, RoundKind, RoundStop

_LARGEST = sys.float_info.max


def to_dict(round: Round) -> dict[str, Any]:
    """Return a round as what JSON can say: a NaN becomes None, an infinity the largest number of its sign."""
    return {
        **_own(round),
        "pending": _own(round.pending),
        "drafts": [_own(draft) for draft in round.drafts],
        "next": None if round.next is None else _own(round.next),
        "ms": {name: _sayable(value) for name, value in round.ms.items()},
    }


def from_dict(raw: object) -> Round:
    """Return the round that `to_dict` wrote.

    Raises:
        RequestError: it is no round, or one that cannot have happened; the message names the field.
    """
    told = _checked("the round", raw, _ROUND)
    drafts = [_checked(f"drafts[{i}]", draft, _DRAFT) for i, draft in enumerate(told["drafts"])]
    told["drafts"] = tuple(Draft(**draft) for draft in drafts)
    told["pending"] = Placed(**_checked("pending", told["pending"], _PLACED))
    if told["next"] is not None:
        told["next"] = Placed(**_checked("next", told["next"], _PLACED))
    told["ms"] = dict(told["ms"])
    round = Round(**told)
    if not round.accepts <= round.verified <= len(round.drafts):
        counts = f"{round.accepts} accepted of {round.verified} verified of {len(round.drafts)} drafts"
        raise RequestError(f"the round has {counts}; each must be at most the next", param="accepts")
    return round


def _own(record: Round | Draft | Placed) -> dict[str, Any]:
    return {field.name: _sayable(getattr(record, field.name)) for field in fields(record)}


def _sayable(value: Any) -> Any:
    """What stands for a value in JSON; a margin is infinite when a filter left one token."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(_LARGEST, value)
    return value


Check = tuple[str, Callable[[Any], bool]]


def _one_of(literal: Any) -> Check:
    choices = get_args(literal)
    return " or ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices


def _or_none(check: Check) -> Check:
    return f"{check[0]}, or null", lambda value: value is None or check[1](value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_times(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and _is_number(ms) for name, ms in value.items())


_COUNT: Check = "an integer, 0 or more", lambda value: type(value) is int and value >= 0
_TEXT: Check = "a text", lambda value: isinstance(value, str)
_NUMBER = _or_none(("a finite number", _is_number))
_OBJECT: Check = "an object", lambda value: isinstance(value, Mapping)

_PLACED = {"id": _COUNT, "text": _TEXT, "pos": _COUNT}
_DRAFT = {
    **_PLACED,
    **dict.fromkeys(("conf_logit", "conf", "survival", "margin", "q", "p"), _NUMBER),
    "target_choice": _or_none(_COUNT),
    "status": _one_of(DraftStatus),
}
_ROUND = {
    **dict.fromkeys(("round", "start", "vt_drafts", "t_cap", "t_batch", "accepts", "emitted"), _COUNT),
    "pending": _OBJECT,
    "drafts": ("a list", lambda value: isinstance(value, list | tuple)),
    "next": _or_none(_OBJECT),
    "kind": _or_none(_one_of(RoundKind)),
    "stop": _or_none(_one_of(RoundStop)),
    "mode": _one_of(SpecMode),
    "proposal": _one_of(SpecProposal),
    "ms": ("an object of finite numbers", _are_times),
    "plain_ms": _NUMBER,
    "window_reason": _TEXT,
}


def _checked(what: str, raw: object, checks: Mapping[str, Check]) -> dict[str, Any]:
    if not isinstance(raw, Mapping) or raw.keys() != checks.keys():
        found = f"has {', '.join(map(str, raw))}" if isinstance(raw, Mapping) else f"is {raw!r}"
        raise RequestError(f"{what} {found}; it must be an object with {', '.join(checks)}", param=what)
    for name, (limit, holds) in checks.items():
        if not holds(raw[name]):
            raise RequestError(f"{name} of {what} is {raw[name]!r}; it must be {limit}", param=name)
    return dict(raw)
