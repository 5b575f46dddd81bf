"""OpenAI-shaped requests → messages of the core encoder (encoding.md section 11).

What we decide and the official encoder does not stands here and nowhere else. Fields of a message that the
encoding has no place for (name, refusal, annotations, …) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4nb.encoding.constants import Revision
from dsv4nb.encoding.tools import to_json
from dsv4nb.errors import EncodingError, PromptEmpty

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

# requested effort → the encoder's; "none" means chat, None takes the default
_EFFORTS: dict[Revision, dict[str, str | None]] = {
    "preview": {
        "minimal": None,
        "low": None,
        "medium": None,
        "high": "high",
        "xhigh": "max",
        "max": "max",
        "ultra": "max",
    },
    "v0731": {
        "minimal": "low",
        "low": "low",
        "medium": "high",  # as the hosted API; the encoder itself has no such level
        "high": "high",
        "xhigh": "high",
        "max": "max",
        "ultra": "max",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How a reply thinks: two arguments of `render`.

    Attributes:
        effort: the encoder's name, None when nothing is asked for.
    """

    thinking: bool
    effort: str | None


def reasoning(
    effort: str | None, *, revision: Revision, thinking: bool | None = None, default: str | None = None
) -> Reasoning:
    """Translate a requested effort into the checkpoint's own levels.

    Args:
        effort: minimal, low, medium, high, xhigh, max or ultra; none turns thinking off; None takes `default`.
        thinking: the request's own switch; False turns thinking off whatever the effort, None follows it.

    Raises:
        EncodingError: the effort has another name.
    """
    levels = _EFFORTS[revision]
    for name in (effort, default):
        if name is not None and (not isinstance(name, str) or name not in (*levels, "none")):
            raise EncodingError(f"the effort is {name!r}; it must be one of none, {', '.join(levels)}")
    chosen = default if effort is None else effort
    if thinking is False or chosen == "none":
        return Reasoning(thinking=False, effort=None)
    return Reasoning(thinking=True, effort=None if chosen is None else levels[chosen])


def normalize(
    messages: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_format: Mapping[str, Any] | None = None,
    expects_reply: bool = True,
) -> list[Message]:
    """Return messages that `render` takes; the input is not changed.

    Args:
        messages: a system (or developer) message may stand first; the rest is user, assistant and tool. A string
            is one user message.
        tools: attached to the leading system message, or to an empty one put in front.
        response_format: likewise; {"type": "text"} asks for nothing.
        expects_reply: refuse a conversation that leaves the assistant nothing to write; False for one that is over.

    Raises:
        EncodingError: a message, a tool or the format is not understood; `index` says which message.
        PromptEmpty: `messages` is the empty string.
    """
    if isinstance(messages, str):
        if not messages:
            raise PromptEmpty("messages")
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, bytes) or not isinstance(messages, Sequence):
        raise EncodingError(f"messages must be text or a list, not {_kind(messages)}")
    if not messages:
        raise EncodingError("messages is empty; pass at least one message")
    out = [_message(message, i, last=i == len(messages) - 1) for i, message in enumerate(messages)]
    if expects_reply:
        _require_open(out[-1], len(out) - 1)
    attached: Message = {}
    if tools is not None and (checked := _tools(tools)):
        attached["tools"] = checked
    if response_format is not None and (checked_format := _format(response_format)):
        attached["response_format"] = checked_format
    if attached:
        if out[0]["role"] != "system":
            out.insert(0, {"role": "system", "content": ""})
        out[0] |= attached
    return out


def _require_open(last: Message, i: int) -> None:
    """Refuse a last message whose rendering does not end in the assistant's header."""
    if last["role"] == "system":
        raise EncodingError("a system message alone asks for nothing; add a user message", index=i)
    if last["role"] == "assistant" and not last.get("wo_eos"):
        raise EncodingError(
            "the last message is a finished reply; add a user or tool message, or mark it prefix=True to continue it",
            index=i,
        )


def _message(message: object, i: int, *, last: bool) -> Message:
    if not isinstance(message, Mapping):
        raise EncodingError(f"a message must be an object, not {_kind(message)}", index=i)
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise EncodingError(f"the role is {given!r}; it must be one of {', '.join(_ROLES)}", index=i)
    if role == "system" and i > 0:
        raise EncodingError(
            f"a {given} message must be the first one: further on the model reads it as bare text. "
            "Put it in front, or into the next user message.",
            index=i,
        )
    out: Message = {"role": role, "content": _content(message.get("content"), i)}
    if role == "assistant":
        _assistant(out, message, i, last=last)
    elif role == "tool":
        call_id = _optional_text(message, "tool_call_id", i)
        if call_id is not None:
            out["tool_call_id"] = call_id
    return out


