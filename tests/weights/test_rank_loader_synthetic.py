"""Weights that are made up while they are packed: no files, and few tensors at a time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[attr-defined]

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.weights.kernel_layout import EXPERTS_AT_ONCE
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.store import tensors_of
from dsv4nb.weights.synthetic import SyntheticReader, write_synthetic

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_topk": 32,
    "n_routed_experts": 40,
}


class Watched(SyntheticReader):
    """Counts which of its tensors still take memory whenever another one is asked for."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.made: dict[str, StorageWeakRef] = {}
        self.seen: list[set[str]] = []

    def read(self, name: str) -> Tensor:
        assert name not in self.made, name
        self.seen.append(self.alive())
        value = super().read(name)
        self.made[name] = StorageWeakRef(value.untyped_storage())
        return value

    def alive(self) -> set[str]:
        return {name for name, storage in self.made.items() if not storage.expired()}


@pytest.fixture
def config() -> ModelConfig:
    return from_hf(hf_config("tiny", SMALL))


def test_made_up_weights_are_those_of_the_files(config: ModelConfig, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "files", hf_config("tiny", SMALL))
    files = load_ranks(open_checkpoint(tmp_path / "files", require_tokenizer=False), [CPU])[0]
    reader = SyntheticReader(config)
    ours = load_ranks(reader, [CPU], source=reader)[0]
    pairs = list(zip(tensors_of(ours), tensors_of(files), strict=True))
    assert len(pairs) > 60 and all(torch.equal(one, other) for one, other in pairs)
    assert ours.resident_bytes == files.resident_bytes


def test_few_tensors_are_held_at_a_time(config: ModelConfig) -> None:
    reader = Watched(config)
    ranks = load_ranks(reader, [CPU], source=reader)
    kept = reader.alive()  # what the kernels read as it is stored
    assert len(ranks) == 1 and not any("experts" in name for name in kept)
    most = max(len(alive - kept) for alive in reader.seen)
    assert most <= 2 * EXPERTS_AT_ONCE + 8  # codes and scales; a layer has 274 tensors
    assert len(reader.made) == len(reader.entries) > 750


def test_progress_tells_bytes_and_no_files(config: ModelConfig) -> None:
    steps: list[LoadStep] = []
    reader = SyntheticReader(config)
    load_ranks(reader, [CPU], source=reader, on_progress=steps.append)
    total = sum(spec.nbytes for spec in reader.entries.values())
    assert len(steps) > 100
    assert (steps[-1].done_bytes, steps[-1].total_bytes) == (total, total)
    assert {(step.shard, step.n_shard, step.n_shards) for step in steps} == {("", 0, 0)}
    assert [step.done_bytes for step in steps] == sorted(step.done_bytes for step in steps)


def test_an_interrupt_frees_what_was_made(config: ModelConfig) -> None:
    reader, steps = Watched(config), list[LoadStep]()

    def stop(step: LoadStep) -> None:
        steps.append(step)
        if len(steps) == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        load_ranks(reader, [CPU], source=reader, on_progress=stop)
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert len(steps) == 100 and len(reader.made) > 400 and reader.alive() == set()


@pytest.mark.gpu
def test_a_gpu_makes_its_weights_itself(config: ModelConfig) -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    reader = SyntheticReader(config, device=device)
    ranks = load_ranks(reader, [device], source=reader)
    held = list(tensors_of(ranks))
    assert {tensor.device for tensor in held} == {device}
    taken = torch.cuda.memory_allocated(device) - before
    assert 0 <= taken - ranks[0].resident_bytes < 1024 * len(held)  # what is allocated is whole 512s

    def stop(step: LoadStep) -> None:
        if 2 * step.done_bytes > step.total_bytes:
            raise KeyboardInterrupt

    del ranks, held
    with pytest.raises(KeyboardInterrupt):
        load_ranks(reader, [device], source=reader, on_progress=stop)
    gc.collect()
    assert torch.cuda.memory_allocated(device) == before
