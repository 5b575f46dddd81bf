"""A finished reply → reasoning, content and calls (encoding.md sections 8 and 9).

`parse_strict` does as the official parser, which knows no recovery; `parse_tolerant` as a reply that streams.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from dsv4nb.encoding.calls import Anomaly, ToolCall
from dsv4nb.encoding.constants import BOS, CALLS_CLOSE, DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.stream_parse import Ending, Piece, Splitter
from dsv4nb.errors import ParseError

__all__ = ["ParsedMessage", "ParsedReply", "ToolCall", "parse_strict", "parse_tolerant"]

_BLOCK = f"\n\n<{DSML}tool_calls"  # its ">" is read by the loop over the block
_INVOKE, _INVOKE_CLOSE = f"<{DSML}invoke", f"</{DSML}invoke"
_PARAMETER, _PARAMETER_CLOSE = f"<{DSML}parameter", f"/{DSML}parameter"
_INVOKE_HEADER = re.compile(r'\s*name="(.*?)">\n\n?')
_PARAMETER_BODY = re.compile(r' name="(.*?)" string="(true|false)">(.*)<', re.DOTALL)
_NEVER_INSIDE = (BOS, EOS, THINK_OPEN, THINK_CLOSE, DSML)


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A reply taken apart; what it lacks is empty."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """What could be made of a reply.

    Attributes:
        tool_calls: the finished calls; `arguments_json` is JSON throughout.
        anomalies: how the text departs from the format, each name once, in the order met.
        ending: its end token, the closer of a block, else its length.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    anomalies: tuple[Anomaly, ...]
    ending: Ending

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls", "length"]:
        """Why it ended, as the chat completions API says it."""
        if self.ending == "length":
            return "length"
        return "tool_calls" if self.tool_calls else "stop"


def parse_tolerant(text: str, *, thinking: bool, tools_enabled: bool) -> ParsedReply:
    """Take any reply apart, as it is when it streams; where `parse_strict` succeeds the two agree.

    They differ in that a value of string="false" is checked here, and that without tools a block is content.

    Args:
        text: all that was generated; without an end token or the closer of a block it counts as cut off.
        thinking: whether the prompt ended in `<think>`.
        tools_enabled: whether tools were offered.
    """
    splitter = Splitter(thinking=thinking, tools_enabled=tools_enabled)
    events = splitter.feed_events(text) + splitter.flush_events()
    reasoning, content = (
        "".join(event.text for event in events if isinstance(event, Piece) and event.channel == channel)
        for channel in ("reasoning", "content")
    )
    assert splitter.ending is not None
    return ParsedReply(reasoning, content, splitter.calls, splitter.anomalies, splitter.ending)


def parse_strict(text: str, *, thinking: bool) -> ParsedMessage:
    """Take a reply apart.

    Args:
        text: all that was generated, end token included; it may end with the closer of a block instead.
        thinking: whether the prompt ended in `<think>`.

    Raises:
        ParseError: the text departs from the format anywhere.
    """
    at = 0
    reasoning = ""
    if thinking:
        reasoning, found, at = _until(text, at, (THINK_CLOSE, _BLOCK))
        if found != THINK_CLOSE:
            raise ParseError(f"the reasoning is not closed by {THINK_CLOSE} ({_where(text, at)})")
    content, found, at = _until(text, at, (EOS, _BLOCK))
    if not found:
        raise ParseError(f"the reply ends without {EOS} and without a block of calls")
    calls: tuple[ToolCall, ...] = ()
    if found == _BLOCK:
        calls, at = _block(text, at)
        at += len(EOS) if text.startswith(EOS, at) else 0
    if at != len(text):
        raise ParseError(f"text follows the end of the reply ({_where(text, at)})")
    for name, part in (("reasoning", reasoning), ("content", content)):
        for token in _NEVER_INSIDE:
            if token in part:
                raise ParseError(f"the {name} holds the control token {token}")
    return ParsedMessage(reasoning, content, calls)


def _until(text: str, at: int, stops: tuple[str, ...]) -> tuple[str, str, int]:
    """Read up to the first of `stops`; return what stands before it, the stop ("" if none) and where it ends."""
    found = [(place, stop) for stop in stops if (place := text.find(stop, at)) >= 0]
    if not found:
        return text[at:], "", len(text)
    place, stop = min(found)
    return text[at:place], stop, place + len(stop)


def _block(text: str, at: int) -> tuple[tuple[ToolCall, ...], int]:
    calls: list[ToolCall] = []
    while True:
        at = _tag_end(text, at)
        if text.startswith(CALLS_CLOSE, at):
            return tuple(calls), at + len(CALLS_CLOSE)
        if not text.startswith(_INVOKE, at):
            raise ParseError(f"a block holds invocations only ({_where(text, at)})")
        call, at = _invoke(text, at + len(_INVOKE))
        calls.append(call)


def _tag_end(text: str, at: int) -> int:
    """Pass the ">" and the newline that end a tag."""
    if not text.startswith(">\n", at):
        raise ParseError(f"a tag must end with '>' and one newline ({_where(text, at)})")
    return at + 2


def _invoke(text: str, at: int) -> tuple[ToolCall, int]:
    begin = at
    header, found, at = _until(text, at, (_PARAMETER, _INVOKE_CLOSE))
    match = _INVOKE_HEADER.fullmatch(header)
    if not found or match is None:
        raise ParseError(f'an invocation must begin with name="…"> and a newline ({_where(text, begin)})')
    items: dict[str, str] = {}
    while found == _PARAMETER:
        begin = at
        body, closed, at = _until(text, at, (_PARAMETER_CLOSE,))
        parameter = _PARAMETER_BODY.fullmatch(body)
        if not closed or parameter is None:
            raise ParseError(f'a parameter must be name="…" string="true|false">value ({_where(text, begin)})')
        name, flag, value = parameter.groups()
        if name in items:
            raise ParseError(f"the parameter {name!r} is given twice ({_where(text, begin)})")
        items[name] = _json(value) if flag == "true" else value
        begin = at
        between, found, at = _until(text, at, (_PARAMETER, _INVOKE_CLOSE))
        if not found or between != ">\n":
            raise ParseError(f"a parameter must be followed by the next tag on the next line ({_where(text, begin)})")
    arguments = ", ".join(f"{_json(name)}: {value}" for name, value in items.items())
    return ToolCall(match[1], f"{{{arguments}}}"), at


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _where(text: str, at: int) -> str:
    return f"character {at} of {len(text)}"
