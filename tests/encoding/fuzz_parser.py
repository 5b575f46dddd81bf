"""Random replies through the parser: `python tests/encoding/fuzz_parser.py --count 100000 --seed 0`.

Half of them are replies as the format has them, cut, spliced and repeated; half are heaps of its fragments.
`test_fuzz` runs a sample of the same checks.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from dsv4nb.encoding.calls import CallArgs, CallEnd, CallStart
from dsv4nb.encoding.constants import BOS, CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.parse import ParsedMessage, parse_strict, parse_tolerant
from dsv4nb.encoding.stream_parse import Piece, Splitter
from dsv4nb.errors import ParseError

INVOKE, INVOKE_CLOSE = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_CLOSE = f'<{DSML}parameter name="', f"</{DSML}parameter>"
TAGS = [THINK_OPEN, THINK_CLOSE, EOS, CALLS_OPEN, CALLS_CLOSE, INVOKE, INVOKE_CLOSE, PARAMETER, PARAMETER_CLOSE]
TAGS += [f"<{DSML}toolcalls>", f"<{DSML}function_calls>", f"</{DSML}toolcalls>", f"</{DSML}function_calls>"]
TAGS += [f'{INVOKE}f">\n', f'{PARAMETER}a" string="true">', f'{PARAMETER}b" string="false">', f'{PARAMETER}c">']
GLUE = [
    "\n",
    "\n\n",
    " ",
    "\t",
    "\r\n",
    "<",
    ">",
    "</",
    '"',
    '">',
    '">\n',
    "{",
    "}",
    "\\",
    "｜",
    DSML,
    BOS,
    "a",
    "name=",
]
GLUE += [
    '" string="true">',
    '" string="false">',
    ' string="',
    "2>&1",
    "null",
    "007",
    '{"a": 1}',
    '{"a": [',
    "é👍🏽",
    "世",
]
FLAGS = ['" string="true">'] * 4 + ['" string="false">'] * 4 + ['">', '"  string="true">']


def heap(rng: random.Random) -> str:
    """Return fragments of the format in any order."""
    return "".join(fragment(rng) for _ in range(rng.randrange(16)))


def fragment(rng: random.Random) -> str:
    if rng.random() < 0.6:
        tag = rng.choice(TAGS)
        edge = rng.randrange(1, len(tag))
        return rng.choice([tag, tag, tag, tag[:edge], tag[edge:]])
    return rng.choice(GLUE)


def plain(rng: random.Random) -> str:
    return "".join(rng.choice(GLUE) for _ in range(rng.randrange(5)))


def value(rng: random.Random) -> str:
    return rng.choice([plain(rng), "7", "[1, 2.50]", " null\n", fragment(rng)])


def reply(rng: random.Random, *, thinking: bool) -> str:
    """Return a reply much as the format has it, sometimes damaged."""
    words = [plain(rng), THINK_CLOSE] if thinking else []
    words.append(plain(rng))
    if rng.random() < 0.8:
        words += ["\n\n", CALLS_OPEN, "\n"]
        for _ in range(rng.randrange(3)):
            words += [INVOKE, rng.choice(["f", "g.h", 'a">b']), '">', "\n"]
            for _ in range(rng.randrange(3)):
                words += [PARAMETER, rng.choice(["k", "l", 'm">n', "世\n"]), rng.choice(FLAGS), value(rng)]
                words += [PARAMETER_CLOSE, "\n"]
            if rng.random() < 0.1:
                words.append(rng.choice(['{"a": [1, 2.50]}', "{}", "{a", fragment(rng)]))
            words += [INVOKE_CLOSE, "\n"]
        words.append(CALLS_CLOSE)
    words.append(EOS)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        at = rng.randrange(len(words))
        damage = rng.randrange(4)
        if damage == 0:
            del words[at:]
        elif damage == 1:
            words.insert(at, fragment(rng))
        else:
            words[at] = "" if damage == 2 else words[at] * 2
        words = words or [""]
    return "".join(words)


def split(deltas: Iterable[str], options: dict[str, bool]) -> dict[str, Any]:
    """Return all that a splitter says, joined so that cuts do not show."""
    splitter = Splitter(**options)
    events = [event for delta in deltas for event in splitter.feed_events(delta)] + splitter.flush_events()
    pieces: list[list[str]] = []
    calls: list[list[str]] = []
    ends: list[CallEnd] = []
    for event in events:
        if isinstance(event, Piece):
            assert event.text
            if pieces and pieces[-1][0] == event.channel:
                pieces[-1][1] += event.text
            else:
                pieces.append([event.channel, event.text])
        elif isinstance(event, CallStart):
            assert event.index == len(calls) == len(ends)
            calls.append([event.name, ""])
        elif isinstance(event, CallArgs):
            assert event.fragment and event.index == len(calls) - 1 == len(ends)
            calls[-1][1] += event.fragment
        else:
            assert event.index == len(calls) - 1 == len(ends)
            assert [event.name, event.arguments_json] == calls[-1]
            ends.append(event)
    assert [(end.name, end.arguments_json) for end in ends] == [(c.name, c.arguments_json) for c in splitter.calls]
    return {
        "pieces": pieces,
        "calls": calls,
        "finished": splitter.calls,
        "anomalies": splitter.anomalies,
        "ending": splitter.ending,
        "closed": splitter.block_closed,
    }


def cuts(text: str, rng: random.Random) -> list[str]:
    edges = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]


def joined(pieces: Iterable[Iterable[str]], *channels: str) -> str:
    return "".join(text for channel, text in pieces if not channels or channel in channels)


def check(text: str, *, thinking: bool, tools: bool, rng: random.Random) -> Counter[str]:
    """Check one text; return what was met.

    Raises:
        AssertionError: something depends on the cuts, is lost or differs from the strict parser.
    """
    options = {"thinking": thinking, "tools_enabled": tools}
    whole = split([text], options)
    width = rng.choice([2, 3, 7])
    assert split(text, options) == whole, "one character at a time"
    assert split([text[i : i + width] for i in range(0, len(text), width)], options) == whole, width
    assert split(cuts(text, rng), options) == whole, "random cuts"
    assert joined(whole["pieces"]) == text
    assert whole["closed"] or whole["ending"] != "tool_calls"
    assert all(isinstance(json.loads(call.arguments_json), dict) for call in whole["finished"])
    assert len(whole["calls"]) - len(whole["finished"]) == (whole["calls"] != _pairs(whole))
    assert whole["calls"] == _pairs(whole) or "dropped_call" in whole["anomalies"]
    if not tools:
        assert not whole["calls"] and not joined(whole["pieces"], "tool")
    parsed = parse_tolerant(text, **options)
    assert parsed.reasoning == joined(whole["pieces"], "reasoning")
    assert parsed.content == joined(whole["pieces"], "content")
    assert (parsed.tool_calls, parsed.anomalies, parsed.ending) == tuple(
        whole[key] for key in ("finished", "anomalies", "ending")
    )
    met = Counter(whole["anomalies"])
    met["calls"] += len(parsed.tool_calls)
    met["strict"] += agrees(text, parsed, thinking=thinking) if tools else 0
    return met


def _pairs(whole: dict[str, Any]) -> list[list[str]]:
    return [[call.name, call.arguments_json] for call in whole["finished"]]


def agrees(text: str, parsed: Any, *, thinking: bool) -> bool:
    """Compare with the strict parser; False where that fails or reads control tokens as text."""
    try:
        strict = parse_strict(text, thinking=thinking)
    except ParseError:
        return False
    # the strict parser stops at no end token within a value, and lets a name hold a tag
    if EOS in text.removesuffix(EOS) or any(DSML in name for name in names(strict)):
        return False
    assert (parsed.reasoning, parsed.content) == (strict.reasoning, strict.content)
    assert [call.name for call in parsed.tool_calls] == [call.name for call in strict.tool_calls]
    assert set(parsed.anomalies) <= {"invalid_json_arg"}, parsed.anomalies
    if not parsed.anomalies:
        for ours, theirs in zip(parsed.tool_calls, strict.tool_calls, strict=True):
            # blanks around a value are not kept
            same = json.loads(ours.arguments_json), json.loads(theirs.arguments_json)
            assert list(same[0].items()) == list(same[1].items())
    return True


def names(strict: ParsedMessage) -> list[str]:
    """Return the names of the calls, and all that stands before a value."""
    return [call.name for call in strict.tool_calls] + [
        key for call in strict.tool_calls for key in _keys(call.arguments_json)
    ]


def _keys(arguments: str) -> list[str]:
    try:
        return list(json.loads(arguments))
    except ValueError:
        return [arguments]


def run(count: int, seed: int, progress: Callable[[int], None] = lambda _: None) -> Counter[str]:
    """Check `count` random texts; return how often what was met."""
    rng = random.Random(seed)
    met: Counter[str] = Counter()
    for i in range(count):
        thinking, tools = rng.random() < 0.5, rng.random() < 0.85
        text = heap(rng) if rng.random() < 0.5 else reply(rng, thinking=thinking)
        try:
            met += check(text, thinking=thinking, tools=tools, rng=rng)
        except Exception as error:
            error.add_note(f"text {i} of seed {seed}: {text!r}, {thinking=}, {tools=}")
            raise
        met["texts"] += 1
        met["characters"] += len(text)
        progress(i)
    return met


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    for name, times in sorted(run(arguments.count, arguments.seed).items()):
        print(f"{times:10,} {name}")
    print(f"{time.perf_counter() - begin:10.1f} s, no fault")
