"""What a person can set: sampler values, their defaults and their validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from dsv4nb.errors import RequestError

PenaltyScope = Literal["all", "generated"]
Sampler = Literal["gumbel", "inverse_cdf"]
SpecMode = Literal["exact", "rejection"]
SpecProposal = Literal["coupled", "greedy"]
SpecWindow = Literal["off", "slot", "auto"]

_LARGEST = 1e30  # of a penalty or bias: no count and no logit can make it overflow a float32 row


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """How the next token is chosen; frozen per request and echoed in its result.

    Applied in this order: `logit_bias`, penalties, temperature, `top_k`, `top_p`, `min_p`, the draw. Greedy requests
    stop after the penalties: the other filters cannot change which token is the best.

    Attributes:
        temperature: <= 0 is greedy; ties go to the lowest id.
        top_k: keep the k best, 0 = off; 1 is greedy.
        top_p: keep the shortest prefix with this mass, in (0, 1].
        min_p: drop what is less likely than min_p times the best, in [0, 1).
        seed: key of the position-keyed draw, 0 <= seed < 2**64.
        repetition_penalty: divides the positive logits of tokens in the window and multiplies the others; 1 = off.
        frequency_penalty: subtracted once per occurrence in the window; 0 = off, below 0 encourages.
        presence_penalty: subtracted once from each token in the window; 0 = off, below 0 encourages.
        penalty_last_n: tokens in the window of all three penalties, the newest ones; 0 = the whole context.
        penalty_scope: "all" counts the prompt too, "generated" the reply alone.
        logit_bias: added to logits, by id; -inf bans a token. Given as a mapping or as pairs, kept as pairs by
            ascending id.
        sampler: the draw: "gumbel" is the engine's own race, under which drafts agree most; "inverse_cdf" walks the
            sorted list like memra, which has no min_p. Here it walks what all filters kept, min_p included.

    Raises:
        RequestError: a value is outside its range; `param` names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 0
    penalty_scope: PenaltyScope = "all"
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampler: Sampler = "gumbel"

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and math.isfinite(value), name, value, "a finite number")
        for name in ("top_k", "seed", "penalty_last_n"):
            value = getattr(self, name)
            _require(_is_integer(value), name, value, "an integer")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2**64)")
        repetition, limit = self.repetition_penalty, f"above 0, in [{1 / _LARGEST:g}, {_LARGEST:g}]; 1 is off"
        _require(1 / _LARGEST <= repetition <= _LARGEST, "repetition_penalty", repetition, limit)
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(abs(value) <= _LARGEST, name, value, f"in [-{_LARGEST:g}, {_LARGEST:g}]; 0 is off")
        _require(self.penalty_last_n >= 0, "penalty_last_n", self.penalty_last_n, "0 (the whole context) or more")
        _require_one_of("penalty_scope", self.penalty_scope, get_args(PenaltyScope))
        _require_one_of("sampler", self.sampler, get_args(Sampler))
        # a mapping belongs to who gave it; nobody holds this config yet
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the argmax; below 1e-5 a temperature is not sampled with."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes a logit; the window and the scope alone do not."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """How a route with a drafter speculates; in exact mode this changes the speed and never the text.

    Attributes:
        mode: exact accepts a draft when it is the model's own draw; rejection accepts it with probability
            min(1, p/q), which keeps the distribution and not the text of the plain route.
        proposal: how exact mode drafts: coupled draws as the model draws its tokens, with the same noise, so that
            they agree most; greedy takes the drafter's best. Without sampling they are the same.
        depth: rows of one verify forward at most, the pending token's included; None is all of them.
        window: which of the drafts are verified. off: all; slot: the leading ones whose confidence is at least `tau`,
            `floor` of them in any case; auto: as many as promise the most tokens per second by the measured costs.
        tau: of the slot window, in (0, 1); 0.5 when None.
        floor: of the slot window, below the drafter's block size; 0 when None.

    Raises:
        RequestError: a value is outside its range, or has no effect; `param` names it.
    """

    mode: SpecMode = "exact"
    proposal: SpecProposal = "coupled"
    depth: int | None = None
    window: SpecWindow = "off"
    tau: float | None = None
    floor: int | None = None

    def __post_init__(self) -> None:
        _require_one_of("spec_mode", self.mode, get_args(SpecMode))
        _require_one_of("spec_proposal", self.proposal, get_args(SpecProposal))
        _require_one_of("spec_window", self.window, get_args(SpecWindow))
        depth = self.depth
        _require(depth is None or (_is_integer(depth) and depth >= 1), "spec_depth", depth, "an integer of 1 or more")
        for name in ("tau", "floor"):
            value = getattr(self, name)
            limit = f"left out unless the window is 'slot'; it is {self.window!r}"
            _require(value is None or self.window == "slot", f"spec_{name}", value, limit)
        if self.tau is not None:
            _require(_is_number(self.tau) and 0 < self.tau < 1, "spec_tau", self.tau, "a number in (0, 1)")
        if self.floor is not None:
            _require(_is_integer(self.floor) and self.floor >= 0, "spec_floor", self.floor, "an integer, 0 or more")
        if self.mode == "rejection":
            limit = "left out with spec_mode='rejection', whose drafts are drawn from the drafter's distribution"
            _require(self.proposal == "coupled", "spec_proposal", self.proposal, limit)

    def require_fits(self, block_size: int, *, depth_name: str = "spec_depth") -> None:
        """Check the knobs against a drafter's block.

        Args:
            depth_name: what a person set the depth by.

        Raises:
            RequestError: the depth is more rows than a block gives, or the floor is all of it.
        """
        limit = f"1 to {block_size + 1} rows: the pending token and {block_size} drafts"
        _require(self.depth is None or self.depth <= block_size + 1, depth_name, self.depth, limit)
        limit = f"0 to {block_size - 1}; as many as the block has would switch the window off"
        within = self.floor is None or self.floor < block_size
        _require(within, "the floor of spec_window", self.floor, limit, param="spec_window")


