"""What stands inside a block → calls, as it arrives (encoding.md sections 9.1 and 9.3)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dsv4nb.encoding.constants import CALLS_CLOSE, EOS
from dsv4nb.encoding.markers import (
    BLANKS,
    FLAG_FALSE,
    FLAG_TRUE,
    INVOKE,
    INVOKE_CLOSE,
    PARAMETER,
    PARAMETER_CLOSE,
    BlockState,
)

# how a reply departs from the format
Anomaly = Literal[
    "bad_invoke_header",
    "bad_parameter_header",
    "dropped_call",
    "duplicate_parameter",
    "duplicate_think_open",
    "implicit_think_end",
    "invalid_json_arg",
    "invalid_json_body",
    "json_body",
    "literal_opener",
    "malformed_closer",
    "malformed_opener",
    "missing_block_close",
    "missing_block_open",
    "missing_invoke_close",
    "missing_string_flag",
    "orphan_closer",
    "stray_think_close",
    "text_after_tool_calls",
    "text_between_tags",
    "think_in_chat_mode",
    "truncated_parameter",
    "truncated_tool_block",
    "unterminated_think",
]

# a line as the format has it, with nothing behind it: the name goes up to the last `">`, whatever it holds
_INVOKE_LINE = re.compile(r'\s*name="(.*)">[ \t\r]*()')
_INVOKE_HEADER = re.compile(r'\s*name="([^"]*)"\s*>(.*)')
_PARAMETER_NAME = re.compile(r'(?:^|\s)name="(.*)', re.DOTALL)
# a quoted text may hold a ">"
_PARAMETER_HEADER = re.compile(r'((?:[^">]|"[^"]*")*+)>(.*)', re.DOTALL)
_ATTRIBUTE = re.compile(r'(?:^|\s)(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        arguments_json: an object in the model's own order and spelling, JSON as Python reads it (NaN included).
            From `parse_strict` it may be no JSON at all, as values are not checked there.
    """

    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """A call begins.

    Attributes:
        index: how many calls of the reply came before it.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArgs:
    """The arguments of the call go on; joined, a call's fragments are its `arguments_json`."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """The call is complete and may be run; one that gets no end must not be."""

    index: int
    name: str
    arguments_json: str


CallEvent = CallStart | CallArgs | CallEnd


