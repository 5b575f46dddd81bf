"""Rounds as a consistent engine would record them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dsv4nb.rounds import Draft, DraftStatus, Placed, Round

MakeRound = Callable[..., Round]


def _logit(conf: float | None) -> float | None:
    return None if conf is None else math.log(conf) - math.log1p(-conf)


def _status(k: int, verified: int, accepts: int, kept: int) -> DraftStatus:
    if k >= verified:
        return "not_verified"
    if k < accepts:
        return "accepted" if k < kept else "past_stop"
    return "rejected" if k == accepts else "unreached"


def _round_of(
    verified: int,
    accepts: int,
    *,
    block: int = 5,
    confs: Sequence[float | None] | None = None,
    cut: bool = False,
    stop: str | None = None,
    emitted: int | None = None,
    start: int = 10,
    number: int = 0,
    **other: Any,
) -> Round:
    """A round; `cut`: the budget kept the drafts behind `verified` from being run."""
    emitted = accepts + 1 if emitted is None else emitted
    confs = [0.5] * block if confs is None else [*confs, *[0.5] * (block - len(confs))]
    drafts = []
    survival: float | None = 1.0
    for k, conf in enumerate(confs):
        survival = None if survival is None or conf is None else survival * conf
        drafts.append(
            Draft(
                id=100 + k,
                text=f"d{k}",
                pos=start + 1 + k,
                conf_logit=_logit(conf),
                conf=conf,
                survival=survival,
                margin=1.5,
                q=0.25,
                p=0.5 if k < verified else None,
                target_choice=100 + k if k < accepts else 7 if k == accepts < verified else None,
                status=_status(k, verified, accepts, emitted),
            )
        )
    made: dict[str, Any] = {
        "round": number,
        "start": start,
        "pending": Placed(id=1, text="p", pos=start),
        "drafts": tuple(drafts),
        "vt_drafts": block if cut else verified,
        "t_cap": block + 1 if cut else verified + 1,
        "t_batch": verified + 1,
        "accepts": accepts,
        "next": Placed(id=7, text="n", pos=start + accepts + 1) if emitted == accepts + 1 else None,
        "kind": "correction" if accepts < verified else "bonus",
        "emitted": emitted,
        "stop": stop,
        "mode": "exact",
        "proposal": "coupled",
        "ms": {},
        "plain_ms": None,
        "window_reason": "",
    }
    return Round(**{**made, **other})


@pytest.fixture(scope="session")
def round_of() -> MakeRound:
    return _round_of
