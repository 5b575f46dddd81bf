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
    "ack": ("id", "ok", "error"),
}
FROM_PAGE: dict[str, tuple[str, ...]] = {
    "send": ("id", "text"),
    "stop": ("id", "run", "command"),
    "reset": ("id",),
    "set_thinking": ("id", "value"),
    "resync": (),
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
    "ack": ("id", "ok", "error"),
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

Messages = Mapping[str, tuple[str, ...]]

_TYPES: dict[str, type] = {
    **{"id": str, "text": str, "command": str},
    **{"run": int, "turn": int, "round": int, "value": bool},
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
