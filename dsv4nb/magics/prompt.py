"""What a cell adds to its prompt: variables in front of it, values in place of {expressions}."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.error import UsageError

from dsv4nb.magics.arguments import near
from dsv4nb.session.attachments import Attachment, about_of

_OF_IPYTHON = ("In", "Out", "exit", "quit", "open", "get_ipython")
_CONVERSIONS: Mapping[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}


def own_names(names: Mapping[str, Any]) -> list[str]:
    """Return the variables of a notebook that are a person's own."""
    return [name for name in names if not name.startswith("_") and name not in _OF_IPYTHON]


def variable_named(name: str, names: Mapping[str, Any], where: str) -> Any:
    """Return the value of a variable of the notebook.

    Raises:
        UsageError: there is none; `where` names the option that asked.
    """
    if name not in names:
        raise UsageError(f"%%dsv4: {where} names {name!r}, and there is no such variable{near(name, own_names(names))}")
    return names[name]


def attached(name: str, names: Mapping[str, Any]) -> Attachment:
    """Return a variable as the model reads it: text as it is, a table as CSV, anything else as Python shows it.

    Raises:
        UsageError: there is no such variable.
    """
    value = variable_named(name, names, "--with")
    if isinstance(value, str):
        return Attachment(name=name, about=about_of(value), text=value)
    if hasattr(type(value), "to_csv"):  # pandas; a frame or a column of one
        has_names = type(value.index).__name__ != "RangeIndex"
        return Attachment(name=name, about=about_of(value), text=value.to_csv(index=has_names), language="csv")
    return Attachment(name=name, about=type(value).__name__, text=repr(value), language="python")


def filled(text: str, names: Mapping[str, Any]) -> str:
    """Return `text` with the values of its {expressions}; {{ and }} are braces.

    An expression may have a conversion and a format, {x!r} and {x:.2f}, as in an f-string.

    Raises:
        UsageError: names the expression that failed.
    """
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(f"%%dsv4 --fill: {error}; braces that are text are written twice: {{{{ }}}}.") from None
    told = []
    for literal, expression, form, conversion in parts:
        told.append(literal)
        if expression is not None:
            told.append(_value(expression, form or "", conversion, names))
    return "".join(told)


def _value(expression: str, form: str, conversion: str | None, names: Mapping[str, Any]) -> str:
    shown = f"{{{expression}}}"
    if not expression.strip():
        raise UsageError("%%dsv4 --fill: {} holds no expression; braces that are text are written twice: {{ }}.")
    try:
        value = eval(expression.strip(), dict(names))
        if conversion is not None:
            value = _CONVERSIONS[conversion](value)
        return format(value, filled(form, names))
    except UsageError:
        raise
    except Exception as error:  # an expression can raise anything
        said = str(error).splitlines()[0] if str(error) else "it says no more"
        raise UsageError(f"%%dsv4 --fill: {shown} failed: {type(error).__name__}: {said}.") from None
