from __future__ import annotations

import dataclasses
import enum
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, Required, TypedDict, Union

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.session.annotations import EMPTY, Member, members_of, shape_of
from dsv4nb.session.shapes import Misfit


def named(value: object) -> str:
    """Return a name without addresses, the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Level(enum.IntEnum):
    LOW = enum.auto()
    HIGH = enum.auto()


@dataclasses.dataclass(frozen=True)
class Place:
    """A place.

    Attributes:
        lat: degrees north
    """

    lat: float
    lon: Annotated[float, "degrees east"]
    names: tuple[str, ...] = ()
    tags: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if abs(self.lat) > 90:
            raise ValueError("lat is beyond the pole")


class Query(TypedDict, total=False):
    text: Required[str]
    n: int


class Wide(Query):
    deep: NotRequired[bool]
    exact: bool


class Tree(TypedDict):
    inner: list[Tree]


@dataclasses.dataclass
class Lost:
    of: Nowhere  # type: ignore[name-defined]  # noqa: F821


UserId = NewType("UserId", int)
PLACE = {
    "type": "object",
    "properties": {
        "lat": {"type": "number", "description": "degrees north"},
        "lon": {"type": "number", "description": "degrees east"},
        "names": {"type": "array", "items": {"type": "string"}, "default": []},
        "tags": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["lat", "lon"],
}
TEXT = {"type": "string"}
INTEGER = {"type": "integer"}


class Alias:
    """What is used of the statement `type X = …`."""

    __value__ = list[int]


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, TEXT),
        (int, INTEGER),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (object, {}),
        (EMPTY, {}),
        (list, {"type": "array"}),
        (list[Any], {"type": "array"}),
        (list[str], {"type": "array", "items": TEXT}),
        (Sequence[int], {"type": "array", "items": INTEGER}),
        (typing.List[int], {"type": "array", "items": INTEGER}),  # noqa: UP006
        (tuple, {"type": "array"}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (tuple[int, int], {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}),
        (tuple[int, str], {"type": "array", "prefixItems": [INTEGER, TEXT], "minItems": 2, "maxItems": 2}),
        (dict, {"type": "object"}),
        (dict[str, Any], {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (Mapping[str, list[int]], {"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal[1, "b", None], {"enum": [1, "b", None]}),
        (Literal[Unit.F], {"type": "string", "enum": ["fahrenheit"]}),
        (Unit, {"type": "string", "enum": ["celsius", "fahrenheit"]}),
        (Level, {"type": "string", "enum": ["LOW", "HIGH"]}),
        (Optional[int], {"type": ["integer", "null"]}),  # noqa: UP045
        (Union[int, str, None], {"type": ["integer", "string", "null"]}),  # noqa: UP007
        (list[int] | None, {"anyOf": [{"type": "array", "items": INTEGER}, {"type": "null"}]}),
        (int | Any, {}),
        (Annotated[int, 7, "how many", "not this"], {"type": "integer", "description": "how many"}),
        (Annotated[int, 7], INTEGER),
        (UserId, INTEGER),
        (Alias(), {"type": "array", "items": INTEGER}),
        (Place, PLACE),
        (Query, {"type": "object", "properties": {"text": TEXT, "n": INTEGER}, "required": ["text"]}),
    ],
    ids=named,
)
def test_the_schema_of_an_annotation(annotation: Any, schema: dict[str, Any]) -> None:
    assert shape_of(annotation, "'x' of f()").schema == schema


def test_keys_of_a_typed_dict_are_required_as_they_say() -> None:
    schema = shape_of(Wide, "'x' of f()").schema
    assert list(schema["properties"]) == ["text", "n", "deep", "exact"]
    assert schema["required"] == ["text", "exact"]


@pytest.mark.parametrize(
    ("annotation", "given", "read"),
    [
        (str, "5", "5"),
        (int, 5, 5),
        (int, 3.0, 3),
        (int, 1e22, 10**22),
        (float, 3, 3.0),
        (float, 0.5, 0.5),
        (bool, True, True),
        (None, None, None),
        (Any, {"a": [1]}, {"a": [1]}),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2.0], (1, 2)),
        (tuple, [1, "a"], (1, "a")),
        (dict[str, float], {"b": 1, "a": 2}, {"b": 1.0, "a": 2.0}),
        (Literal["a", 1], 1, 1),
        (Literal[Unit.F], "fahrenheit", Unit.F),
        (Unit, "celsius", Unit.C),
        (Level, "HIGH", Level.HIGH),
        (int | None, None, None),
        (int | str, "5", "5"),
        (bool | int, 1, 1),
        (Place, {"lat": 1, "lon": 2, "names": ["a"]}, Place(1.0, 2.0, ("a",))),
        (list[Place], [{"lat": 1, "lon": 2}], [Place(1.0, 2.0)]),
        (Query, {"n": 2.0, "text": "a"}, {"text": "a", "n": 2}),
        (UserId, 4, 4),
    ],
    ids=named,
)
def test_a_value_becomes_what_the_annotation_promises(annotation: Any, given: Any, read: Any) -> None:
    found = shape_of(annotation, "'x' of f()").read(given, "x")
    assert found == read and type(found) is type(read)
    if isinstance(read, list | tuple):
        assert [type(item) for item in found] == [type(item) for item in read]


@pytest.mark.parametrize(
    ("annotation", "given", "said"),
    [
        (str, 5, "x must be text, not 5"),
        (int, "5", 'x must be an integer, not "5"'),
        (int, 2.5, "x must be an integer, not 2.5"),
        (int, True, "x must be an integer, not true"),
        (int, float("inf"), "x must be an integer, not Infinity"),
        (float, True, "x must be a number, not true"),
        (float, 10**400, "x is too large for a number"),
        (bool, 1, "x must be true or false, not 1"),
        (str, None, "x must be text, not null"),
        (str, ["y" * 100], f'x must be text, not ["{"y" * 77}…'),
        (list[int], {"a": 1}, 'x must be a list, not {"a": 1}'),
        (list[list[int]], [[1], [2, "a"]], 'x[1][1] must be an integer, not "a"'),
        (tuple[int, str], [1], "x must be a list of 2 values, not [1]"),
        (tuple[int], 1, "x must be a list of 1 value, not 1"),
        (tuple[int, str], [1, 2], "x[1] must be text, not 2"),
        (dict[str, int], [1], "x must be an object, not [1]"),
        (dict[str, int], {"a": "b"}, 'x.a must be an integer, not "b"'),
        (Literal["a", 1], True, 'x must be one of "a", 1, not true'),
        (Unit, "C", 'x must be one of "celsius", "fahrenheit", not "C"'),
        (int | str, 2.5, "x must be an integer or text, not 2.5"),
        (int | None, "a", 'x must be an integer, not "a"'),
        (Place | None, {"lat": "a"}, 'x.lon is missing; x.lat must be a number, not "a"'),
        (Place, {"lat": 91, "lon": 1}, "x is refused: ValueError: lat is beyond the pole"),
        (Place, {"lat": 1, "lon": 1, "tag": 1}, "x.tag is unknown; did you mean tags?"),
        (Query, {"text": "a", "zzz": 1}, "x.zzz is unknown; there are text, n"),
        (Query, "a", 'x must be an object, not "a"'),
    ],
    ids=named,
)
def test_another_value_is_told_where_and_what_is_asked_for(annotation: Any, given: Any, said: str) -> None:
    with pytest.raises(Misfit) as misfit:
        shape_of(annotation, "'x' of f()").read(given, "x")
    assert str(misfit.value) == said


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (bytes, r"^'x' of f\(\) is annotated bytes, which JSON cannot carry; annotate it as str"),
        (set[int], r"set\[int\]"),
        (dict[int, str], r"dict\[int, str\]"),
        (Callable[[], int], "Callable"),
        (list[bytes], "bytes"),
        (5, "annotated 5"),
        (enum.Enum, "Enum"),
        (Literal[b"a"], "has the literal b'a'"),
        (Tree, "'inner' of Tree holds another Tree, so its schema would not end"),
        (Lost, r"the annotations of Lost, which 'x' of f\(\) has, mean nothing: name 'Nowhere' is not defined"),
    ],
    ids=named,
)
def test_what_json_cannot_carry_is_refused_by_name(annotation: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        shape_of(annotation, "'x' of f()")
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("annotation", "default", "shown"),
    [
        (int, 3, {"type": "integer", "default": 3}),
        (int, None, {"type": ["integer", "null"], "default": None}),
        (Annotated[int, "n"], None, {"type": ["integer", "null"], "description": "n", "default": None}),
        (list[int] | None, None, {"anyOf": [{"type": "array", "items": INTEGER}, {"type": "null"}], "default": None}),
        (EMPTY, (1, 2), {"default": [1, 2]}),
        (EMPTY, None, {"default": None}),
        (Unit, Unit.F, {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "fahrenheit"}),
        (Level, Level.LOW, {"type": "string", "enum": ["LOW", "HIGH"], "default": "LOW"}),
        (list[Unit], [Unit.F], {"type": "array", "items": shape_of(Unit, "").schema, "default": ["fahrenheit"]}),
        (Place, Place(1, 2), {**PLACE, "default": {"lat": 1, "lon": 2, "names": [], "tags": {}}}),
        (float, float("nan"), {"type": "number"}),
        (EMPTY, object(), {}),
        (int, "auto", {"type": "integer"}),
    ],
    ids=named,
)
def test_a_default_is_shown_where_json_can_carry_it(annotation: Any, default: Any, shown: dict[str, Any]) -> None:
    members = members_of([Member(name="x", annotation=annotation, default=default)], None, "f()")
    assert members.schema == {"type": "object", "properties": {"x": shown}, "required": []}


def test_null_is_taken_where_it_is_the_default() -> None:
    members = members_of([Member(name="x", annotation=int, default=None)], None, "f()")
    assert members.read({"x": None}) == {"x": None} and members.read({"x": 1}) == {"x": 1} and members.read({}) == {}


def test_a_default_is_a_copy() -> None:
    default = [1]
    schema = members_of([Member(name="x", annotation=list[int], default=default)], None, "f()").schema
    default.append(2)
    assert schema["properties"]["x"]["default"] == [1]


def test_a_note_goes_before_the_docstring() -> None:
    members = [Member(name="a", annotation=Annotated[int, "noted"]), Member(name="b", annotation=int)]
    schema = members_of(members, "Do.\n\nArgs:\n    a: written\n    b: written", "f()").schema
    assert [p["description"] for p in schema["properties"].values()] == ["noted", "written"]


class Inner:
    """What is used of a pydantic model."""

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        node = {"properties": {"n": INTEGER}, "type": "object"}
        return {
            "$defs": {"Node": node},
            "properties": {"one": {"$ref": "#/$defs/Node", "description": "d"}, "more": [{"$ref": "#/$defs/Node"}]},
            "type": "object",
        }

    @classmethod
    def model_validate(cls, value: Any) -> Inner:
        if not isinstance(value, dict):
            raise ValueError("no object")
        return cls(**value)


class Endless(Inner):
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}}}, "$ref": "#/$defs/N"}


def test_a_class_may_bring_its_own_schema_and_checks() -> None:
    shape = shape_of(Inner, "'x' of f()")
    node = {"properties": {"n": INTEGER}, "type": "object"}
    assert shape.schema == {"properties": {"one": {**node, "description": "d"}, "more": [node]}, "type": "object"}
    assert shape.read({"n": 4}, "x").n == 4
    with pytest.raises(Misfit, match=r"^x is refused: no object$"):
        shape.read(1, "x")
    with pytest.raises(RequestError, match=r"'x' of f\(\) refers to #/\$defs/N, which cannot be written in its place"):
        shape_of(Endless, "'x' of f()")
