"""Conversations → token rows of a few fixed lengths, endlessly and repeatably."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dsv4nb.encoding.render import render
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.toy.corpus import tasks
from dsv4nb.toy.corpus.tasks import Conversation, Sampler

PROMPT_WEIGHT = 0.02  # of a prompt token's loss; a long text would drown its short answer
MADE_UP = 0.5  # share of invented names


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One row length and what fills it.

    Attributes:
        share: of the training steps.
        rows: per batch, so that batches of all buckets have about 24,000 tokens.
    """

    name: str
    length: int
    rows: int
    share: float


BUCKETS = (
    Bucket(name="short", length=64, rows=384, share=0.12),
    Bucket(name="thought", length=128, rows=192, share=0.13),
    Bucket(name="turns", length=320, rows=76, share=0.07),
    Bucket(name="recall", length=256, rows=96, share=0.26),
    Bucket(name="tools", length=1088, rows=22, share=0.19),
    Bucket(name="memory", length=1792, rows=13, share=0.23),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one bucket: ids [B, T] int64 and the loss weight of predicting each id [B, T]."""

    bucket: str
    ids: Tensor
    weight: Tensor


def draw(bucket: Bucket, s: Sampler, count: Callable[[str], int]) -> tuple[Conversation, bool]:
    """Return a conversation for `bucket` and whether it is in thinking mode."""
    roll = s.rng.random()
    if bucket.name == "short":
        return tasks.plain_conversation(s, 1), False
    if bucket.name == "thought":
        return tasks.plain_conversation(s, 1 if roll < 0.8 else 2), roll < 0.85
    thinking = s.rng.random() < 0.5
    if bucket.name == "turns":
        if roll < 0.3:
            return tasks.memory_conversation(s, count, s.rng.randint(20, 220)), thinking
        if roll < 0.42:
            return tasks.json_conversation(s), thinking
        return tasks.plain_conversation(s, s.rng.randint(1, 6)), thinking
    if bucket.name == "recall":
        return _recall(s, count, s.rng.randint(30, 170)), thinking
    if bucket.name == "tools":
        if roll < 0.8:
            return tasks.tool_conversation(s), thinking
        if roll < 0.84:  # counting to 100 fits no shorter row
            return tasks.single(tasks.counting(s), "counting"), thinking
        return _recall(s, count, s.rng.randint(150, 900)), thinking
    return _recall(s, count, s.rng.randint(300, 1550)), thinking


def _recall(s: Sampler, count: Callable[[str], int], distance: int) -> Conversation:
    makers = (tasks.attribute_memory_conversation, tasks.keyed_memory_conversation, tasks.memory_conversation)
    return s.rng.choices(makers, (0.55, 0.1, 0.35))[0](s, count, distance)


class Encoder:
    """Turns conversations into ids through the product's own chat encoder."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._assistant = tokenizer.id_of("<｜Assistant｜>")
        self._eos = tokenizer.eos_id

    def ids(self, conversation: Conversation, *, thinking: bool, effort: str | None = None) -> list[int]:
        """Encode a finished conversation, BOS and EOS included."""
        segments = render(conversation.messages, revision="v0731", thinking=thinking, effort=effort)
        return self.tokenizer.encode_segments(segments)

    def weights(self, ids: list[int]) -> list[float]:
        """Give what the assistant writes the weight 1: from behind its header up to and with EOS."""
        out, writing = [], 0
        for token in ids:
            out.append(1.0 if writing == 2 else PROMPT_WEIGHT)
            if token == self._assistant:
                writing = 1
            elif writing == 1:  # <think> or </think> belongs to the prompt
                writing = 2
            elif token == self._eos:
                writing = 0
        return out


class Batches(IterableDataset[Batch]):
    """Endless batches; worker w of n makes batches w, w + n, … of the same sequence of buckets.

    Args:
        shrink: divides the rows of every batch, for a machine without a GPU.
    """

    def __init__(self, tokenizer_path: str, seed: int, shrink: int = 1) -> None:
        self._path, self._seed = tokenizer_path, seed
        self._buckets = [replace(b, rows=max(1, b.rows // shrink)) for b in BUCKETS]

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        encoder = Encoder(ChatTokenizer.from_file(self._path))
        index = first
        while True:
            # one generator per batch: the sequence does not depend on the number of workers
            rng = random.Random(f"{self._seed}/{index}")
            bucket = rng.choices(self._buckets, [b.share for b in self._buckets])[0]
            yield make_batch(bucket, encoder, rng)
            index += stride


def make_batch(bucket: Bucket, encoder: Encoder, rng: random.Random) -> Batch:
    """Fill one batch; conversations that do not fit are drawn again."""
    s, count = Sampler(rng, made_up=MADE_UP), encoder.tokenizer.count
    ids = torch.full((bucket.rows, bucket.length), encoder.tokenizer.eos_id)
    weight = torch.zeros(bucket.rows, bucket.length)
    row = 0
    while row < bucket.rows:
        conversation, thinking = draw(bucket, s, count)
        effort = rng.choice(("high", "max")) if thinking and bucket.length > 128 and rng.random() < 0.08 else None
        tokens = encoder.ids(conversation, thinking=thinking, effort=effort)
        if len(tokens) > bucket.length:
            continue
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weight[row, : len(tokens)] = torch.tensor(encoder.weights(tokens))
        weight[row, 0] = 0.0  # nothing predicts BOS
        row += 1
    return Batch(bucket=bucket.name, ids=ids, weight=weight)
