"""Checkpoint → ranks that run one after the other: every layer whole, on one of them, as one rank has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb.weights.store import tensors_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Checkpoint:
    return open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")


@pytest.fixture(scope="module")
def whole(toy: Checkpoint) -> RankWeights:
    return load_ranks(toy, [CPU], drafter=True)[0]


def same(ours: object, theirs: object) -> bool:
    pairs = zip(tensors_of(ours), tensors_of(theirs), strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("drafter", [False, True])
def test_a_span_is_what_one_rank_has_of_its_layers(
    toy: Checkpoint, whole: RankWeights, ranks: int, drafter: bool
) -> None:
    steps: list[LoadStep] = []
    line = load_ranks(toy, [CPU] * ranks, kind="pipeline", drafter=drafter, on_progress=steps.append)
    assert [number for rank in line for number in rank.span] == list(range(6))
    for rank in line:
        assert rank.shapes == whole.shapes
        assert all(same(layer, whole.layers[number]) for number, layer in zip(rank.span, rank.layers, strict=True))
    first, *middle, last = line
    assert torch.equal(first.embed, whole.embed)
    assert same(last.head, whole.head) and same(last.hyper_head, whole.hyper_head)
    assert all(rank.embed.numel() == rank.head.words.numel() == 0 for rank in middle)
    assert all(rank.draft is None for rank in line[:-1])
    if drafter:
        assert last.draft is not None and same(last.draft, whole.draft)
        # once more than on one rank: the drafter's embedding
        extra = whole.embed.nbytes
        assert sum(rank.resident_bytes for rank in line) == whole.resident_bytes + extra
    else:
        assert last.draft is None and last.embed.numel() == 0
    read = sum(entry.nbytes for name, entry in toy.entries.items() if drafter or not name.startswith("mtp."))
    assert steps[-1].done_bytes == steps[-1].total_bytes == read
