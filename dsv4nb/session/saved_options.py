"""The options of a chat to JSON and back; functions become declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from dsv4nb.session.request import Options, toolset


def options_to_json(options: Options) -> dict[str, Any]:
    """Return what differs from the defaults."""
    defaults = Options()
    out = {f.name: getattr(options, f.name) for f in fields(Options)}
    out = {name: value for name, value in out.items() if value != getattr(defaults, name)}
    if "tools" in out:
        out["tools"] = toolset(options).schemas
    if "logit_bias" in out:
        out["logit_bias"] = bias_to_json(dict(out["logit_bias"]))
    return out


def options_from_json(raw: Mapping[str, Any]) -> Options:
    """Read what `options_to_json` wrote.

    Raises:
        ValueError, TypeError: these are no options.
    """
    known = {f.name for f in fields(Options)}
    if unknown := set(raw) - known:
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}")
    bias = bias_from_json(raw.get("logit_bias", ()))
    return Options(**{**raw, **({"logit_bias": bias} if bias else {})})


def bias_to_json(bias: Mapping[int, float]) -> list[list[Any]]:
    """Return a logit bias; JSON has neither whole numbers as keys nor an infinity."""
    return [[int(token), repr(float(value))] for token, value in bias.items()]


def bias_from_json(raw: Sequence[Sequence[Any]]) -> dict[int, float]:
    """Read what `bias_to_json` wrote."""
    return {int(token): float(value) for token, value in raw}
