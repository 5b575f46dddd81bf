"""Annotations of parameters and fields → the shapes of their values.

What an annotation can be is decided in one place, `shape_of`. A schema is written in full, without references.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from dsv4nb.errors import RequestError
from dsv4nb.session.docstrings import read_docstring
from dsv4nb.session.shapes import (
    ANYTHING,
    KINDS,
    Members,
    Shape,
    choice,
    dict_of,
    fixed_tuple,
    list_of,
    object_of,
    or_null,
    scalar,
    tuple_of,
    union,
    validated,
)

EMPTY: Any = inspect.Parameter.empty  # the annotation or the default of what has none

_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_ALIASES = ("__supertype__", "__value__")  # NewType, and the statement `type X = …`


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter or a field; `EMPTY` stands for what it lacks."""

    name: str
    annotation: Any
    default: Any = EMPTY


def members_of(members: Iterable[Member], doc: str | None, owner: str, inside: tuple[type, ...] = ()) -> Members:
    """Return the shapes of parameters or fields.

    Args:
        doc: the docstring that may describe them.
        owner: what they belong to, for messages.
        inside: classes that are being described.

    Raises:
        RequestError: names the first annotation that JSON cannot carry.
    """
    members = list(members)
    texts = read_docstring(doc, [member.name for member in members]).parameters
    shapes = {}
    for member in members:
        shape = shape_of(member.annotation, f"{member.name!r} of {owner}", inside)
        schema = dict(shape.schema)
        text = schema.pop("description", texts.get(member.name))
        shape = dataclasses.replace(shape, schema=schema)
        if member.default is None:  # `x: int = None` is often written for `x: int | None = None`
            shape = or_null(shape)
        schema = shape.schema | ({} if text is None else {"description": text}) | _default(shape, member.default)
        shapes[member.name] = dataclasses.replace(shape, schema=schema)
    required = tuple(member.name for member in members if member.default is EMPTY)
    return Members(shapes=shapes, required=required)


def shape_of(annotation: Any, place: str, inside: tuple[type, ...] = ()) -> Shape:
    """Return what JSON values an annotation allows; any where there is none.

    Args:
        place: where it stands, for messages.
        inside: classes that are being described.

    Raises:
        RequestError: JSON cannot carry it.
    """
    if annotation is EMPTY or annotation is Any or annotation is object:
        return ANYTHING
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _annotated(shape_of(arguments[0], place, inside), arguments[1:])
    if origin is Union or origin is types.UnionType:
        return union([shape_of(argument, place, inside) for argument in arguments])
    if origin is Literal:
        return choice([(_literal(argument, place), argument) for argument in arguments])
    base = type(None) if annotation is None else origin or annotation
    if isinstance(base, type):
        if base in KINDS:
            return scalar(KINDS[base])
        if base in _LISTS:
            return list_of(shape_of(arguments[0], place, inside) if arguments else ANYTHING)
        if base is tuple and (not arguments or arguments[-1] is ...):
            return tuple_of(shape_of(arguments[0], place, inside) if arguments else ANYTHING)
        if base is tuple:
            return fixed_tuple([shape_of(argument, place, inside) for argument in arguments])
        if base in _DICTS and (not arguments or arguments[0] is str):
            return dict_of(shape_of(arguments[1], place, inside) if arguments else ANYTHING)
        if origin is None and (shape := _class(base, place, inside)) is not None:
            return shape
    for alias in _ALIASES:
        if not isinstance(annotation, type) and hasattr(annotation, alias):
            return shape_of(getattr(annotation, alias), place, inside)
    raise RequestError(
        f"{place} is annotated {inspect.formatannotation(annotation)}, which JSON cannot carry; annotate it as str, "
        "int, float, bool, None, list, tuple, dict[str, …], Literal, an Enum, a dataclass or a TypedDict, "
        "or leave the annotation out",
        param="tools",
    )


