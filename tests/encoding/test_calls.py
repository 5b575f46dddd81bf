"""What stands inside a block, as the format has it and as models write it."""

from __future__ import annotations

import json
import sys

import pytest

from dsv4nb.encoding.calls import CallArgs, CallEnd, CallEvent, CallReader, CallStart, ToolCall
from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, EOS
from dsv4nb.encoding.parse import parse_tolerant
from dsv4nb.encoding.stream_parse import Piece, Splitter

INVOKE, INVOKE_CLOSE = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_CLOSE = f"<{DSML}parameter", f"</{DSML}parameter>"
F = f'{INVOKE} name="f">\n'
END = f"{INVOKE_CLOSE}\n"


def parameter(value: str = "v", header: str = ' name="a" string="true"') -> str:
    return f"{PARAMETER}{header}>{value}{PARAMETER_CLOSE}\n"


A = parameter()
JSON = ' name="a" string="false"'
QUOTE = f"{F}{A[:9]}{END}{CALLS_CLOSE}\n{CALLS_OPEN}"
QUOTED = [("f", json.dumps({"a": QUOTE}, ensure_ascii=False))]


def read(inside: str, *, closer: str = f"{CALLS_CLOSE}{EOS}") -> tuple[list[tuple[str, str]], list[str]]:
    """Return the calls of a block and the anomalies, the same for every cut."""
    text = f"\n\n{CALLS_OPEN}\n{inside}{closer}"
    parsed = parse_tolerant(text, thinking=False, tools_enabled=True)
    assert (parsed.reasoning, parsed.content) == ("", "")
    for at in range(len(text) + 1):
        splitter = Splitter(thinking=False, tools_enabled=True)
        parts = [text[:at], text[at:]] if at else list(text)
        events = [event for part in parts for event in splitter.feed_events(part)] + splitter.flush_events()
        assert splitter.calls == parsed.tool_calls, at
        assert splitter.anomalies == parsed.anomalies, at
        assert calls_of(events) == list(parsed.tool_calls), at
    return [(call.name, call.arguments_json) for call in parsed.tool_calls], list(parsed.anomalies)


def calls_of(events: list[Piece | CallEvent]) -> list[ToolCall]:
    """Put the finished calls together from their events."""
    begun: list[list[str]] = []
    finished: list[ToolCall] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(begun)
            begun.append([event.name])
        elif isinstance(event, CallArgs):
            assert event.fragment and event.index == len(begun) - 1
            begun[-1].append(event.fragment)
        elif isinstance(event, CallEnd):
            assert event.index == len(begun) - 1
            name, *fragments = begun[-1]
            assert (event.name, event.arguments_json) == (name, "".join(fragments))
            finished.append(ToolCall(event.name, event.arguments_json))
    return finished


