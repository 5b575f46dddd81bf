"""Tool declarations and calls ↔ DSML text (encoding.md section 7)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, TOOLS_BLOCK, TOOLS_PLACEHOLDER
from dsv4nb.errors import EncodingError

_BEFORE_SCHEMAS, _, _AFTER_SCHEMAS = TOOLS_BLOCK.partition(TOOLS_PLACEHOLDER)


def to_json(value: Any, index: int | None = None) -> str:
    """Write JSON as the protocol does: keys in given order, non-ASCII raw.

    Raises:
        EncodingError: JSON cannot express the value; names message `index`.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodingError(f"a value cannot be written as JSON: {error}", index=index) from error


def declaration(tools: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return the block that declares `tools`, one JSON line each.

    Args:
        tools: OpenAI-shaped; each entry's `function` is written whole.
        index: of the message they belong to, for errors.
    """
    return "".join(text for text, _ in declaration_pieces(tools, index))


def declaration_pieces(tools: Sequence[Mapping[str, Any]], index: int) -> list[tuple[str, bool]]:
    """Return the block of `declaration` as (text, is template) pieces: what a schema says is not the template's."""
    if not isinstance(tools, list | tuple):
        raise EncodingError(f"tools must be a list, not {tools!r}", index=index)
    lines = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if function is None:
            raise EncodingError(f"a tool must be an object with a 'function', not {tool!r}", index=index)
        lines.append(to_json(function, index))
    return [(_BEFORE_SCHEMAS, True), ("\n".join(lines), False), (_AFTER_SCHEMAS, True)]


def calls_block(calls: Sequence[Mapping[str, Any]], index: int) -> list[tuple[str, bool]]:
    """Return the DSML of an assistant's calls as (text, is template) pieces.

    Args:
        calls: OpenAI-shaped; `arguments` is JSON text.
    """
    pieces: list[tuple[str, bool]] = [(f"\n\n{CALLS_OPEN}\n", True)]
    for i, call in enumerate(calls):
        if i:
            pieces.append(("\n", True))
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EncodingError(f"tool call {i} must have a 'function' with a 'name', not {call!r}", index=index)
        pieces += [(f'<{DSML}invoke name="', True), (function["name"], False), ('">\n', True)]
        pieces += _parameters(function.get("arguments"), index)
        pieces.append((f"\n</{DSML}invoke>", True))
    pieces.append((f"\n{CALLS_CLOSE}", True))
    return pieces


def _parameters(arguments: object, index: int) -> list[tuple[str, bool]]:
    pieces: list[tuple[str, bool]] = []
    for i, (key, value) in enumerate(_items(arguments, index)):
        flag = "true" if isinstance(value, str) else "false"
        text = value if isinstance(value, str) else to_json(value, index)
        pieces += [("\n" if i else "", True), (f'<{DSML}parameter name="', True), (key, False)]
        pieces += [(f'" string="{flag}">', True), (text, False), (f"</{DSML}parameter>", True)]
    return pieces


def _items(arguments: object, index: int) -> list[tuple[str, Any]]:
    if not isinstance(arguments, str):
        # the reference encoder wraps what is not text; policy.py writes objects as text before this is reached
        return [("arguments", arguments)]
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return [("arguments", arguments)]
    except RecursionError as error:
        raise EncodingError("the arguments of a tool call are nested too deeply", index=index) from error
    if not isinstance(parsed, dict):
        raise EncodingError(f"tool arguments must be a JSON object, not {arguments!r}", index=index)
    return list(parsed.items())
