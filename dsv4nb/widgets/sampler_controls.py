"""The controls of sampling: what each sets, its range on the slider, its default, and what a change is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.encoding.constants import EFFORTS
from dsv4nb.session.request import Limits, Options

Value = Any  # of an option, as Python has it; None is the default

_SAMPLER = (
    *("temperature", "top_p", "top_k", "min_p", "sampler", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "penalty_last_n", "penalty_scope"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One option on the screen.

    Attributes:
        kind: number, choice, switch, lines, seed or window.
        low, high, step: of a slider whose positions are evenly spaced.
        stops: of a slider whose positions are these values; None is the default.
        choices: (value, words) each.
    """

    name: str
    label: str
    hint: str
    group: str
    kind: str = "number"
    low: float = 0.0
    high: float = 1.0
    step: float = 0.01
    stops: tuple[float | None, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()

    def jsonable(self) -> dict[str, Any]:
        """Return what the page is told."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


GROUPS = {
    "choice": "Choice of the next token",
    "penalties": "Penalties",
    "reply": "Reply",
    "spec": "Speculation",
}

PRESETS: dict[str, tuple[str, dict[str, Value]]] = {
    "card": ("Model card", {"temperature": 1.0, "top_p": 1.0}),
    "code": ("Code agent", {"temperature": 1.0, "top_p": 0.95}),
    "greedy": ("Greedy", {"temperature": 0.0, "top_p": 1.0}),
}
_OFF: dict[str, Value] = {
    **{"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    **{"penalty_last_n": 0, "penalty_scope": "all"},
}


def preset(name: str) -> dict[str, Value]:
    """Return the sampler values of a preset, all of them but the seed and the kind of draw."""
    return _OFF | PRESETS[name][1]


def controls(limits: Limits) -> list[Control]:
    """Return the controls for a model."""
    room, block = limits.max_seq, limits.block_size
    efforts = [level for level in EFFORTS[limits.revision] if level is not None]
    return [
        Control(name="temperature", label="Temperature", hint="0 is greedy", group="choice", high=2, step=0.05),
        Control(name="top_p", label="Top-p", hint="the likeliest tokens with this mass; 1 is off", group="choice"),
        Control(
            name="top_k",
            label="Top-k",
            hint="the k likeliest tokens; 0 is off",
            group="choice",
            stops=(0, *(k for k in (1, 2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000))),
        ),
        Control(
            name="min_p",
            label="Min-p",
            hint="at least this share of the likeliest; 0 is off",
            group="choice",
            stops=(0, *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)),
        ),
        Control(name="seed", label="Seed", hint="", group="choice", kind="seed"),
        Control(
            name="sampler",
            label="Draw",
            hint="two draws of the same distribution",
            group="choice",
            kind="choice",
            choices=(("gumbel", "Gumbel race"), ("inverse_cdf", "inverse CDF")),
        ),
        Control(
            name="repetition_penalty",
            label="Repetition",
            hint="divides logits of tokens that were said; 1 is off",
            group="penalties",
            low=0.5,
            high=2,
            step=0.01,
        ),
        Control(
            name="frequency_penalty",
            label="Frequency",
            hint="subtracted once per time it was said; 0 is off",
            group="penalties",
            low=-2,
            high=2,
            step=0.05,
        ),
        Control(
            name="presence_penalty",
            label="Presence",
            hint="subtracted once if it was said; 0 is off",
            group="penalties",
            low=-2,
            high=2,
            step=0.05,
        ),
        Control(
            name="penalty_last_n",
            label="Window",
            hint="tokens looked back on; 0 is the whole context",
            group="penalties",
            stops=(0, *_doubling(16, room)),
        ),
        Control(
            name="penalty_scope",
            label="Scope",
            hint="which tokens count",
            group="penalties",
            kind="choice",
            choices=(("all", "prompt and reply"), ("generated", "the reply alone")),
        ),
        Control(
            name="max_new",
            label="Max tokens",
            hint=f"empty is all that is left of {room:,}",
            group="reply",
            stops=(*_doubling(1, room), None),
        ),
        Control(name="thinking", label="Thinking", hint="reason before the answer", group="reply", kind="switch"),
        Control(
            name="effort",
            label="Effort",
            hint="how long to think, in thinking replies",
            group="reply",
            kind="choice",
            choices=(("", "the model's own"), *((level, level) for level in efforts)),
        ),
        Control(
            name="stop",
            label="Stop strings",
            hint="one a line, \\n for a line break; they end the reply",
            group="reply",
            kind="lines",
        ),
        Control(name="spec", label="Speculate", hint="draft ahead and verify", group="spec", kind="switch"),
        Control(
            name="spec_window",
            label="Window",
            hint="which drafts are verified",
            group="spec",
            kind="window",
            high=max(0, block - 1),
            choices=(("off", "all drafts"), ("auto", "by measured costs"), ("slot", "by confidence")),
        ),
        Control(
            name="spec_depth",
            label="Depth",
            hint="rows of a verify forward at most",
            group="spec",
            low=1,
            high=block + 1,
            step=1,
        ),
        Control(
            name="spec_proposal",
            label="Drafts",
            hint="how drafts are chosen",
            group="spec",
            kind="choice",
            choices=(("coupled", "with the model's own noise"), ("greedy", "the drafter's best")),
        ),
        Control(
            name="spec_mode",
            label="Acceptance",
            hint="",
            group="spec",
            kind="choice",
            choices=(("exact", "exact: the same text"), ("rejection", "rejection: the same distribution")),
        ),
    ]


def defaults(limits: Limits) -> dict[str, Value]:
    """Return what is done when nothing is asked for, by option."""
    sampler, spec = limits.sampler, limits.spec
    spec_values: dict[str, Value] = {"spec": spec is not None}
    shown = spec or SpecConfig()
    spec_values |= {
        "spec_window": (shown.window, shown.tau or 0.5, shown.floor or 0) if shown.window == "slot" else shown.window,
        "spec_depth": shown.depth or limits.block_size + 1,
        "spec_proposal": shown.proposal,
        "spec_mode": shown.mode,
    }
    return {
        **{name: getattr(sampler, name) for name in _SAMPLER},
        **{"seed": None, "max_new": None, "thinking": False, "effort": None, "stop": ()},
        **spec_values,
    }


def given(options: Options, limits: Limits) -> dict[str, Value]:
    """Return the options that are set to something else than the default, by name."""
    usual = defaults(limits)
    found: dict[str, Value] = {}
    for name, value in usual.items():
        mine = getattr(options, name)
        if name == "stop":
            mine = (mine,) if isinstance(mine, str) else tuple(mine or ())
        elif name == "spec_window":
            mine = _window(mine)
        if mine is not None and mine != value:
            found[name] = mine
    return found


def effective(chosen: Mapping[str, Value], limits: Limits) -> SamplerConfig:
    """Return the sampler that the options make, with any seed."""
    values = {name: getattr(limits.sampler, name) for name in _SAMPLER}
    return SamplerConfig(**values | {name: value for name, value in chosen.items() if name in _SAMPLER})


def current_preset(chosen: Mapping[str, Value], limits: Limits) -> str:
    """Return the name of the preset that the values are, "" when they are none."""
    config = effective(chosen, limits)
    found = (name for name in PRESETS if all(getattr(config, key) == value for key, value in preset(name).items()))
    return next(found, "")


def code(call: str, chosen: Mapping[str, Value]) -> str:
    """Return the call that asks for these values; `call` ends with an open parenthesis and what comes first in it."""
    arguments = ", ".join(f"{name}={_literal(value)}" for name, value in chosen.items())
    between = ", " if arguments and not call.endswith("(") else ""
    return f"{call}{between}{arguments})"


def notes(chosen: Mapping[str, Value], limits: Limits) -> dict[str, str]:
    """Return what a person should know about the values together, by control."""
    config = effective(chosen, limits)
    told: dict[str, str] = {}
    if config.is_greedy:
        told["temperature"] = "Greedy: the likeliest token each time. Top-p, top-k, min-p, seed and draw do nothing."
    if not config.has_penalties and (config.penalty_last_n or config.penalty_scope != "all"):
        told["penalty_last_n"] = "All three penalties are off, so the window and the scope change nothing."
    if chosen.get("spec_mode") == "rejection":
        told["spec_mode"] = "Not speed only: the text differs from that of exact, its distribution does not."
    return told


def words(name: str, value: Value) -> str:
    """Return a value as a person reads it in a saved notebook."""
    match value:
        case None:
            return {"seed": "drawn each time", "max_new": "all that is left", "effort": "the model's own"}[name]
        case bool():
            return "on" if value else "off"
        case ("slot", tau, floor):
            return f"by confidence, tau {tau:g}, at least {floor}"
        case tuple():
            return ", ".join(map(repr, value)) or "none"
        case float():
            return f"{value:g}"
    return str(value)


def _window(value: object) -> Value:
    if isinstance(value, Sequence) and not isinstance(value, str):
        policy, tau, floor = (*value, None, None)[:3]
        value = (policy, 0.5 if tau is None else tau, floor or 0) if policy == "slot" else policy
    return ("slot", 0.5, 0) if value == "slot" else value


def _literal(value: Value) -> str:
    if isinstance(value, tuple) and value and value[0] == "slot":
        return repr(value if value[2] else value[:2])
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _doubling(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found