@pytest.mark.parametrize(
    ("inside", "calls", "anomalies"),
    [
        ("", [], []),
        (f"{F}{A}{END}", [("f", '{"a": "v"}')], []),
        (f"{F}\n{END}", [("f", "{}")], []),
        (f"{F}{A}{END}{F}{END}", [("f", '{"a": "v"}'), ("f", "{}")], []),
        # headers of invocations
        (f'{INVOKE}  name="f">{A}{END}', [("f", '{"a": "v"}')], []),
        (f'{INVOKE} \n\n name="f" >\n{A}{END}', [("f", '{"a": "v"}')], []),
        (f'{INVOKE} name="a">b">\n{END}', [('a">b', "{}")], []),
        (f'{INVOKE} name="">\n{END}', [("", "{}")], []),
        (f"{INVOKE} name='f'>\n{A}{END}{F}{END}", [("f", "{}")], ["bad_invoke_header"]),
        (f"{INVOKE}>\n{END}", [], ["bad_invoke_header"]),
        (f'{INVOKE} name="f{INVOKE_CLOSE}\n', [], ["bad_invoke_header"]),
        # what is missing
        (f"{F}{A}{F}{END}", [("f", '{"a": "v"}'), ("f", "{}")], ["missing_invoke_close"]),
        (f"{F}{A}", [("f", '{"a": "v"}')], ["missing_invoke_close"]),
        # headers of parameters
        (F + parameter("7", '  string="true" name="a"') + END, [("f", '{"a": "7"}')], []),
        (F + parameter("7", ' name="a"  string="false"') + END, [("f", '{"a": 7}')], []),
        (F + parameter("7", ' type="t" name="a" string="true"') + END, [("f", '{"a": "7"}')], []),
        (F + parameter("7", ' name="a>b" string="true"') + END, [("f", '{"a>b": "7"}')], []),
        (F + parameter("7", ' name="a">b" string="true"') + END, [("f", '{"a\\">b": "7"}')], []),
        (F + parameter("7", ' name="a"') + END, [("f", '{"a": 7}')], ["missing_string_flag"]),
        (F + parameter(" x", ' name="a"') + END, [("f", '{"a": " x"}')], ["missing_string_flag"]),
        (F + parameter("x", ' name="a" string="no"') + END, [("f", '{"a": "x"}')], ["missing_string_flag"]),
        (F + parameter("x", "") + A + END, [("f", '{"a": "v"}')], ["bad_parameter_header"]),
        (F + parameter("x", ' nom="a" string="true"') + END, [("f", "{}")], ["bad_parameter_header"]),
        (f"{F}{PARAMETER} na{PARAMETER_CLOSE}{A}{END}", [("f", '{"a": "v"}')], ["bad_parameter_header"]),
        (f"{F}{PARAMETER} na\n{A}{END}", [("f", '{"a": "v"}')], ["bad_parameter_header"]),
        # values
        (F + A + parameter("w") + END, [("f", '{"a": "v"}')], ["duplicate_parameter"]),
        (
            F + A + parameter("1", JSON) + parameter("1", ' name="b" string="false"') + END,
            [("f", '{"a": "v", "b": 1}')],
            ["duplicate_parameter"],
        ),
        (F + parameter(" [2.50, 1]\n", JSON) + END, [("f", '{"a": [2.50, 1]}')], []),
        (F + parameter("v", JSON) + END, [("f", '{"a": "v"}')], ["invalid_json_arg"]),
        (F + parameter("", JSON) + END, [("f", '{"a": ""}')], ["invalid_json_arg"]),
        # a value may quote any tag but its own closer
        (F + parameter(QUOTE) + END, QUOTED, []),
        (F + parameter(QUOTE, ' name="a"') + END, QUOTED, ["missing_string_flag"]),
        (F + parameter(QUOTE, ' string="true"  name="a"') + END, QUOTED, []),
        (F + parameter(QUOTE, JSON) + END, QUOTED, ["invalid_json_arg"]),
        # bodies
        (f'{F}{{"b": 2.50, "a": "é"}}\n{END}', [("f", '{"b": 2.5, "a": "é"}')], ["json_body"]),
        (f'{INVOKE} name="f">{{"a": 1}}{INVOKE_CLOSE}', [("f", '{"a": 1}')], ["json_body"]),
        (f"{F} {{}} {END}", [("f", "{}")], ["json_body"]),
        (f"{F}{{a: 1}}\n{END}", [("f", '{"arguments": "{a: 1}"}')], ["invalid_json_body"]),
        (
            f'{F}{{"a": "{A[:-1]}"}}',
            [("f", json.dumps({"arguments": f'{{"a": "{A[:-1]}"}}'}, ensure_ascii=False))],
            ["invalid_json_body", "missing_invoke_close"],
        ),
        (f'{F}{{"a": "\\ud800"}}{END}', [("f", '{"a": "\\ud800"}')], ["json_body"]),
        (f"{F}{A}{{}}{END}", [("f", '{"a": "v"}')], ["text_between_tags"]),
        # text between tags
        (f"{F}{A}{END}x", [("f", '{"a": "v"}')], ["text_between_tags"]),
        (f"{F}x{{}}{A}{END}", [("f", '{"a": "v"}')], ["text_between_tags"]),
        (f"  {F}    {A}\t{END}\r\n", [("f", '{"a": "v"}')], []),
        (f"{F}{A}{END}{INVOKE_CLOSE}", [("f", '{"a": "v"}')], ["text_between_tags"]),
    ],
)
def test_a_block_is_read_whatever_the_cuts(inside: str, calls: list[tuple[str, str]], anomalies: list[str]) -> None:
    assert read(inside) == (calls, anomalies)


