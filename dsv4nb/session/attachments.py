"""Variables and functions of the notebook in a conversation: as text in a message, or as tools."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.session.export import fenced
from dsv4nb.session.tool_text import LIMIT, MAX_ITEMS, result_text

_NAME = re.compile(r"[^`\x00-\x1f\x7f]{1,120}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What goes along with the next message, or a function that the model may call from then on.

    Attributes:
        about: type and size, for people.
        text: what the model reads, as it was when it was attached; "" of a function.
        language: of the text.
        function: None of a value.
        n_tokens: that the prompt grows by, None when nobody can count.
    """

    name: str
    about: str
    text: str = ""
    language: str = "text"
    function: Callable[..., Any] | None = None
    n_tokens: int | None = None

    @property
    def block(self) -> str:
        """The text with its name, in a fence that nothing in it can close."""
        return f"`{self.name}` ({self.about}):\n{fenced(self.text, self.language)}"


def message_with(attachments: tuple[Attachment, ...], text: str) -> str:
    """Return a message as it is sent: the values first, then what was asked."""
    return "\n\n".join([*(one.block for one in attachments if one.function is None), text])


def attachment_of(name: str, value: object) -> Attachment:
    """Return a value as text, or a function as a tool.

    Raises:
        RequestError: it is of another kind, or too large.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"name is {name!r}; it must be one line of text without backticks", param="name")
    kind = kind_of(value)
    if kind is None:
        raise RequestError(
            f"{name} is a {type(value).__name__}; text, tables, arrays, dicts, lists and functions can be attached",
            param="value",
        )
    about = about_of(value)
    if kind == "function":
        function: Any = value
        return Attachment(name=function.__name__, about=about, function=function)
    if kind == "json" and not _fits(value, LIMIT):
        raise RequestError(
            f"{name} is too large: it takes more than {LIMIT:,} characters; attach a part of it", param="value"
        )
    if kind == "array":
        return Attachment(name=name, about=about, text=_array_text(value))
    language = {"json": "json", "table": "csv"}.get(kind, "text")
    return Attachment(name=name, about=about, text=result_text(value), language=language)


def kind_of(value: object) -> str | None:
    """Return what a value is attached as: text, table, array, json or function; None when it cannot be."""
    if isinstance(value, str):
        return "text"
    if inspect.isclass(value) or inspect.ismodule(value):
        return None
    if hasattr(value, "to_csv") and hasattr(value, "index"):
        return "table"
    if hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape"):
        return "array"
    if isinstance(value, dict | list | tuple):
        return "json"
    if inspect.isfunction(value) or inspect.ismethod(value):
        return "function"
    return None


def about_of(value: Any) -> str:
    """Return type and size of a value that can be attached."""
    name = type(value).__name__
    match kind_of(value):
        case "text":
            return f"{name}, {_many(len(value), 'character')}"
        case "table":
            shape = tuple(value.shape)
            columns = f", {_many(shape[1], 'column')}" if len(shape) > 1 else ""
            return f"{name}, {_many(shape[0], 'row')}{columns}"
        case "array":
            return f"{name}, {value.dtype}, {' × '.join(map(str, value.shape)) or 'one number'}"
        case "function":
            return f"function{inspect.signature(value)}"
        case _:
            return f"{name}, {_many(len(value), 'key' if isinstance(value, Mapping) else 'item')}"


def user_variables() -> dict[str, Any]:
    """Return what a person named in this notebook, {} outside IPython."""
    if "IPython" not in sys.modules:
        return {}
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None:
        return {}
    hidden = shell.user_ns_hidden
    return {
        name: value
        for name, value in list(shell.user_ns.items())  # a copy in one step: cells may run meanwhile
        if not name.startswith("_") and hidden.get(name, shell) is not value
    }


def name_in_notebook(value: object) -> str:
    """Return code that gives `value` in this notebook, "" when nothing there does."""
    variables = user_variables()
    for name, other in variables.items():
        if other is value:
            return name
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        shown = {} if shell is None else dict(shell.user_ns.get("Out", {}))
        for number, other in shown.items():
            if other is value:
                return f"Out[{number}]"
    return ""


def attachable() -> list[tuple[str, str, bool]]:
    """Return (name, type and size, whether it is a function) of the notebook's variables that can be attached.

    Of functions those with a docstring, which tells a model what they are for, and none of dsv4nb itself.
    """
    found = []
    for name, value in sorted(user_variables().items()):
        kind = kind_of(value)
        if kind is not None and (kind != "function" or _is_tool(value)):
            with suppress(Exception):  # of a type that does not tell its size
                found.append((name, about_of(value), kind == "function"))
    return sorted(found, key=lambda one: one[2])


def _is_tool(function: Any) -> bool:
    return bool(inspect.getdoc(function)) and not str(function.__module__).startswith("dsv4nb")


def named(value: object, name: str | None) -> tuple[str, object]:
    """Return what is to be attached with its name; text alone is the name of a variable.

    Raises:
        RequestError: there is no such variable, or nothing tells its name.
    """
    if name is not None:
        return name, value
    if isinstance(value, str):
        variables = user_variables()
        if value not in variables:
            short = value if len(value) <= 40 else f"{value[:39]}…"
            raise RequestError(
                f"there is no variable {short!r} in this notebook; to attach the text itself pass name= too",
                param="value",
            )
        return value, variables[value]
    if inspect.isfunction(value) or inspect.ismethod(value):
        return value.__name__, value
    if known := name_in_notebook(value):
        return known, value
    raise RequestError(f"this {type(value).__name__} has no name in the notebook; pass name= too", param="name")


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _fits(value: object, limit: int) -> bool:
    """Whether a nested value is written in about `limit` characters; looks at no more of it than that."""
    left: list[object] = [value]
    while left and limit >= 0:
        one = left.pop()
        limit -= len(one) if isinstance(one, str) else 2
        if isinstance(one, Mapping):
            if len(one) > limit:
                return False
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            if len(one) > limit:
                return False
            left += one
    return limit >= 0


def _array_text(value: Any) -> str:
    """Return a small array whole; of a larger one its range, mean, and what Python shows of it."""
    if prod(value.shape) <= MAX_ITEMS:
        return result_text(value)
    facts = []
    for name in ("min", "max", "mean"):
        with suppress(Exception):  # of a dtype without order
            facts.append(f"{name} {float(getattr(value, name)()):.6g}")
    return "\n".join(filter(None, [", ".join(facts), result_text(value)]))
