"""What a JSON value must look like: as a schema, in words, and as the reading of one into Python."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}

_WORDS = {"string": "text", "boolean": "true or false", "integer": "an integer", "number": "a number", "null": "null"}
_SHOWN = 80  # characters of a value in a message


class Misfit(ValueError):
    """A JSON value has another shape; the message says where and what is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a value must look like.

    Attributes:
        words: the same for a sentence: "an integer".
        read: takes a JSON value and the name of its place; returns it as Python has it or raises `Misfit`.
    """

    schema: dict[str, Any]
    words: str
    read: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Values with names: the parameters of a function, the fields of a class."""

    shapes: Mapping[str, Shape]
    required: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of an object with these."""
        properties = {name: shape.schema for name, shape in self.shapes.items()}
        return {"type": "object", "properties": properties, "required": list(self.required)}

    def read(self, given: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """Return the given values as Python has them; those left out are not among them.

        Args:
            path: put in front of names in messages.

        Raises:
            Misfit: names everything that is unknown, missing or of another shape.
        """
        problems = [f"{path}{name} is unknown; {self._instead(name)}" for name in given if name not in self.shapes]
        problems += [f"{path}{name} is missing" for name in self.required if name not in given]
        values = {}
        for name, shape in self.shapes.items():
            if name in given:
                try:
                    values[name] = shape.read(given[name], path + name)
                except Misfit as misfit:
                    problems.append(str(misfit))
        if problems:
            raise Misfit("; ".join(problems))
        return values

    def _instead(self, name: str) -> str:
        if near := difflib.get_close_matches(name, self.shapes, n=1):
            return f"did you mean {near[0]}?"
        return f"there are {', '.join(self.shapes)}" if self.shapes else "there are none"


ANYTHING = Shape(schema={}, words="any value", read=lambda value, where: value)


def scalar(kind: str) -> Shape:
    """Return the shape of one of `KINDS`; 3.0 is an integer too, an integer a number too."""

    def read(value: Any, where: str) -> Any:
        found = KINDS.get(type(value))
        if found == kind:
            return value
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind == "number" and found == "integer":
            try:
                return float(value)
            except OverflowError:
                raise Misfit(f"{where} is too large for a number") from None
        raise _misfit(where, _WORDS[kind], value)

    return Shape(schema={"type": kind}, words=_WORDS[kind], read=read)


def list_of(item: Shape) -> Shape:
    """Return the shape of a list of any length."""

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _misfit(where, "a list", value)
        return [item.read(element, f"{where}[{i}]") for i, element in enumerate(value)]

    return Shape(schema={"type": "array"} | _of("items", item), words="a list", read=read)


def tuple_of(item: Shape) -> Shape:
    """Return the shape of a tuple of any length, a list in JSON."""
    items = list_of(item)
    return dataclasses.replace(items, read=lambda value, where: tuple(items.read(value, where)))


def fixed_tuple(items: Sequence[Shape]) -> Shape:
    """Return the shape of a tuple with these items, a list in JSON."""
    n = len(items)
    words = f"a list of {n} value{'s' * (n != 1)}"

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list) or len(value) != n:
            raise _misfit(where, words, value)
        pairs = zip(items, value, strict=True)
        return tuple(item.read(element, f"{where}[{i}]") for i, (item, element) in enumerate(pairs))

    schemas = [item.schema for item in items]
    are_alike = all(schema == schemas[0] for schema in schemas)
    each: dict[str, Any] = {"items": schemas[0]} if are_alike else {"prefixItems": schemas}
    return Shape(schema={"type": "array", **each, "minItems": n, "maxItems": n}, words=words, read=read)


def dict_of(item: Shape) -> Shape:
    """Return the shape of an object with any names."""

    def read(value: Any, where: str) -> Any:
        _require_object(value, where)
        return {key: item.read(element, f"{where}.{key}") for key, element in value.items()}

    return Shape(schema={"type": "object"} | _of("additionalProperties", item), words="an object", read=read)


def object_of(members: Members, make: Callable[..., Any]) -> Shape:
    """Return the shape of an object with certain names, which become keywords of `make`."""

    def read(value: Any, where: str) -> Any:
        _require_object(value, where)
        values = members.read(value, f"{where}.")
        try:
            return make(**values)
        except Exception as error:  # a check of the class itself
            raise Misfit(f"{where} is refused: {type(error).__name__}: {error}") from error

    return Shape(schema=members.schema, words="an object", read=read)


def validated(schema: dict[str, Any], validate: Callable[[Any], Any]) -> Shape:
    """Return the shape of a class that brings its own schema and checks."""

    def read(value: Any, where: str) -> Any:
        try:
            return validate(value)
        except Exception as error:
            raise Misfit(f"{where} is refused: {error}") from error

    return Shape(schema=schema, words="an object", read=read)


def union(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of a value that has one of these, the first that fits."""
    schemas = [shape.schema for shape in shapes]
    words = " or ".join(dict.fromkeys(shape.words for shape in shapes))
    others = [shape for shape in shapes if shape.schema != {"type": "null"}]

    def read(value: Any, where: str) -> Any:
        for shape in shapes:
            with contextlib.suppress(Misfit):
                return shape.read(value, where)
        if len(others) == 1:  # the one alternative to null tells best what is wrong
            return others[0].read(value, where)
        raise _misfit(where, words, value)

    if {} in schemas:
        schema: dict[str, Any] = {}
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        schema = {"type": list(dict.fromkeys(schema["type"] for schema in schemas))}
    else:
        schema = {"anyOf": schemas}
    return Shape(schema=schema, words=words, read=read)


def or_null(shape: Shape) -> Shape:
    """Return `shape` that allows null too."""
    try:
        shape.read(None, "")
    except Misfit:
        return union([shape, scalar("null")])
    return shape


def choice(pairs: Sequence[tuple[Any, Any]]) -> Shape:
    """Return the shape of a few scalars, each with what it stands for."""
    words = "one of " + ", ".join(_shown(word) for word, _ in pairs)

    def read(value: Any, where: str) -> Any:
        for word, meaning in pairs:
            if type(word) is type(value) and word == value:  # 1 == True
                return meaning
        raise _misfit(where, words, value)

    kinds = {KINDS[type(word)] for word, _ in pairs}
    kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
    return Shape(schema={**kind, "enum": [word for word, _ in pairs]}, words=words, read=read)


def _of(key: str, item: Shape) -> dict[str, Any]:
    return {key: item.schema} if item.schema else {}


def _require_object(value: object, where: str) -> None:
    if not isinstance(value, dict):
        raise _misfit(where, "an object", value)


def _misfit(where: str, words: str, value: object) -> Misfit:
    return Misfit(f"{where} must be {words}, not {_shown(value)}")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
