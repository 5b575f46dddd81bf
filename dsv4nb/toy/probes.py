"""Held-out questions with known replies, checked without generating.

A reply is right when every one of its tokens is the network's first choice after the tokens before it: then
greedy decoding writes exactly this reply.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dsv4nb.reference.network import Network
from dsv4nb.toy.batches import Encoder
from dsv4nb.toy.corpus import tasks, world
from dsv4nb.toy.corpus.tasks import Conversation, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One held-out conversation and the mode it is asked in."""

    name: str
    conversation: Conversation
    thinking: bool


def held_out_conversations(seed: int, count: Callable[[str], int], many: int) -> Iterator[tuple[str, Conversation]]:
    """Yield (skill, conversation) of the evaluation: all facts, and `many` of each other skill."""
    s = Sampler(random.Random(seed), held_out=True)
    for relation in world.RELATIONS:
        for subject in relation.facts:
            yield "facts", tasks.single(tasks.fact(s, relation, subject), "facts")
    for _ in range(many):
        yield "addition", tasks.single(tasks.addition(s), "addition")
        yield "subtraction", tasks.single(tasks.subtraction(s), "subtraction")
    for i in range(many):
        tool = tuple(tasks.TOOLS)[i % len(tasks.TOOLS)]
        yield "tool calls", tasks.tool_conversation(s, tool=tool, answer_result=False)
    for i in range(many // 2):
        tool = tuple(tasks.TOOLS)[i % len(tasks.TOOLS)]
        yield "tool answers", tasks.tool_conversation(s, tool=tool, answer_result=True)
    for i in range(many):
        distance = 300 + round(1200 * i / max(1, many - 1))
        yield "code word", tasks.memory_conversation(s, count, distance, in_one_message=i % 2 == 0)
    for _ in range(many // 2):
        yield "reading", tasks.single(tasks.reading(s), "reading")
        yield "JSON", tasks.json_conversation(s)


def probes(seed: int, encoder: Encoder, many: int) -> list[Probe]:
    """Return every held-out conversation in chat and in thinking mode."""
    drawn = list(held_out_conversations(seed, encoder.tokenizer.count, many))
    return [Probe(name=n, conversation=c, thinking=t) for t in (False, True) for n, c in drawn]


@torch.inference_mode()
def score(network: Network, encoder: Encoder, asked: list[Probe], tokens_per_batch: int = 40_000) -> dict[str, float]:
    """Return the share of exactly right replies per skill and mode, like {"facts/chat": 0.99}."""
    device = next(network.parameters()).device
    rows = sorted(((encoder.ids(p.conversation, thinking=p.thinking), p) for p in asked), key=lambda r: len(r[0]))
    right: dict[str, list[bool]] = {}
    start = 0
    while start < len(rows):
        longest = start
        while longest + 1 < len(rows) and len(rows[longest + 1][0]) * (longest + 2 - start) <= tokens_per_batch:
            longest += 1
        batch = rows[start : longest + 1]
        length = len(batch[-1][0])
        ids = torch.full((len(batch), length), encoder.tokenizer.eos_id, device=device)
        for i, (row, _) in enumerate(batch):
            ids[i, : len(row)] = torch.tensor(row)
        best = network(ids).argmax(-1)
        hit = (best[:, :-1] == ids[:, 1:]).cpu()
        for i, (row, probe) in enumerate(batch):
            answer = len(row) - 1 - row[::-1].index(encoder.tokenizer.id_of("<｜Assistant｜>")) + 2
            key = f"{probe.name}/{'thinking' if probe.thinking else 'chat'}"
            right.setdefault(key, []).append(bool(hit[i, answer - 1 : len(row) - 1].all()))
        start = longest + 1
    return {key: sum(v) / len(v) for key, v in sorted(right.items())}
