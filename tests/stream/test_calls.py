from __future__ import annotations

import json
from typing import Any

import pytest

from dsv4nb.events import ToolCall, ToolResult
from dsv4nb.stream.calls import Card, card_of, cards_of

CALL = ToolCall(id="call_0", name="f", arguments='{"city": "Paris"}')


def result(**fields: Any) -> ToolResult:
    return ToolResult(**{"id": "call_0", "name": "f", "content": "21", "arguments": CALL.arguments} | fields)


@pytest.mark.parametrize(
    ("made", "is_over", "state", "status"),
    [
        (None, False, "running", "running…"),
        (None, True, "unanswered", "no result"),
        (result(), False, "answered", "answered"),
        (result(content="Error: no", error="ValueError: no"), True, "failed", "failed: ValueError: no"),
        (
            result(content="Not run: the user declined this call.", error="the user declined this call", arguments=""),
            True,
            "not_run",
            "not run: the user declined this call",
        ),
    ],
)
def test_a_call_tells_how_it_stands(made: ToolResult | None, is_over: bool, state: str, status: str) -> None:
    card = card_of(CALL, made, is_over=is_over)
    assert (card.state, card.status, card.result) == (state, status, made.content if made else "")


def test_a_call_that_was_edited_shows_what_was_run() -> None:
    assert card_of(CALL, result(arguments='{"city": "Rome"}'), is_over=True).pretty == '{"city": "Rome"}'


def test_results_go_to_their_calls_by_id() -> None:
    other = ToolCall(id="call_1", name="g", arguments="{}")
    cards = cards_of([CALL, other], [result(id="call_1", content="1"), result(content="0")], is_over=True)
    assert [card.result for card in cards] == ["0", "1"]


@pytest.mark.parametrize(
    ("written", "pretty"),
    [
        ("{}", ""),
        ("", ""),
        ('{"b":1,"a":"Zürich"}', '{"b": 1, "a": "Zürich"}'),
        ('{"half', '{"half'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_read_well_or_stay_as_they_were_written(written: str, pretty: str) -> None:
    assert Card(name="f", arguments=written, state="running").pretty == pretty


def test_long_arguments_have_lines_and_are_folded() -> None:
    some = Card(name="f", arguments=json.dumps({"a": "x" * 40, "b": "y" * 40}), state="running")
    assert some.pretty.count("\n") == 3 and not some.is_long
    assert Card(name="f", arguments=json.dumps({"a": list(range(50))}), state="running").is_long


@pytest.mark.parametrize(
    ("text", "preview"),
    [("21", "21"), ("two\n  lines", "two lines"), ("x" * 61, "x" * 59 + "…"), ("\n" * 300 + "x", "…")],
)
def test_a_fold_shows_where_its_result_begins(text: str, preview: str) -> None:
    assert Card(name="f", arguments="{}", state="answered", result=text).preview == preview