def parse_window(given: object) -> tuple[SpecWindow, float | None, int | None]:
    """Return policy, tau and floor of a window.

    Args:
        given: "off", "slot" or "auto", or ("slot", tau) or ("slot", tau, floor).

    Raises:
        RequestError: it is none of these.
    """
    parts = (given,) if isinstance(given, str) else given
    known = get_args(SpecWindow)
    if not isinstance(parts, Sequence) or not 1 <= len(parts) <= 3 or parts[0] not in known:
        limit = "'off', 'auto', 'slot', ('slot', tau) or ('slot', tau, floor)"
        raise RequestError(f"spec_window is {given!r}; it must be {limit}", param="spec_window")
    policy, tau, floor = (*parts, None, None)[:3]
    return policy, tau, floor  # SpecConfig checks the rest


def _require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, name, value, " or ".join(map(repr, choices)))


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """The biases as pairs by ascending id."""
    try:
        items = [(token, bias) for token, bias in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        limit = "a mapping of ids to biases, or pairs of them"
        raise RequestError(f"logit_bias is {given!r}; it must be {limit}", param="logit_bias") from None
    pairs: dict[int, float] = {}
    for token, bias in items:
        is_id = _is_integer(token) and token >= 0
        _require(is_id, "an id of logit_bias", token, "an integer, 0 or more", param="logit_bias")
        _require(token not in pairs, "an id of logit_bias", token, "given once", param="logit_bias")
        is_bias = _is_number(bias) and (abs(bias) <= _LARGEST or bias == -math.inf)
        limit = f"a number in [-{_LARGEST:g}, {_LARGEST:g}], or -inf to ban the token"
        _require(is_bias, f"logit_bias[{token}]", bias, limit, param="logit_bias")
        pairs[int(token)] = float(bias)
    return tuple(sorted(pairs.items()))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, limit: str, *, param: str | None = None) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}; it must be {limit}", param=param or name)