def _assistant(out: Message, message: Mapping[str, Any], i: int, *, last: bool) -> None:
    thought = _optional_text(message, "reasoning_content", i)
    if thought is None:
        thought = _optional_text(message, "reasoning", i)
    if thought is not None:
        out["reasoning_content"] = thought
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise EncodingError(f"tool_calls must be a list, not {_kind(calls)}", index=i)
    if calls:
        out["tool_calls"] = [_call(call, i, position) for position, call in enumerate(calls)]
    prefix = message.get("prefix")
    if prefix is not None and not isinstance(prefix, bool):
        raise EncodingError(f"prefix must be true or false, not {_kind(prefix)}", index=i)
    if prefix:
        if not last:
            raise EncodingError("only the last message can be a prefix to continue", index=i)
        out["wo_eos"] = True


def _content(content: object, i: int) -> str:
    """Return the text of a message; parts are joined by a blank line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content, "content", i)
    if not isinstance(content, list | tuple):
        raise EncodingError(f"content must be text or a list of parts, not {_kind(content)}", index=i)
    texts = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise EncodingError(f"content part {position} must be an object with a 'type'", index=i)
        if kind != "text":
            raise EncodingError(f"content part {position} is of type {kind!r}; this model reads text only", index=i)
        text = part.get("text")
        if not isinstance(text, str):
            raise EncodingError(f"content part {position} must have a 'text', not {_kind(text)}", index=i)
        texts.append(_unicode(text, f"content part {position}", i))
    return "\n\n".join(texts)


def _optional_text(message: Mapping[str, Any], key: str, i: int) -> str | None:
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise EncodingError(f"{key} must be text, not {_kind(value)}", index=i)
    return _unicode(value, key, i)


def _unicode(text: str, what: str, i: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodingError(f"{what} holds half a surrogate pair at character {error.start}", index=i) from error
    return text


def _call(call: object, i: int, position: int) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise EncodingError(f"tool call {position} must be an object with a 'function'", index=i)
    kind = call.get("type", "function")
    if kind != "function":
        raise EncodingError(f"tool call {position} is of type {kind!r}; only 'function' is known", index=i)
    name = function.get("name")
    if not isinstance(name, str):
        raise EncodingError(f"tool call {position}: the name must be text, not {_kind(name)}", index=i)
    arguments = _arguments(function.get("arguments"), i)
    out: Message = {"type": "function", "function": {"name": _unicode(name, "the name", i), "arguments": arguments}}
    call_id = _optional_text(call, "id", i)
    return out if call_id is None else {"id": call_id, **out}


def _arguments(arguments: object, i: int) -> str:
    """Return arguments as the JSON text of an object, or as the text that is no JSON."""
    if arguments is None:
        return "{}"
    if isinstance(arguments, Mapping):
        return to_json(dict(arguments), i)
    if not isinstance(arguments, str):
        return to_json({"arguments": arguments}, i)
    if not arguments.strip():
        return "{}"
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return _unicode(arguments, "arguments", i)  # the encoder writes it as one raw parameter
    except RecursionError as error:
        raise EncodingError("the arguments of a tool call are nested too deeply", index=i) from error
    if isinstance(parsed, dict):
        return arguments
    return "{}" if parsed is None else to_json({"arguments": parsed}, i)


def _tools(tools: object) -> list[Message]:
    if not isinstance(tools, list | tuple):
        raise EncodingError(f"tools must be a list, not {_kind(tools)}")
    out = []
    for position, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
            raise EncodingError(f"tool {position} must be an object with a 'function', not {_kind(tool)}")
        kind = tool.get("type", "function")
        if kind != "function":
            raise EncodingError(f"tool {position} is of type {kind!r}; only 'function' is known")
        if not isinstance(function.get("name"), str):
            raise EncodingError(f"tool {position} must have a 'name', not {_kind(function.get('name'))}")
        out.append({**tool, "function": dict(function)})
    return out


def _format(response_format: object) -> Message | None:
    if not isinstance(response_format, Mapping):
        raise EncodingError(f"response_format must be an object, not {_kind(response_format)}")
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise EncodingError(f"response_format is of type {kind!r}; it must be text, json_object or json_schema")
    return None if kind == "text" else dict(response_format)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