def _class(cls: type, place: str, inside: tuple[type, ...]) -> Shape | None:
    if cls in inside:
        raise RequestError(
            f"{place} holds another {cls.__name__}, so its schema would not end; leave its annotation out",
            param="tools",
        )
    if issubclass(cls, enum.Enum) and len(cls):
        return choice([(_word(member), member) for member in cls])
    if hasattr(cls, "model_json_schema") and hasattr(cls, "model_validate"):  # pydantic
        schema = dict(cls.model_json_schema())
        return validated(_inlined(schema, schema.pop("$defs", {}), place), cls.model_validate)
    is_typed_dict = issubclass(cls, dict) and hasattr(cls, "__required_keys__")
    if not is_typed_dict and not dataclasses.is_dataclass(cls):
        return None
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:  # an annotation that is text can be any expression
        raise RequestError(
            f"the annotations of {cls.__name__}, which {place} has, mean nothing: {error}; "
            "what they name must be defined at the top level",
            param="tools",
        ) from error
    members = _keys(cls, hints) if is_typed_dict else _fields(cls, hints)
    return object_of(
        members_of(members, cls.__doc__, cls.__name__, (*inside, cls)),
        dict if is_typed_dict else cls,
    )


def _fields(cls: type, hints: Mapping[str, Any]) -> list[Member]:
    parameters = inspect.signature(cls).parameters.values()
    return [Member(name=p.name, annotation=hints.get(p.name, p.annotation), default=p.default) for p in parameters]


def _keys(cls: Any, hints: Mapping[str, Any]) -> list[Member]:
    members = []
    for name, hint in hints.items():
        is_required = name in cls.__required_keys__
        # with postponed annotations the class itself does not see these
        while (origin := typing.get_origin(hint)) in (typing.Required, typing.NotRequired):
            is_required, (hint,) = origin is typing.Required, typing.get_args(hint)
        # a default that no JSON is: may be left out, and shows none
        members.append(Member(name=name, annotation=hint, default=EMPTY if is_required else ...))
    return members


def _default(shape: Shape, default: Any) -> dict[str, Any]:
    """Return the `default` of a schema; one that JSON cannot carry, or that is no answer itself, is left out."""
    if default is EMPTY:
        return {}
    try:
        value = _word(default) if isinstance(default, enum.Enum) else default
        plain = json.loads(json.dumps(value, allow_nan=False, default=_plain))
        shape.read(plain, "")
    except (TypeError, ValueError, RecursionError):
        return {}
    return {"default": plain}


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return _word(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(value)


def _annotated(shape: Shape, notes: tuple[Any, ...]) -> Shape:
    texts = [note for note in notes if isinstance(note, str)]
    return dataclasses.replace(shape, schema={**shape.schema, "description": texts[0]}) if texts else shape


def _literal(value: Any, place: str) -> Any:
    if isinstance(value, enum.Enum):
        return _word(value)
    if type(value) not in KINDS:
        raise RequestError(f"{place} has the literal {value!r}, which JSON cannot carry", param="tools")
    return value


def _word(member: enum.Enum) -> str:
    """Return how a member is called: by its value where all are text, else by its name."""
    if all(isinstance(other.value, str) for other in type(member)):
        return str(member.value)
    return member.name


def _inlined(schema: Any, definitions: Mapping[str, Any], place: str, inside: tuple[str, ...] = ()) -> Any:
    """Write what a schema refers to in its place: it will stand inside another one, where references break."""
    if isinstance(schema, list):
        return [_inlined(item, definitions, place, inside) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return {key: _inlined(item, definitions, place, inside) for key, item in schema.items()}
    name = reference.rpartition("/")[2]
    if name in inside or name not in definitions:
        raise RequestError(f"{place} refers to {reference}, which cannot be written in its place", param="tools")
    rest = {key: item for key, item in schema.items() if key != "$ref"}
    return _inlined(definitions[name] | rest, definitions, place, (*inside, name))
