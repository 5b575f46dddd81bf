"""How many drafts a round verifies: confidence window, depth, room, budget (dspark.md 4, 12.1). Pure.

Which of them are accepted is no rule of its own: a draft is accepted when it is the token that the model chose in its
place, however that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4nb.config import SpecConfig
from dsv4nb.rounds import Costs, leading

TAU, FLOOR = 0.5, 0  # of the slot window


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows of one round; the names are those of `Round`."""

    vt_drafts: int
    t_cap: int
    t_batch: int
    reason: str


def plan(
    config: SpecConfig,
    conf_logits: Sequence[float],
    drafts: int,
    *,
    costs: Costs | None,
    legal: int,
    room: int,
    tokens_left: int,
) -> Plan:
    """Bound the rows of a round.

    Args:
        conf_logits: of the drafts, () when the drafter does not say.
        drafts: how many there are.
        costs: for the auto window, which lets all pass without them.
        legal: drafts that the grammar lets be verified.
        room: rows that fit into the caches, one at least; tokens_left: tokens that the reply may still have, likewise.
    """
    passed, told = _window(config, conf_logits, drafts, costs)
    bounds = [(passed + 1, told), (legal + 1, f"the grammar allows {legal}"), (room, "the room ends")]
    if config.depth is not None:
        bounds.append((config.depth, f"depth {config.depth}"))
    t_cap, reason = min(bounds, key=lambda bound: bound[0])  # the first of equals
    if tokens_left < t_cap:
        reason = f"budget: {tokens_left} {'token' if tokens_left == 1 else 'tokens'} left"
    return Plan(vt_drafts=passed, t_cap=t_cap, t_batch=min(t_cap, tokens_left), reason=reason)


def _window(config: SpecConfig, conf_logits: Sequence[float], drafts: int, costs: Costs | None) -> tuple[int, str]:
    """The drafts that the confidence window lets pass, and why, in words."""
    if config.window == "slot" and len(conf_logits) == drafts:
        tau = TAU if config.tau is None else config.tau
        floor = FLOOR if config.floor is None else config.floor
        run = leading(conf_logits, tau)
        told = f"window slot {tau:g}: {run} {'draft' if run == 1 else 'drafts'} in a row"
        return min(max(run, floor), drafts), told + (f", floor {floor}" if floor > run else "")
    if config.window == "auto" and len(conf_logits) == drafts and costs is not None:
        n = costs.best(survivals(conf_logits), looks_ahead=config.mode == "exact")
        return n, f"window auto: {n} of {drafts} pay"
    return drafts, "all drafts"


def rows_kept(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many rows a round keeps: the first, and one for each draft up to the first that was not chosen.

    Args:
        drafts: that were run behind the first row.
        chosen: behind each row.
    """
    kept = 1
    while kept <= len(drafts) and chosen[kept - 1] == drafts[kept - 1]:
        kept += 1
    return kept


def survivals(conf_logits: Sequence[float]) -> list[float]:
    """Return, per draft, the product of the confidences up to it; 0 from a NaN on."""
    products, product = [], 1.0
    for logit in conf_logits:
        product *= sigmoid(logit)
        products.append(product)
    return products


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + e^-logit), 0 for a NaN."""
    if math.isnan(logit):
        return 0.0
    small = math.exp(-abs(logit))
    return 1 / (1 + small) if logit >= 0 else small / (1 + small)
