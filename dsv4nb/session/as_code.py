"""A turn as Python that asks it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from dsv4nb.config import SamplerConfig
from dsv4nb.session.request import Options
from dsv4nb.session.tree import Turn

_SAMPLER = tuple(f.name for f in fields(SamplerConfig))


def code_of(
    turn: Turn, messages: Sequence[Mapping[str, Any]], options: Options, defaults: SamplerConfig, name: str = "m"
) -> str:
    """Return code that starts a chat where this turn began, and asks for it with the same sampler values and seed.

    Args:
        messages: the history before the turn, without the system message.
        options: of the chat, for a turn that does not know its own.
        defaults: the sampler values of a request that says nothing.
        name: of the model's variable.
    """
    options = turn.options or options
    given = {f.name: getattr(options, f.name) for f in fields(Options) if f.name not in _SAMPLER}
    given = {key: value for key, value in given.items() if value != getattr(Options(), key)}
    lines = [f"    {key}={_literal(value)},\n" for key, value in given.items()]
    if messages:
        lines.insert(0, f"    messages={_messages(messages)},\n")
    chat = f"chat = {name}.chat(\n{''.join(lines)})\n" if lines else f"chat = {name}.chat()\n"
    sampler = "".join(f", {key}={value!r}" for key, value in _sampler(turn, defaults).items())
    return f"{chat}chat.send({turn.user!r}{sampler})\n"


def _sampler(turn: Turn, defaults: SamplerConfig) -> dict[str, Any]:
    if not turn.runs:
        return {}
    config = turn.runs[0].config
    found = {name: getattr(config, name) for name in _SAMPLER}
    found = {name: value for name, value in found.items() if name == "seed" or value != getattr(defaults, name)}
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    return found


def _literal(value: Any) -> str:
    if isinstance(value, list | tuple) and any(map(callable, value)):
        return f"[{', '.join(map(_tool, value))}]"
    return repr(value)


def _tool(tool: Mapping[str, Any] | Callable[..., Any]) -> str:
    return str(tool.__name__) if callable(tool) else repr(dict(tool))


def _messages(messages: Sequence[Mapping[str, Any]]) -> str:
    return "[\n" + "".join(f"        {dict(message)!r},\n" for message in messages) + "    ]"
