"""Random conversations through the encoder: `python tests/encoding/fuzz_encoder.py --count 20000 --seed 0`.

Most look like a request and are wrong in a place or two. Each is encoded or refused with an error of dsv4nb, and
no text of a message becomes a control token. `test_fuzz` runs a sample of the same checks.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import dsv4nb.toy
from dsv4nb.encoding import policy
from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, LATEST_REMINDER, TASKS, THINK_CLOSE, THINK_OPEN, USER
from dsv4nb.encoding.render import Segment, render
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import Dsv4Error

TOKENIZER = Path(dsv4nb.toy.__file__).parent / "model" / "tokenizer.json"
CONTROLS = [BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML, LATEST_REMINDER, *TASKS.values()]
WORDS = [*CONTROLS, f"<{DSML}tool_calls>", f'<{DSML}invoke name="f">', "</tool_result>", "<｜User", "｜>", "\n\n", '">']
WORDS += ["", " ", "a", "7", "{}", '{"a": 1}', "null", "[1", "é👍🏽", "世界", "\0", "\u2028", "user", "text"]
ROLES = ["system", "developer", "user", "user", "user", "assistant", "assistant", "tool"]
KEYS = ["role", "content", "type", "text", "function", "name", "arguments", "id", "tools", "tool_calls", "task", "a"]
EFFORTS = [None, "none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(5)))


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Return whatever JSON, and a caller, may hold."""
    kind = rng.randrange(13 if depth < 3 else 10)
    if kind < 4:
        return text(rng) + rng.choice(["", "", "\ud83d"])
    if kind < 10:
        plain: list[Any] = [
            None,
            True,
            False,
            0,
            -1,
            10**400,
            1.5,
            float("nan"),
            float("inf"),
            b"bytes",
            {1, 2},
            object,
        ]
        return rng.choice(plain)
    if kind < 11:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice([*KEYS, text(rng), 7]): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def arguments(rng: random.Random) -> Any:
    given = {text(rng): rng.choice([text(rng), 1, None, [1.5], {"b": text(rng)}]) for _ in range(rng.randrange(3))}
    return rng.choice([given, json.dumps(given), json.dumps(given, ensure_ascii=False), text(rng), None])


def call(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": rng.choice(["f", text(rng)]), "arguments": arguments(rng)},
    }


def message(rng: random.Random, role: str) -> dict[str, Any]:
    content: Any = text(rng)
    if rng.random() < 0.2:
        content = [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(3))]
    out = {"role": role, "content": content}
    if role == "tool":
        out["tool_call_id"] = f"call_{rng.randrange(3)}"
    if role == "assistant":
        if rng.random() < 0.4:
            out["tool_calls"] = [call(rng, number) for number in range(rng.randrange(3))]
        if rng.random() < 0.5:
            out[rng.choice(["reasoning", "reasoning_content"])] = text(rng)
        if rng.random() < 0.1:
            out["prefix"] = True
    return out


def tool(rng: random.Random) -> dict[str, Any]:
    return {"type": "function", "function": {"name": text(rng), "parameters": {"properties": {text(rng): {}}}}}


def damaged(rng: random.Random, value: Any) -> Any:
    """Return the value with something else in one place."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return anything(rng)
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value, dict) and rng.random() < 0.2:
        return {k: v for k, v in value.items() if k != place}
    value[place] = damaged(rng, value[place])
    return value


def request(rng: random.Random) -> dict[str, Any]:
    """Return arguments for `encode`."""
    roles = [rng.choice(ROLES[2:]) for _ in range(rng.randrange(6))]
    if rng.random() < 0.3:
        roles.insert(0, rng.choice(ROLES[:2]))
    if rng.random() < 0.7:
        roles.append(rng.choice(["user", "tool"]))
    out: dict[str, Any] = {"messages": [message(rng, role) for role in roles]}
    if rng.random() < 0.4:
        out["tools"] = [tool(rng) for _ in range(rng.randrange(3))]
    if rng.random() < 0.2:
        out["response_format"] = {"type": rng.choice(["text", "json_object", "json_schema"]), text(rng): text(rng)}
    if rng.random() < 0.4:
        name = rng.choice(list(out))
        out[name] = damaged(rng, out[name])
    out |= {
        "expects_reply": rng.random() < 0.5,
        "revision": rng.choice(["preview", "v0731"]),
        "effort": rng.choice(EFFORTS) if rng.random() < 0.95 else anything(rng),
        "thinking": rng.choice([None, True, False]),
        "drop_thinking": rng.random() < 0.5,
    }
    return out


def encode(
    messages: Any,
    *,
    tools: Any = None,
    response_format: Any = None,
    expects_reply: bool,
    revision: Any,
    effort: Any,
    thinking: bool | None,
    drop_thinking: bool,
) -> list[Segment]:
    """Do what a session does with a request."""
    how = policy.reasoning(effort, revision=revision, thinking=thinking)
    normal = policy.normalize(messages, tools=tools, response_format=response_format, expects_reply=expects_reply)
    return render(normal, revision=revision, thinking=how.thinking, effort=how.effort, drop_thinking=drop_thinking)


def check(given: dict[str, Any], tokenizer: ChatTokenizer) -> str:
    """Check one request; return what became of it.

    Raises:
        AssertionError: text of a message became a control token, or the prompt is not the segments' text.
        Exception: any error that is not dsv4nb's own.
    """
    before = copy.deepcopy(given)
    try:
        segments = encode(**given)
        ids = tokenizer.encode_segments(segments)
    except Dsv4Error as error:
        assert str(error) and error.code
        return "refused"
    finally:
        assert repr(given) == repr(before), "the request was changed"
    controls = tokenizer.control_ids
    template = [i for s in segments if s.trusted for i in tokenizer.encode_trusted(s.text) if i in controls]
    assert [i for i in ids if i in controls] == template
    assert tokenizer.decode(ids) == "".join(segment.text for segment in segments)
    return "encoded"


def run(count: int, seed: int) -> Counter[str]:
    """Check `count` random requests; return how many were encoded and how many refused."""
    rng = random.Random(seed)
    tokenizer = ChatTokenizer.from_file(TOKENIZER)
    met: Counter[str] = Counter()
    for i in range(count):
        given = request(rng)
        try:
            met[check(given, tokenizer)] += 1
        except Exception as error:
            error.add_note(f"request {i} of seed {seed}: {given!r}")
            raise
    return met


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    for name, times in sorted(run(options.count, options.seed).items()):
        print(f"{times:10,} {name}")
    print(f"{time.perf_counter() - begin:10.1f} s, no fault")
