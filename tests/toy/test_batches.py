"""Conversations → rows, and one step on them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.reference.network import Network
from dsv4nb.toy.batches import BUCKETS, PROMPT_WEIGHT, Batches, Bucket, Encoder, make_batch
from dsv4nb.toy.corpus import tasks
from dsv4nb.toy.shape import model_config
from dsv4nb.toy.train import EXACT, PLAIN, Steps, assign_hash_experts, initialise

TOKENIZER = Path(__file__).parents[2] / "dsv4nb/toy/model/tokenizer.json"
ENCODER = Encoder(ChatTokenizer.from_file(TOKENIZER))


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda b: b.name)
def test_rows_fill_their_bucket_and_fit_it(bucket: Bucket) -> None:
    batch = make_batch(replace(bucket, rows=4), ENCODER, random.Random(1))
    assert batch.ids.shape == batch.weight.shape == (4, bucket.length)
    assert (batch.ids[:, 0] == ENCODER.tokenizer.bos_id).all()
    assert (batch.weight[:, 0] == 0).all()
    for ids, weight in zip(batch.ids, batch.weight, strict=True):
        end = int(weight.nonzero().max())
        assert ids[end] == ENCODER.tokenizer.eos_id
        assert (ids[end:] == ENCODER.tokenizer.eos_id).all()
        assert (weight == 1).sum() > 1


def test_only_what_the_assistant_writes_has_full_weight() -> None:
    conversation = tasks.single(tasks.Turn(user="Hi", thought="Say it.", reply="Yes"), "x")
    for thinking, said in ((False, "Yes"), (True, "Say it.</think>Yes")):
        ids = ENCODER.ids(conversation, thinking=thinking)
        weights = ENCODER.weights(ids)
        assert set(weights) == {1.0, PROMPT_WEIGHT}
        full = [i for i, w in zip(ids, weights, strict=True) if w == 1]
        assert ENCODER.tokenizer.decode(full) == f"{said}<｜end▁of▁sentence｜>"


def test_the_same_seed_gives_the_same_batches() -> None:
    first, second = (list(islice(iter(Batches(str(TOKENIZER), 3)), 2)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.bucket == b.bucket
        assert torch.equal(a.ids, b.ids)


@pytest.mark.parametrize("phase", [PLAIN, EXACT], ids=["plain", "exact"])
def test_a_step_gives_every_parameter_a_gradient_and_moves_the_balance(phase) -> None:  # type: ignore[no-untyped-def]
    network = Network(model_config())
    initialise(network, 0)
    assign_hash_experts(network, torch.ones(network.config.vocab_size), 0)
    batch = make_batch(replace(BUCKETS[3], rows=2), ENCODER, random.Random(2))
    language, index, hit = Steps(network, torch.device("cpu")).run(batch, phase).tolist()
    assert 4 < language < 12
    assert 0 < index < 5
    assert 0 <= hit <= 1
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name
    moved = [b.ffn.gate.bias for b in network.blocks if b.ffn.gate.bias is not None]
    assert moved
    assert all(bias.abs().max() > 0 for bias in moved)
