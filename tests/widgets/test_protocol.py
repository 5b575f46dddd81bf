from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dsv4nb.widgets.protocol as protocol
from dsv4nb.stream.frames import LETTERS, Frame

SCRIPT = (Path(protocol.__file__).parent / "js/protocol.js").read_text()


def declared(name: str) -> object:
    found = re.search(rf"export const {name} = ([\[{{].*?[\]}}]);", SCRIPT, re.DOTALL)
    assert found, f"protocol.js declares no {name}"
    return json.loads(found[1])


@pytest.mark.parametrize("name", [name for name in vars(protocol) if name.isupper() and name[0] != "_"])
def test_both_sides_declare_the_same(name: str) -> None:
    assert declared(name) == json.loads(json.dumps(getattr(protocol, name)))


def test_letters_are_those_of_the_frames() -> None:
    assert {letter: channel for channel, letter in LETTERS.items()} == protocol.CHANNELS
    message = Frame(run=1, start=0, tokens=(("content", "a"),)).message()
    assert set(message) == {"kind", *protocol.FROM_KERNEL["frame"]}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "stop",
        {},
        {"kind": "nothing"},
        {"kind": "send", "id": "a"},
        {"kind": "send", "id": 1, "text": "a"},
        {"kind": "stop", "id": "a", "run": True, "command": ""},
        {"kind": "set_thinking", "id": "a", "value": "yes"},
    ],
)
def test_what_is_none_of_ours_is_ignored(content: object) -> None:
    assert protocol.parse(content) is None


def test_fields_nobody_declared_are_left_out() -> None:
    assert protocol.parse({"kind": "reset", "id": "a", "extra": 1}) == {"kind": "reset", "id": "a"}
