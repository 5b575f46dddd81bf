"""A constraint → a grammar in llguidance's dialect of Lark (encoding.md sections 5, 7 and 8).

A terminal takes all it can. A raw value therefore takes in the "</" of its closer, and ends where a control id
follows, which no terminal can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from dsv4nb.encoding._grammar_request import Constraint
from dsv4nb.errors import RequestError

_T = TypeVar("_T")

Check = Callable[[str], str]
"""Returns what is wrong with a grammar, "" when nothing."""

# a token is left out because nothing can follow it, not because forced text has a more usual spelling
_OPTIONS = '%llguidance {"no_forcing": true}'
# between JSON tokens: nothing, a space, or a line break with an indent. JSON has any, and a model that may go on
# with blanks for ever does
_BLANKS = r"\x20|\x0A[\x20\x09]{0,48}"
_ANY = "(?s:.*)"
_NAME = re.compile(r'[^"<>｜\x00-\x1f]+')  # DSML has no escapes

_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_NOT_ON_TEXT = {"not", "if", "then", "else", "allOf"}
_BESIDE_PROPERTIES = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_OTHER_TYPES = ["null", "boolean", "integer", "number", "array", "object"]

Schema = Mapping[str, Any]
_Values = tuple[list[str], list[Schema]]
"""Bodies of terminals for strings, which are written raw, and schemas of the rest, which is written as JSON."""


def lark_of(constraint: Constraint, dsml: int, check: Check) -> str:
    """Return the grammar of the content.

    Args:
        dsml: id of the control token that DSML tags hold.

    Raises:
        RequestError: something in it cannot be enforced; `param` is response_format, regex or tools.
    """
    ways, rules = [], []
    opening = '"\\n\\n<"'
    if constraint.answer == "json":
        ways.append("answer")
        rules.append(f"answer: {_json_rule(json.loads(constraint.pattern))}")
        _require_sound(rules, "answer", check, "the JSON schema of response_format", "response_format")
    elif constraint.answer == "regex":
        ways.append("ANSWER")
        rules.append(f"ANSWER: {_regex(constraint.pattern, 'd', 'the regex', 'regex')}")
        _require_sound(rules, "ANSWER", check, "the regex", "regex")
    elif constraint.answer == "text":
        ways.append("TEXT")
        rules.append(f"TEXT: /{_ANY}/")
        opening = f"/{_ANY}\\n\\n</"
    if constraint.calls != "none":
        ways.append("OPENING block")
        rules.append(f"OPENING: {opening}")
        rules += _block(json.loads(constraint.functions), constraint.calls == "many", f"<[{dsml}]>", check)
    return "\n".join([_OPTIONS, f"start: {' | '.join(ways)}", *rules, ""])


def _block(functions: Sequence[Schema], is_many: bool, dsml: str, check: Check) -> list[str]:
    names = [f"invoke_{i}" for i in range(len(functions))]
    rules = [
        f'block: {dsml} "tool_calls>\\n" ({" | ".join(names)}){"+" if is_many else ""} "</" {dsml} "tool_calls>"',
        f"VALUE: /{_ANY}<\\//",
    ]
    for i, function in enumerate(functions):
        what = f"the tool {function['name']!r}"
        _require_name(function["name"], what)
        header = _text(f'invoke name="{function["name"]}">\n')
        rules.append(f'invoke_{i}: "<" {dsml} {header} arguments_{i} "</" {dsml} "invoke>\\n"')
        rules += _arguments(i, function.get("parameters"), what, dsml, check)
    return rules


def _arguments(i: int, parameters: object, what: str, dsml: str, check: Check) -> list[str]:
    """The rules of one function's arguments: declared ones, in that order."""
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        _refuse(f"the parameters of {what} must be a schema of type 'object'")
    for keyword in _BESIDE_PROPERTIES:
        if keyword in parameters:
            _refuse(f"the parameters of {what} have {keyword!r}, which calls cannot follow; name them in 'properties'")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        _refuse(f"the parameters of {what} must have an object as 'properties' and a list as 'required'")
    for name in required:
        if name not in list(properties):
            _refuse(f"{what} requires the parameter {name!r}, which its 'properties' do not declare")
    rules = [f"arguments_{i}: {_sequence([(f'p_{i}_{j}', name in required) for j, name in enumerate(properties)])}"]
    for j, (name, schema) in enumerate(properties.items()):
        where = f"the parameter {name!r} of {what}"
        _require_name(name, where)
        values = _split(schema, parameters, where, ())
        rules += _parameter(f"{i}_{j}", name, values, parameters, where, dsml, check)
    return rules


def _sequence(names: Sequence[tuple[str, bool]]) -> str:
    """Parameters in order, optional ones at will; a call without any may have the empty line that history has."""
    parts = [name if is_required else f"{name}?" for name, is_required in names]
    if any(is_required for _, is_required in names):
        return " ".join(parts)
    ways = [" ".join([name, *parts[k + 1 :]]) for k, (name, _) in enumerate(names)]
    return " | ".join([*ways, '"\\n"?'])


