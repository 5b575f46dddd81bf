"""Checkpoint → weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.errors import CheckpointError, NotEnoughMemory
from dsv4nb.testing.tiny_checkpoint import Format, write_tiny_checkpoint
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.store import Matrix

SHAPE: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "n_routed_experts": 3,
}


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, require_tokenizer=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("loader") / "fp8fp4", **SHAPE)


def walk(value: object, name: str = "weights") -> Iterator[tuple[str, Tensor | Matrix]]:
    if isinstance(value, Tensor | Matrix):
        yield name, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from walk(item, f"{name}[{i}]")
    elif is_dataclass(value):
        for field in fields(value):
            yield from walk(getattr(value, field.name), f"{name}.{field.name}")


def numbers(value: Tensor | Matrix) -> Tensor:
    return value.weight if isinstance(value, Matrix) else value


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_every_format_of_the_same_numbers_loads_the_same_weights(folder: Path, tmp_path: Path, fmt: Format) -> None:
    packed = dict(walk(load_weights(opened(folder))))
    other = dict(walk(load_weights(opened(write_tiny_checkpoint(tmp_path, fmt=fmt, **SHAPE)))))
    assert packed.keys() == other.keys()
    for name, value in packed.items():
        assert torch.equal(numbers(value), numbers(other[name])), name


def test_remembers_which_products_round_their_input(folder: Path, tmp_path: Path) -> None:
    packed = load_weights(opened(folder)).layers[1]
    plain = load_weights(opened(write_tiny_checkpoint(tmp_path, fmt="bf16", **SHAPE))).layers[1]
    for layer, is_fp8 in ((packed, True), (plain, False)):
        assert layer.attention.indexer is not None
        matrices = [layer.attention.down, layer.attention.query, layer.attention.out, layer.attention.indexer.query]
        assert {m.is_fp8 for m in matrices} | {layer.experts.is_fp8} == {is_fp8}


def test_lays_out_what_the_engine_expects(folder: Path) -> None:
    checkpoint = opened(folder)
    config, weights = checkpoint.config, load_weights(checkpoint)
    assert [layer.kind for layer in weights.layers] == ["swa", "csa", "hca"]
    hashed, picked, pooled = weights.layers
    assert hashed.experts.table is not None and hashed.experts.bias is None
    assert picked.experts.table is None and picked.experts.bias is not None
    assert picked.experts.gate.shape == (8, config.hidden_size)
    assert picked.experts.bias[:3].isfinite().all() and (picked.experts.bias[3:] == -torch.inf).all()
    assert picked.experts.up.shape == (4, 2 * config.moe_intermediate_size, config.hidden_size)
    assert hashed.attention.compressor is None and pooled.attention.indexer is None
    assert pooled.attention.compressor is not None
    offset = pooled.attention.compressor.offset
    assert offset.shape == (128, 2 * config.head_dim)
    assert not offset[:, : config.head_dim].any() and offset[:, config.head_dim :].any()
    assert weights.resident_bytes == sum(numbers(value).nbytes for _, value in walk(weights))
    assert {numbers(value).dtype for _, value in walk(weights)} == {torch.float32, torch.int64}


DSPARK = SHAPE | {"compress_ratios": [0, 4, 128, 0, 0, 0], "dspark_target_layer_ids": [0, 1, 2]}


@pytest.mark.parametrize("drafter", [True, False])
def test_reads_the_drafter_when_it_is_wanted_and_reports_progress(tmp_path: Path, drafter: bool) -> None:
    checkpoint = opened(write_tiny_checkpoint(tmp_path, drafter="dspark", **DSPARK))
    read = sum(e.nbytes for name, e in checkpoint.entries.items() if drafter or not name.startswith("mtp."))
    seen: list[LoadStep] = []
    weights = load_weights(checkpoint, drafter=drafter, on_progress=seen.append)
    done = [step.done_bytes for step in seen]
    assert len(seen) > 50 and done == sorted(done) and (done[-1], seen[-1].total_bytes) == (read, read)
    files = {e.file.name for name, e in checkpoint.entries.items() if drafter or not name.startswith("mtp.")}
    assert {step.shard for step in seen} == files
    assert {step.n_shard for step in seen} == set(range(1, seen[0].n_shards + 1))
    held = sum(numbers(value).nbytes for _, value in walk(weights))
    (device, placed) = seen[-1].placed[0]
    assert device == "cpu" and held * 0.9 < placed <= held
    assert (weights.drafter is not None) == drafter and weights.draft_fault == ""
    if weights.drafter is not None:
        config = checkpoint.config
        assert len(weights.drafter.stages) == 3 and weights.drafter.main.weight.shape == (
            config.hidden_size,
            3 * config.hidden_size,
        )
        assert {stage.attention.compressor for stage in weights.drafter.stages} == {None}


@pytest.mark.parametrize(
    "name",
    ["mtp.0.main_norm.weight", "mtp.1.attn.attn_sink", "mtp.2.markov_head.markov_w2.weight", "mtp.2.hc_ffn_base"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_drafter_with_a_number_that_is_none_is_left_out_and_named(tmp_path: Path, name: str, value: float) -> None:
    folder = write_tiny_checkpoint(tmp_path, drafter="dspark", **DSPARK)
    (shard,) = (file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(shard)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, shard, metadata={"format": "pt"})
    weights = load_weights(opened(folder))
    assert weights.drafter is None and weights.draft_fault == f"{name} is not finite"


def test_loads_in_far_less_than_a_second(folder: Path) -> None:
    checkpoint = opened(folder)
    start = time.perf_counter()
    load_weights(checkpoint)
    assert time.perf_counter() - start < 1.0


def test_a_bad_scale_is_named_and_nothing_stays_allocated(tmp_path: Path) -> None:
    checkpoint = opened(write_tiny_checkpoint(tmp_path, **SHAPE))
    name = "layers.2.attn.wq_b"
    file = checkpoint.entries[f"{name}.scale"].file
    tensors = load_file(file)
    tensors[f"{name}.scale"].view(torch.uint8)[0, 0] = 0xFF
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name) as caught:
        load_weights(opened(tmp_path))
    assert caught.value.param == f"{name}.weight"
    trace = caught.value.__traceback__
    while trace is not None:
        held = trace.tb_frame.f_locals.values()
        assert not any(isinstance(value, Tensor) for value in held), trace.tb_frame
        trace = trace.tb_next


def test_refuses_more_than_one_shared_expert(folder: Path) -> None:
    checkpoint = opened(folder)
    config = replace(checkpoint.config, n_shared_experts=2)
    with pytest.raises(CheckpointError, match="n_shared_experts is 2"):
        load_weights(replace(checkpoint, config=config))


def test_j19_a_load_that_is_stopped_half_way_leaves_nothing_behind(folder: Path) -> None:
    def stop(step: LoadStep) -> None:
        if step.done_bytes > step.total_bytes / 2:
            raise KeyboardInterrupt

    def held() -> int:
        gc.collect()
        return sum(one.nbytes for one in gc.get_objects() if type(one) is Tensor)

    checkpoint, before = opened(folder), held()
    with pytest.raises(KeyboardInterrupt) as stopped:
        load_weights(checkpoint, on_progress=stop)
    assert stopped.value.__traceback__ is not None and held() == before
    assert load_weights(checkpoint).layers, "and the next one works"


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_read(folder: Path) -> None:
    checkpoint, read = opened(folder), []
    needed = 4 * checkpoint.n_weights
    with pytest.raises(NotEnoughMemory, match=r"GB of memory.*there are 0\.0 GB") as refused:
        load_weights(checkpoint, memory_bytes=needed - 1, on_progress=read.append)
    assert refused.value.code == "memory"
    assert not read
    assert load_weights(checkpoint, memory_bytes=needed).layers
