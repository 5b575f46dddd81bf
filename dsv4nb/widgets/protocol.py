"""Messages between a chat's page and its kernel; `js/protocol.js` declares the same, and a test compares them.

Every command carries an `id`. The kernel answers each with one `ack`, and an id that comes again gets the same answer
and no second effect, so a page may repeat what was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "begin": ("run", "user", "command"),
    "frame": ("run", "start", "tokens"),
    "snapshot": ("run", "user", "command", "next", "reasoning", "text", "tool", "n_reasoning"),
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

_TYPES: dict[str, type] = {"id": str, "text": str, "command": str, "run": int, "value": bool}


def message(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a message to the page; its fields are exactly the declared ones."""
    assert set(fields) == set(FROM_KERNEL[kind]), (kind, sorted(fields))
    return {"kind": kind, **fields}


def parse(content: object) -> dict[str, Any] | None:
    """Return a message from the page, or None when it is none of ours."""
    if not isinstance(content, Mapping) or (kind := content.get("kind")) not in FROM_PAGE:
        return None
    fields = {name: content.get(name) for name in FROM_PAGE[str(kind)]}
    if any(type(value) is not _TYPES[name] for name, value in fields.items()):
        return None
    return {"kind": kind, **fields}