def _parameter(number: str, name: str, values: _Values, root: Schema, where: str, dsml: str, check: Check) -> list[str]:
    raw, other = values
    rules, ways = [], []
    if not raw and not other:
        _refuse(f"{where} cannot be given: no value has its type")
    for k, body in enumerate(raw):
        terminal = "VALUE"
        if body:
            terminal = f"VALUE_{number}_{k}"
            rules += [f"TEXT_{number}_{k}: {body}", f'{terminal}: TEXT_{number}_{k} "</"']
            _require_sound(rules[-2:], terminal, check, where, "tools")
        ways.append(f'"true\\">" {terminal}')
    if other:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        rule = _json_rule({**shared, **(other[0] if len(other) == 1 else {"anyOf": other})})
        _require_sound([f"json: {rule}"], "json", check, where, "tools")
        ways.append(f'"false\\">" {rule} "</"')
    header = _text(f'parameter name="{name}" string="')
    rules.append(f'p_{number}: "<" {dsml} {header} ({" | ".join(ways)}) {dsml} "parameter>\\n"')
    return rules


def _split(schema: object, root: Schema, where: str, seen: tuple[str, ...]) -> _Values:
    """Tell strings, which are written raw, from the other values of a parameter."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        _refuse(f"the schema of {where} must be an object")
    types = schema.get("type", [*_OTHER_TYPES, "string"])
    types = [types] if isinstance(types, str) else _expect(types, list, where, "type")
    if "string" not in types:
        return [], [schema]
    for keyword in ("$ref", "anyOf", "oneOf"):
        if keyword in schema:
            if beside := sorted(schema.keys() - _NOTES - {keyword}):
                _refuse(f"{where} has {beside[0]!r} beside {keyword!r}; a value that may be text has one of them")
            return _alternatives(keyword, schema[keyword], root, where, seen)
    if unsupported := sorted(schema.keys() & _NOT_ON_TEXT):
        _refuse(f"{where} has {unsupported[0]!r}, which cannot be enforced on text; leave it out")
    raw, other = [_string(schema, where)], {**schema, "type": [t for t in types if t != "string"]}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        texts = [_text(value) for value in _expect(choices, list, where, "enum") if isinstance(value, str)]
        one_of = f"({' | '.join(texts)})"
        raw = [f"{one_of} & {raw[0]}" if raw[0] else one_of] if texts else []
        other = {**other, "enum": [value for value in choices if not isinstance(value, str)]}
    return raw, [other] if other["type"] and other.get("enum", True) else []


def _alternatives(keyword: str, given: object, root: Schema, where: str, seen: tuple[str, ...]) -> _Values:
    if keyword == "$ref":
        place, _, name = str(given).rpartition("/")
        shared = root.get(place.removeprefix("#/")) if place in ("#/$defs", "#/definitions") else None
        target = shared.get(name) if isinstance(shared, Mapping) else None
        if target is None or given in seen:
            _refuse(f"{where} refers to {given!r}; a value that may be text refers to '#/$defs/…', and not in a circle")
        return _split(target, root, where, (*seen, str(given)))
    parts = [_split(option, root, where, seen) for option in _expect(given, list, where, keyword)]
    raw, other = [body for part in parts for body in part[0]], [schema for part in parts for schema in part[1]]
    if keyword == "oneOf" and len(raw) > 1:
        _refuse(f"{where} has 'oneOf' with several kinds of text; use 'anyOf'")
    return raw, [{"oneOf": other}] if keyword == "oneOf" and len(other) > 1 else other


def _string(schema: Schema, where: str) -> str:
    """The body of a terminal for a raw value, "" when it may be any text; `format` is but a note on it."""
    parts = []
    if "pattern" in schema:
        parts.append(_search(_expect(schema["pattern"], str, where, "pattern"), where))
    if "minLength" in schema or "maxLength" in schema:
        low = _expect(schema.get("minLength", 0), int, where, "minLength")
        high = _expect(schema["maxLength"], int, where, "maxLength") if "maxLength" in schema else ""
        parts.append(f"/(?s:.{{{low},{high}}})/")
    return " & ".join(parts)


def _expect(value: object, kind: type[_T], where: str, keyword: str) -> _T:
    if not isinstance(value, kind):
        _refuse(f"the {keyword!r} of {where} is {value!r}; it must be of type {kind.__name__}")
    return value


def _search(pattern: str, where: str) -> str:
    """A regex that matches anywhere → one that matches the whole text."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not _is_cut(pattern[:-1])
    _require_whole(pattern, where, "tools")
    body = pattern[begins : len(pattern) - ends]
    return _regex(f"{'' if begins else _ANY}(?:{body}){'' if ends else _ANY}", "dw", where, "tools")


def _regex(pattern: str, ascii_classes: str, where: str, param: str) -> str:
    from llguidance import regex_to_lark

    _require_whole(pattern, where, param)
    return f"/{regex_to_lark(pattern, ascii_classes)}/"


def _require_whole(pattern: str, where: str, param: str) -> None:
    if _is_cut(pattern):  # the library would drop it
        raise RequestError(f"{where} cannot be enforced: {pattern!r} ends in half an escape", param=param)


def _is_cut(pattern: str) -> bool:
    """Whether the last backslash escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _json_rule(schema: Schema) -> str:
    options = {"whitespace_pattern": _BLANKS}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _require_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        _refuse(f"{what} cannot be called: a name is text without quotes, <, >, ｜ and breaks")


def _require_sound(rules: Sequence[str], start: str, check: Check, where: str, param: str) -> None:
    if reason := check("\n".join([_OPTIONS, f"start: {start}", *rules, ""])):
        raise RequestError(f"{where} cannot be enforced: {reason}", param=param)


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, param="tools")
