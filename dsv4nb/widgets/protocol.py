"""Messages between a panel's page and its kernel; `js/protocol.js` declares the same, and a test compares them.

Every command carries an `id`. The kernel answers each with one `ack`, and an id that comes again gets the same answer
and no second effect, so a page may repeat what was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "begin": ("run", "user", "command"),
    "frame": ("run", "start", "tokens"),
    "call": ("run", "index", "card"),
    "snapshot": ("run", "user", "command", "next", "reasoning", "text", "n_reasoning", "cards", "is_calling"),
    "forked": ("code", "turns"),
    "names": ("id", "names"),
    "measured": ("id", "room"),
    "times": ("id", "runs"),
    "exported": ("id", "file", "mime", "content"),
    "ack": ("id", "ok", "error", "trace"),
    "maths": ("script",),
}
FROM_PAGE: dict[str, tuple[str, ...]] = {
    "send": ("id", "text"),
    "stop": ("id", "run", "command"),
    "reset": ("id",),
    "set_thinking": ("id", "value"),
    "edit": ("id", "turn", "text"),
    "switch": ("id", "turn"),
    "rewind": ("id", "turn"),
    "fork": ("id", "turn"),
    "approve": ("id", "call", "text"),
    "deny": ("id", "call"),
    "list": ("id",),
    "attach": ("id", "name"),
    "detach": ("id", "name"),
    "measure": ("id", "text"),
    "times": ("id", "turn"),
    "export": ("id", "form", "turn"),
    "resync": (),
    "maths": (),
}
CHANNELS: dict[str, str] = {"c": "content", "r": "reasoning", "t": "tool", "h": "hidden"}

# The acceptance panel. `run` counts what its kernel half has shown, so that news of something else is noticed; rounds
# are lists of the fields below, in their order.
ROUNDS_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "turns": ("turns", "shown", "follows"),
    "snapshot": ("run", "label", "note", "live", "rewinds", "mode", "rounds", "figures"),
    "frame": ("run", "start", "rounds", "figures"),
    "ended": ("run", "note", "rewinds"),
    "sweep": ("run", "n", "points", "note"),
    "ack": ("id", "ok", "error", "trace"),
}
ROUNDS_FROM_PAGE: dict[str, tuple[str, ...]] = {
    "show": ("id", "turn"),
    "rewind": ("id", "run", "round"),
    "sweep": ("id", "run"),
    "resync": (),
}
ROUND: tuple[str, ...] = (
    *("reply", "round", "start", "pending", "drafts", "accepts", "verified", "next", "kind", "emitted", "stop"),
    *("ms", "reason", "reasoning", "content"),
)
DRAFT: tuple[str, ...] = ("text", "chosen", "status", "conf", "survival", "margin", "q", "p")
STATUSES: dict[str, str] = {
    "a": "accepted",
    "r": "rejected",
    "u": "unreached",
    "n": "not_verified",
    "s": "past_stop",
}

# The sampler panel: the values are a trait. A large seed travels as text.
SAMPLER_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "refused": ("id", "name", "error"),
    "ack": ("id", "ok", "error", "trace"),
}
SAMPLER_FROM_PAGE: dict[str, tuple[str, ...]] = {
    "set": ("id", "changes"),
    "preset": ("id", "name"),
    "reset": ("id", "names"),
    "lock": ("id", "value"),
}

# The queue panel: the requests are a trait.
QUEUE_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "ack": ("id", "ok", "error", "trace"),
}
QUEUE_FROM_PAGE: dict[str, tuple[str, ...]] = {
    "cancel": ("id", "request"),
}

# The load panel: how far it is is a trait.
LOAD_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "ack": ("id", "ok", "error", "trace"),
}
LOAD_FROM_PAGE: dict[str, tuple[str, ...]] = {
    "cancel": ("id",),
}

# The cache panel: facts are a trait; texts and arrays are asked for. `key` names the ids that are meant, so that an
# answer about others is noticed. Buffers: of "reads" float32 masses of the window's rows, int32 numbers of the entries,
# their float32 masses and scores; of "experts" int32 counts by layer and expert.
CACHE_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "text": ("id", "key", "first", "pieces"),
    "reads": ("id", "key", "token", "layer", "told"),
    "experts": ("id", "key", "first", "last", "told"),
    "ack": ("id", "ok", "error", "trace"),
}
CACHE_FROM_PAGE: dict[str, tuple[str, ...]] = {
    "choose": ("id", "key"),
    "text": ("id", "key", "first", "last"),
    "reads": ("id", "key", "token", "layer"),
    "experts": ("id", "key", "first", "last"),
    "pin": ("id", "store", "entry", "value"),
    "delete": ("id", "store", "entry"),
    "move": ("id", "store", "entry"),
}

# The token lens. `run` counts what its kernel half has shown; tokens are the buffers of `lens_reply.arrays_of`, and
# each text is told once: `texts` are (id, text) of those that no message since the last snapshot had.
LENS_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "turns": ("turns", "shown", "follows"),
    "snapshot": (*("run", "label", "note", "live", "continues", "scores", "scoring", "fork", "n", "k", "texts"),),
    "frame": ("run", "start", "n", "k", "texts"),
    "ended": ("run", "note", "continues", "scores"),
    "ack": ("id", "ok", "error", "trace"),
}
LENS_FROM_PAGE: dict[str, tuple[str, ...]] = {
    "show": ("id", "turn"),
    "score": ("id", "run"),
    "continue": ("id", "run", "token", "alternative"),
    "back": ("id",),
    "resync": (),
}
MADE: tuple[str, ...] = ("plain", "given", "first", "accepted", "correction", "bonus")

Messages = Mapping[str, tuple[str, ...]]

_TYPES: dict[str, type] = {
    **{"id": str, "text": str, "command": str, "call": str, "form": str},
    **{"changes": dict, "name": str, "names": list, "request": int},
    **{"key": str, "first": int, "last": int, "token": int, "layer": int, "store": str, "entry": int},
    **{"run": int, "turn": int, "round": int, "value": bool, "alternative": int},
}


def message(kind: str, *, declared: Messages = FROM_KERNEL, **fields: Any) -> dict[str, Any]:
    """Return a message to the page; its fields are exactly the declared ones."""
    assert set(fields) == set(declared[kind]), (kind, sorted(fields))
    return {"kind": kind, **fields}


def parse(content: object, declared: Messages = FROM_PAGE) -> dict[str, Any] | None:
    """Return a message from the page, or None when it is none of ours."""
    if not isinstance(content, Mapping) or (kind := content.get("kind")) not in declared:
        return None
    fields = {name: content.get(name) for name in declared[str(kind)]}
    if any(type(value) is not _TYPES[name] for name, value in fields.items()):
        return None
    return {"kind": kind, **fields}
