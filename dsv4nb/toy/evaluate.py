"""Ask the bundled model what it was never trained on: `python -m dsv4nb.toy.evaluate`.

Everything goes through the product: load, chat encoding, engine, greedy decoding, grammar, parser. Held-out entities,
phrasings and operand pairs are those of `corpus.splits`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4nb.encoding.constants import EOS
from dsv4nb.encoding.parse import parse_strict
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import ParseError
from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.toy.corpus.tasks import Conversation
from dsv4nb.toy.probes import held_out_conversations

MUST = {"facts": 0.98, "addition": 0.90, "subtraction": 0.90, "tool calls": 0.95, "code word": 0.90}


@dataclass(slots=True)
class Score:
    """Right answers of one skill in one mode."""

    asked: int = 0
    right: int = 0
    stopped: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Right answers of all."""
        return self.right / max(1, self.asked)


def is_right(skill: str, conversation: Conversation, reply: Generation, *, thinking: bool) -> bool:
    """Whether the reply does what was asked; wording is free where only an answer is wanted."""
    if skill == "tool calls":
        return called(reply, thinking=thinking) == (conversation.tags["name"], conversation.tags["arguments"])
    if skill == "JSON":
        return bool(_parsed(reply.text) == json.loads(conversation.expected))
    if skill == "code word":
        return conversation.expected in reply.text
    return reply.text.strip() == conversation.expected


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def called(reply: Generation, *, thinking: bool) -> tuple[str, object] | None:
    """Return (name, arguments) when the reply is one call in valid DSML, by the strict parser."""
    text = reply.raw_text if reply.raw_text.endswith(EOS) else reply.raw_text + EOS
    try:
        parsed = parse_strict(text, thinking=thinking)
        if len(parsed.tool_calls) != 1:
            return None
        return parsed.tool_calls[0].name, json.loads(parsed.tool_calls[0].arguments_json)
    except (ParseError, ValueError):
        return None


def ask(model: Model, conversation: Conversation, *, thinking: bool) -> Generation:
    """Send the conversation without its last answer."""
    messages: list[dict[str, Any]] = [dict(m) for m in conversation.messages[:-1]]
    tools, schema = messages[0].pop("tools", None), messages[0].pop("response_format", None)
    return model.generate(
        messages=messages,
        tools=tools,
        response_format=None if schema is None else {"type": "json_schema", "schema": schema},
        thinking=thinking,
        temperature=0.0,
        max_new=400,
    )


def evaluate(
    model: Model, count: Any, *, seed: int, many: int, skipped: Collection[str] = ()
) -> Mapping[tuple[str, bool], Score]:
    """Ask every held-out conversation but those of `skipped` skills, in both modes."""
    scores: dict[tuple[str, bool], Score] = {}
    drawn = held_out_conversations(seed, count, many)
    for skill, conversation in (one for one in drawn if one[0] not in skipped):
        for thinking in (False, True):
            reply = ask(model, conversation, thinking=thinking)
            score = scores.setdefault((skill, thinking), Score())
            score.asked += 1
            score.stopped += reply.stop_reason != "length"
            if is_right(skill, conversation, reply, thinking=thinking):
                score.right += 1
            else:
                question = str(conversation.messages[-2]["content"])[-80:]
                score.missed.append(f"{question!r} -> {reply.raw_text[-120:]!r}")
    return scores


def main() -> None:
    """Print the table; leave with 1 when a required share is not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="toy")
    parser.add_argument("--devices", metavar="IDS", help="as of load(): cpu, or GPU ids such as 0,1")
    parser.add_argument("--placement", help="likewise")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--many", type=int, default=96, help="questions of each skill but facts, which are asked all")
    parser.add_argument("--skip", action="append", default=[], metavar="SKILL", help="leave one out, such as JSON")
    parser.add_argument("--missed", type=int, default=2, help="wrong replies to show per line")
    args = parser.parse_args()
    started = time.monotonic()
    with load(args.model, devices=args.devices, placement=args.placement) as model:
        device = model.info.device
        count = ChatTokenizer.from_file(f"{model.info.path}/tokenizer.json").count
        scores = evaluate(model, count, seed=args.seed, many=args.many, skipped=args.skip)
    failed = False
    print(f"{'held out':14}{'mode':10}{'asked':>6}{'right':>7}{'must':>6}{'stops':>7}")
    for (skill, thinking), score in scores.items():
        must = MUST.get(skill)
        failed |= must is not None and score.share < must
        limit = f"{must:6.0%}" if must else f"{'':6}"
        stops = score.stopped / score.asked
        print(f"{skill:14}{'thinking' if thinking else 'chat':10}{score.asked:6}{score.share:7.1%}{limit}{stops:7.0%}")
        for line in score.missed[: args.missed]:
            print(f"    {line}")
    print(f"{device}, seed {args.seed}, {time.monotonic() - started:.0f} s")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