class CallReader:
    """Reads the inside of a block from the texts and markers that its owner finds.

    Attributes:
        state: which markers count next, see `markers.INSIDE`.
        calls: the finished calls.
        is_closed: the block is over.
    """

    def __init__(self, note: Callable[[Anomaly], None]) -> None:
        self.state: BlockState = "block"
        self.calls: list[ToolCall] = []
        self.is_closed = False
        self._note = note
        self._events: list[CallEvent] = []
        self._skips = False  # behind an unreadable header what belongs to it is no second fault
        self._text: list[str] = []  # of a header, value or body that is read when it is complete
        # of the call
        self._name = ""
        self._fragments: list[str] = []
        self._keys: set[str] = set()
        self._is_empty = True  # nothing but blanks so far
        # of the parameter; a key of None drops the value
        self._key: str | None = None
        self._flag: str | None = None

    def take_events(self) -> list[CallEvent]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Take text that holds no marker of this state; it may change the state."""
        if self.state in ("block", "call"):
            self._between(text)
        elif self.state != "value" or (self._key is not None and self._flag != "true"):
            self._text.append(text)
        elif self._key is not None:
            self._fragment(_quoted(text)[1:-1])

    def marker(self, marker: str) -> bool:
        """Take a marker of this state; False when it belongs to the state that follows."""
        if self.state == "block":
            self._in_block(marker)
            return True
        if self.state == "invoke":
            return self._in_invoke(marker)
        if self.state == "call":
            return self._in_call(marker)
        if self.state == "json":
            self._end_json()
            return False
        if marker == EOS:
            self._note("truncated_parameter")
            self._note("dropped_call")
            self.is_closed = True
            return True
        if self.state == "parameter":
            return self._in_parameter(marker)
        self._end_value()
        return True

    def end(self) -> None:
        """The text ends within the block: a call that is not finished is dropped."""
        if self.state != "block":
            self._note("dropped_call")
        self._note("truncated_tool_block")
        self.is_closed = True

    def _between(self, text: str) -> None:
        """Take text that stands between tags, where only blanks and a JSON body belong."""
        text = text.lstrip(BLANKS)
        if not text or self._skips:
            return
        if self.state == "call" and self._is_empty and text[0] == "{":
            self.state, self._text = "json", [text]
        else:
            self._note("text_between_tags")
        self._is_empty = False

    def _in_block(self, marker: str) -> None:
        self._skips = False
        if marker == INVOKE:
            self.state, self._text = "invoke", []
            return
        if marker == EOS:
            self._note("missing_block_close")
        elif marker != CALLS_CLOSE:
            self._note("malformed_closer")
        self.is_closed = True

    def _in_invoke(self, marker: str) -> bool:
        header = "".join(self._text)
        if marker == "\n" and not header.strip():
            self._text = []
            return True
        found = _INVOKE_LINE.fullmatch(header) or _INVOKE_HEADER.fullmatch(header)
        if found is None:
            self._note("bad_invoke_header")
            self.state, self._skips = "block", True
            return False
        self.state, self._name = "call", found[1]
        self._fragments, self._keys, self._is_empty = [], set(), True
        self._events.append(CallStart(index=len(self.calls), name=self._name))
        self._between(found[2])
        return False

    def _in_call(self, marker: str) -> bool:
        if marker == PARAMETER:
            self.state, self._text, self._is_empty = "parameter", [], False
            return True
        if marker != INVOKE_CLOSE:
            self._note("missing_invoke_close")
        self._end_call()
        return marker == INVOKE_CLOSE

    def _in_parameter(self, marker: str) -> bool:
        header = "".join(self._text)
        if marker in (FLAG_TRUE, FLAG_FALSE):
            name = _PARAMETER_NAME.search(header)
            self._begin_value(name and name[1], "true" if marker == FLAG_TRUE else "false")
            return True
        found = _PARAMETER_HEADER.fullmatch(header)
        if found is None:
            self._note("bad_parameter_header")
            self.state = "call"
            return marker == PARAMETER_CLOSE
        attributes = dict(_ATTRIBUTE.findall(found[1]))
        self._begin_value(attributes.get("name"), attributes.get("string"))
        self.text(found[2])
        if marker != PARAMETER_CLOSE:
            return False  # a tag that the value quotes
        self._end_value()
        return True

    def _begin_value(self, key: str | None, flag: str | None) -> None:
        self.state, self._text = "value", []
        self._key, self._flag = key, flag
        if key is None:
            self._note("bad_parameter_header")
            return
        if flag not in ("true", "false"):
            self._note("missing_string_flag")
        if key in self._keys:  # the first one wins
            self._note("duplicate_parameter")
            self._key = None
            return
        self._keys.add(key)
        if flag == "true":
            self._fragment(f'{self._label(key)}"')

    def _end_value(self) -> None:
        self.state = "call"
        if self._key is None:
            return
        if self._flag == "true":
            self._fragment('"')
            return
        text = "".join(self._text)
        value = text.strip(BLANKS)
        if not _is_json(value):
            value = _quoted(text)
            if self._flag == "false":
                self._note("invalid_json_arg")
        self._fragment(f"{self._label(self._key)}{value}")

    def _end_json(self) -> None:
        self.state = "call"
        body = "".join(self._text).rstrip(BLANKS)
        try:
            arguments = _rewritten(body)
        except (ValueError, RecursionError):
            self._note("invalid_json_body")
            self._keys.add("arguments")
            self._fragment(f"{self._label('arguments')}{_quoted(body)}")
        else:
            self._note("json_body")
            self._fragment(arguments)

    def _end_call(self) -> None:
        if self._keys:
            self._fragment("}")
        elif not self._fragments:
            self._fragment("{}")
        call = ToolCall(self._name, "".join(self._fragments))
        self._events.append(CallEnd(index=len(self.calls), name=call.name, arguments_json=call.arguments_json))
        self.calls.append(call)
        self.state = "block"

    def _label(self, key: str) -> str:
        return f"{', ' if self._fragments else '{'}{_quoted(key)}: "

    def _fragment(self, text: str) -> None:
        if text:
            self._fragments.append(text)
            self._events.append(CallArgs(index=len(self.calls), fragment=text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str)  # Python refuses to convert very long integers
    except (ValueError, RecursionError):
        return False
    return True


def _rewritten(body: str) -> str:
    """Return a JSON object as the protocol spells it."""
    parsed = json.loads(body)
    text = json.dumps(parsed, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair exists in JSON only as an escape
        return json.dumps(parsed)
    return text