@pytest.mark.parametrize(
    ("inside", "closer", "finished", "anomalies"),
    [
        (f"{F}{A}{END}", EOS, 1, ["missing_block_close"]),
        (f"{F}{A}", EOS, 1, ["missing_invoke_close", "missing_block_close"]),
        (F, EOS, 1, ["missing_invoke_close", "missing_block_close"]),
        (f"{F}{{}}", EOS, 1, ["json_body", "missing_invoke_close", "missing_block_close"]),
        (f"{F}{A[:-4]}", EOS, 0, ["truncated_parameter", "dropped_call"]),
        (f"{F}{PARAMETER} na", EOS, 0, ["truncated_parameter", "dropped_call"]),
        (f'{INVOKE} name="f', EOS, 0, ["bad_invoke_header", "missing_block_close"]),
        (f"{F}{A}{END}", f"</{DSML}function_calls>", 1, ["malformed_closer"]),
        (f"{F}{A}{END}", f"</{DSML}toolcalls>{EOS}", 1, ["malformed_closer"]),
        # the text just ends
        (f"{F}{A}{END}", "", 1, ["truncated_tool_block"]),
        (f"{F}{A}{END}", INVOKE[:-1], 1, ["truncated_tool_block"]),
        (f"{F}{A}{END}", f'{INVOKE} name="g"', 1, ["dropped_call", "truncated_tool_block"]),
        (f"{F}{A}", INVOKE_CLOSE[:-1], 0, ["dropped_call", "truncated_tool_block"]),
        (f"{F}{A[:-4]}", "", 0, ["dropped_call", "truncated_tool_block"]),
        (f"{F}{{}}", "", 0, ["dropped_call", "truncated_tool_block"]),
    ],
)
def test_m68_a_block_that_is_cut_short_keeps_its_finished_calls(
    inside: str, closer: str, finished: int, anomalies: list[str]
) -> None:
    calls, found = read(inside, closer=closer)
    assert len(calls) == finished
    assert found == anomalies


def test_a_dropped_call_has_begun_and_does_not_end() -> None:
    splitter = Splitter(thinking=False, tools_enabled=True)
    events = splitter.feed_events(f"{CALLS_OPEN}{F}{END}{F}{A[:-6]}") + splitter.flush_events()
    assert [event for event in events if not isinstance(event, Piece)] == [
        CallStart(index=0, name="f"),
        CallArgs(index=0, fragment="{}"),
        CallEnd(index=0, name="f", arguments_json="{}"),
        CallStart(index=1, name="f"),
        CallArgs(index=1, fragment='{"a": "'),
        CallArgs(index=1, fragment="v"),
    ]


def test_values_beyond_pythons_limits_are_read_all_the_same() -> None:
    digits = "7" * (sys.get_int_max_str_digits() + 1)
    nested = "[" * 100_000
    inside = f'{F}{PARAMETER} name="a" string="false">{{}}{PARAMETER_CLOSE}\n{END}'
    text = f"{CALLS_OPEN}\n{inside}{CALLS_CLOSE}"
    for value, arguments in ((digits, f'{{"a": {digits}}}'), (nested, f'{{"a": "{nested}"}}')):
        parsed = parse_tolerant(text.replace("{}", value), thinking=False, tools_enabled=True)
        assert parsed.tool_calls == (ToolCall("f", arguments),)
    body = f'{{"a": {digits}}}'
    parsed = parse_tolerant(f"{CALLS_OPEN}\n{F}{body}{END}{CALLS_CLOSE}", thinking=False, tools_enabled=True)
    assert json.loads(parsed.tool_calls[0].arguments_json) == {"arguments": body}


def test_the_reader_tells_which_markers_count() -> None:
    reader = CallReader(lambda anomaly: pytest.fail(anomaly))
    assert reader.marker(INVOKE) and reader.state == "invoke"
    reader.text(' name="f">')
    assert not reader.marker("\n") and reader.state == "call"
    assert reader.marker(PARAMETER) and reader.state == "parameter"
    reader.text(' name="a')
    assert reader.marker('" string="true">') and reader.state == "value"
    assert reader.marker(PARAMETER_CLOSE) and reader.state == "call"
    assert reader.marker(INVOKE_CLOSE) and reader.state == "block" and not reader.is_closed
    assert reader.marker(CALLS_CLOSE) and reader.is_closed
    assert reader.calls == [ToolCall("f", '{"a": ""}')]
