"""`response_format`, `regex` and `tool_choice` of a request → what the reply must be, as a value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from dsv4nb.errors import RequestError

Answer = Literal["none", "text", "json", "regex"]
Calls = Literal["none", "one", "many"]

_FORMATS = ("text", "json_object", "json_schema")
_CHOICES = ("auto", "none", "required")
_JSON_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What the content of a reply must be: an answer, or a block of calls where both are possible.

    Attributes:
        answer: "none" when the reply must call, "text" for anything.
        pattern: the JSON text of a schema, or the regex; "" for the others.
        calls: how many a block may have.
        functions: the JSON text of the list of functions that may be called.
        thinking: whether the reply begins in its reasoning, which is not constrained.
        has_tools: whether a block of calls in the reply is one, called or not.
    """

    answer: Answer
    pattern: str = ""
    calls: Calls = "none"
    functions: str = "[]"
    thinking: bool = False
    has_tools: bool = False

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Constraint:
        """Read what `to_json` wrote.

        Raises:
            RequestError: the text is no constraint.
        """
        try:
            raw = json.loads(text)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the constraint is no JSON: {error}", param="constraint") from error
        if not isinstance(raw, dict) or raw.keys() != {f.name for f in fields(cls)}:
            names = ", ".join(f.name for f in fields(cls))
            raise RequestError(f"the constraint must be an object with {names}", param="constraint")
        for name, valid in (("answer", get_args(Answer)), ("calls", get_args(Calls))):
            if raw[name] not in valid:
                raise RequestError(_unknown(f"the constraint's {name}", raw[name], valid), param="constraint")
        return cls(**raw)


def constraint_of(
    *,
    response_format: Mapping[str, Any] | None,
    tool_choice: str | Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    regex: str | None = None,
    thinking: bool,
    tools_enabled: bool,
) -> Constraint | None:
    """Return what a request asks of its reply, None when nothing.

    A format or a regex leaves the reply free to call a declared tool instead. With `tool_choice` "auto", or none
    given, calls are constrained if there is a format or a regex, or if a function has OpenAI's "strict": true.

    Args:
        response_format: {"type": "text" | "json_object" | "json_schema"}, the last with the schema as "schema" or,
            as OpenAI nests it, in "json_schema".
        tool_choice: auto, none, required (at least one call), or {"type": "function", "function": {"name": …}}
            (one call of it).
        tools: the declared functions, OpenAI-shaped.
        regex: what the whole content matches, in the syntax of Rust's regex crate: no look-around.
        thinking: whether the prompt ends in `<think>`.
        tools_enabled: whether tools were offered to the model.

    Raises:
        RequestError: a value is not understood or contradicts another; `param` names it.
    """
    answer, pattern = _answer(response_format, regex)
    functions = _functions(tools)
    chosen = _choice(tool_choice, [function["name"] for function in functions])
    if chosen in ("required", "named") and answer != "text":
        given = "regex" if answer == "regex" else "response_format"
        raise RequestError(
            f"tool_choice demands a call and {given} a text; drop one of them, or set tool_choice to 'auto'",
            param="tool_choice",
        )
    calls: Calls = "none"
    if chosen == "named":
        assert isinstance(tool_choice, Mapping)
        name = tool_choice["function"]["name"]
        functions, answer, calls = [f for f in functions if f["name"] == name], "none", "one"
    elif chosen == "required":
        answer, calls = "none", "many"
    elif chosen == "auto" and tools_enabled and functions:
        is_strict = any(function.get("strict") is True for function in functions)
        calls = "many" if is_strict or answer != "text" else "none"
    if answer == "text" and calls == "none":
        return None
    return Constraint(
        answer=answer,
        pattern=pattern,
        calls=calls,
        functions="[]" if calls == "none" else _json(functions, "tools"),
        thinking=thinking,
        has_tools=tools_enabled,
    )


def _answer(response_format: object, regex: object) -> tuple[Answer, str]:
    """What the content must be, and its schema or regex."""
    schema = None if response_format is None else _schema(response_format)
    if regex is None:
        return ("text", "") if schema is None else ("json", _json(schema, "response_format"))
    if not isinstance(regex, str) or not regex:
        raise RequestError(f"regex is {regex!r}; it must be text of at least one character", param="regex")
    if any("\ud800" <= character <= "\udfff" for character in regex):
        raise RequestError(f"regex is {regex!r}; it holds half a surrogate pair, which is no character", param="regex")
    if schema is not None:
        raise RequestError("regex and response_format are both given; pass one of them", param="regex")
    return "regex", regex


def _schema(response_format: object) -> Mapping[str, Any] | None:
    """The schema that a format stands for, None for text."""
    param = "response_format"
    if not isinstance(response_format, Mapping):
        raise RequestError(f"{param} must be an object, not {type(response_format).__name__}", param=param)
    kind = response_format.get("type")
    if kind not in _FORMATS:
        raise RequestError(_unknown(f"{param}'s type", kind, _FORMATS), param=param)
    if kind != "json_schema":
        return None if kind == "text" else _JSON_OBJECT
    nested = response_format.get("json_schema")
    places = [place for place in (nested, response_format) if isinstance(place, Mapping) and "schema" in place]
    if len(places) != 1:
        met = "has two schemas" if places else "lacks its schema"
        raise RequestError(f"{param} {met}; pass " + '{"type": "json_schema", "schema": {…}}', param=param)
    schema = places[0]["schema"]
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param}'s schema must be an object, not {type(schema).__name__}", param=param)
    return schema


def _functions(tools: object) -> list[Mapping[str, Any]]:
    if tools is not None and not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list, not {type(tools).__name__}", param="tools")
    out: list[Mapping[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise RequestError(f"tool {i} must be an object with a 'function' that has a 'name'", param="tools")
        out.append(function)
    return out


def _choice(tool_choice: object, names: Sequence[str]) -> Literal["auto", "none", "required", "named"]:
    param = "tool_choice"
    if tool_choice is None:
        return "auto"
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool_choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError(
                f"{param} is {tool_choice!r}; it must be one of {', '.join(_CHOICES)}, or "
                '{"type": "function", "function": {"name": …}}',
                param=param,
            )
        if names and name not in names:
            raise RequestError(_unknown(f"the function of {param}", name, names), param=param)
    elif tool_choice not in _CHOICES:
        raise RequestError(_unknown(param, tool_choice, _CHOICES), param=param)
    if tool_choice != "none" and not names:
        raise RequestError(f"{param} is given without tools; pass tools=, or leave it out", param=param)
    if isinstance(tool_choice, Mapping):
        return "named"
    return "required" if tool_choice == "required" else "none" if tool_choice == "none" else "auto"


def _unknown(what: str, value: object, valid: Iterable[str]) -> str:
    names = list(valid)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(names)}"
    return f"{what} is {value!r}; {hint}"


def _json(value: object, param: str) -> str:
    """JSON text, keys in given order."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} cannot be written as JSON: {error}", param=param) from error
    return text
