"""The steps before rendering: merge turns, sort tool results, drop old reasoning (encoding.md section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsv4nb.errors import EncodingError

# a message, or a user turn's blocks; "at" is the index of the (first) message it came from
Entry = dict[str, Any]

_KEPT_BEFORE_LAST = {"user", "system", "tool", "latest_reminder", "direct_search_results"}


def merge(messages: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Join runs of user and tool messages into user entries that hold blocks.

    Raises:
        EncodingError: a message, its role or an id that orders tool results is of a wrong type.
    """
    out: list[Entry] = []
    for at, message in enumerate(messages):
        _check(message, at)
        role = message["role"]
        last = out[-1] if out and out[-1].get("role") == "user" and "blocks" in out[-1] else None
        if role == "tool":
            block = {"type": "tool_result", "at": at, "id": message.get("tool_call_id") or ""}
            block["content"] = message.get("content")
            if last is None:
                out.append({"role": "user", "at": at, "blocks": [block]})
            else:
                last["blocks"].append(block)
        elif role == "user":
            block = {"type": "text", "at": at, "content": message.get("content")}
            if last is not None and last.get("task") is None:
                last["blocks"].append(block)
            else:
                carried = {k: message[k] for k in ("task", "wo_eos", "mask") if k in message}
                out.append({"role": "user", "at": at, "blocks": [block], **carried})
        else:
            out.append({**message, "at": at})
    return out


def _check(message: object, at: int) -> None:
    """Refuse what the steps of this module could not handle; the rest is checked where it is rendered."""
    if not isinstance(message, Mapping):
        raise EncodingError(f"a message must be an object, not {type(message).__name__}", index=at)
    role, task = message.get("role"), message.get("task")
    if not isinstance(role, str):
        raise EncodingError(f"role must be text, not {role!r}", index=at)
    if not isinstance(task, str | None):
        raise EncodingError(f"task must be text, not {task!r}", index=at)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise EncodingError(f"tool_calls must be a list of objects, not {calls!r}", index=at)
    for call_id in (message.get("tool_call_id"), *map(_call_id, calls)):
        if call_id and not isinstance(call_id, str | int):
            raise EncodingError(f"the id of a tool call must be text, not {call_id!r}", index=at)


def _call_id(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    return call.get("id") or (function.get("id") if isinstance(function, Mapping) else None)


def sort_tool_results(entries: Sequence[Entry]) -> list[Entry]:
    """Put each user entry's tool results into the order of the calls they answer; text keeps its place."""
    out: list[Entry] = []
    order: dict[Any, int] = {}
    for entry in entries:
        if entry.get("role") == "assistant" and entry.get("tool_calls"):
            order = {}
            for position, call in enumerate(entry["tool_calls"]):
                if call_id := _call_id(call):
                    order[call_id] = position
        blocks = entry.get("blocks")
        if entry.get("role") == "user" and blocks and order:
            results = [b for b in blocks if b["type"] == "tool_result"]
            if len(results) > 1:
                in_order = iter(sorted(results, key=lambda b: order.get(b["id"], 0)))
                entry = {**entry, "blocks": [next(in_order) if b["type"] == "tool_result" else b for b in blocks]}
        out.append(entry)
    return out


def last_question(entries: Sequence[Entry]) -> int:
    """Return the index of the last user or developer entry, -1 when there is none."""
    return max((i for i, e in enumerate(entries) if e.get("role") in ("user", "developer")), default=-1)


def drop_old_reasoning(entries: Sequence[Entry]) -> list[Entry]:
    """Strip reasoning before the last question, and developer entries with it."""
    last = last_question(entries)
    out: list[Entry] = []
    for i, entry in enumerate(entries):
        if i >= last or entry.get("role") in _KEPT_BEFORE_LAST:
            out.append(entry)
        elif entry.get("role") == "assistant":
            out.append({k: v for k, v in entry.items() if k != "reasoning_content"})
    return out
