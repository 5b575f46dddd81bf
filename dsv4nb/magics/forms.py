"""The form of a reply: JSON, JSON of a schema, calls of the notebook's functions."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_origin

from IPython.core.error import UsageError

from dsv4nb.errors import RequestError
from dsv4nb.events import Generation
from dsv4nb.magics.prompt import variable_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generation):
    """A reply in JSON, and what it means.

    Attributes:
        value: the text as Python has it, an object of the schema's class if it is of one; None when the text is not
            complete or was refused by the class.
        problem: why there is no value, "" when there is one.
    """

    value: Any
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a reply must be.

    Attributes:
        options: by the names of `Model.generate`.
        read: makes a value of parsed JSON; None when the reply is not JSON.
    """

    options: Mapping[str, Any]
    read: Callable[[Any], Any] | None = None

    def parse(self, reply: Generation) -> Generation:
        """Return the reply with its value."""
        if self.read is None:
            return reply
        value, problem = None, ""
        try:
            value = self.read(json.loads(reply.text))
        except ValueError as error:  # a Misfit is one
            problem = _problem(reply, error)
        known = {field.name: getattr(reply, field.name) for field in fields(Generation)}
        return Parsed(**known, value=value, problem=problem)


def form_of(args: Namespace, names: Mapping[str, Any]) -> Form:
    """Return the form that a line asks for.

    Raises:
        UsageError: a variable is missing, or is none that the option can take.
        RequestError: a class has a field that JSON cannot carry.
    """
    has_json, name = hasattr(args, "json"), getattr(args, "schema", None)
    options: dict[str, Any] = {}
    if hasattr(args, "tools"):
        options["tools"] = [variable_named(tool, names, "--tools") for tool in args.tools]
    if has_json and name is not None:
        raise UsageError("%%dsv4: --json and --schema are both given; --schema alone gives JSON already.")
    if has_json:
        return Form(options=options | {"response_format": {"type": "json_object"}}, read=lambda value: value)
    if name is None:
        return Form(options=options)
    schema, read = _schema(name, variable_named(name, names, "--schema"))
    json_schema = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    return Form(options=options | {"response_format": json_schema}, read=read)


def _schema(name: str, value: Any) -> tuple[Mapping[str, Any], Callable[[Any], Any]]:
    """Return a schema and what reads its values."""
    if isinstance(value, Mapping):
        return value, lambda found: found
    if not isinstance(value, type) and get_origin(value) is None:
        raise UsageError(
            f"%%dsv4: --schema names {name!r}, which holds no schema; it must be a dict with one, or a dataclass, "
            "a TypedDict or a pydantic model."
        )
    from dsv4nb.session.annotations import shape_of

    try:
        shape = shape_of(value, repr(name))
    except RequestError as refused:
        raise RequestError(f"--schema: {refused}", param="schema") from None
    return shape.schema, lambda found: shape.read(found, name)


def _problem(reply: Generation, error: ValueError) -> str:
    if reply.stop_reason == "cancelled":
        return "the reply was stopped before its JSON was complete"
    if reply.stop_reason == "length":
        return "the reply reached the token limit before its JSON was complete; raise --max-new"
    if reply.stop_reason == "tool_calls":
        return "the reply is a call, and no JSON"
    return f"the reply is not what was asked for: {error}"
