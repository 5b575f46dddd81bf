"""Checkpoint → weights in kernel layout: the codes of the files, filled up with zeros."""

from __future__ import annotations

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.errors import CheckpointError, NotEnoughMemory, RequestError
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.weights import kernel_layout, rank_loader
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb.weights.reader import Reader
from dsv4nb.weights.store import Weights
from dsv4nb_kernels import bf16_rows, fp8_rows
from dsv4nb_kernels._expert_weights import unpack_down, unpack_up
from dsv4nb_kernels.fp8_rows import Fp8Matrix

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Checkpoint:
    return open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")


@pytest.fixture(scope="module")
def packed(toy: Checkpoint) -> RankWeights:
    return load_ranks(toy, [CPU])[0]


@pytest.fixture(scope="module")
def plain(toy: Checkpoint) -> Weights:
    return load_weights(toy, drafter=False)


def numbers(matrix: Fp8Matrix) -> Tensor:
    return unpack_fp8(*fp8_rows.unpack(matrix))


def corner(found: Tensor, wanted: Tensor) -> bool:
    """Whether `wanted` stands in the first rows and columns of `found`, and zeros everywhere else."""
    rest = found.clone()
    rest[: wanted.shape[0], : wanted.shape[1]] -= wanted
    return not bool(rest.any())


@pytest.mark.parametrize("number", range(6))
def test_every_matrix_is_that_of_the_file_and_zeros(packed: RankWeights, plain: Weights, number: int) -> None:
    ours, theirs = packed.layers[number], plain.layers[number]
    assert (ours.kind, ours.ratio) == (theirs.kind, theirs.ratio)
    attention, wanted = ours.attention, theirs.attention
    down = numbers(attention.down)
    # the low query twice as large, in four times as many columns
    assert corner(down[:512], 2 * wanted.down.weight[:128])
    assert torch.equal(down[512:], wanted.down.weight[128:])
    assert torch.equal(attention.q_norm[:128], wanted.q_norm / 2)
    assert not attention.q_norm[128:].any()
    assert corner(numbers(attention.query), wanted.query.weight)
    assert corner(numbers(attention.groups), torch.cat(wanted.groups))
    assert corner(numbers(attention.out), wanted.out.weight)
    assert torch.equal(attention.sink[:4], wanted.sink)
    if wanted.compressor is not None and attention.compressor is not None:
        assert torch.equal(bf16_rows.unpack(attention.compressor.source).float(), wanted.compressor.source)
        assert torch.equal(attention.compressor.offset, wanted.compressor.offset)
    if wanted.indexer is not None and attention.indexer is not None:
        assert corner(numbers(attention.indexer.query), wanted.indexer.query.weight)
        heads = bf16_rows.unpack(attention.indexer.heads).float() * 128**-0.5 * 4**-0.5
        assert torch.allclose(heads[:4], wanted.indexer.heads, rtol=1e-6)
        assert not heads[4:].any()
        assert attention.sources is not None and attention.compressor is not None
        parts = attention.compressor.source, attention.indexer.compressor.source, attention.indexer.heads
        together = torch.cat([bf16_rows.unpack(part) for part in parts])
        assert torch.equal(bf16_rows.unpack(attention.sources), together)
        assert {part.words.untyped_storage().data_ptr() for part in parts} == {attention.sources.words.data_ptr()}
    assert (attention.compressor is None, attention.indexer is None) == (
        wanted.compressor is None,
        wanted.indexer is None,
    )


@pytest.mark.parametrize("number", [0, 3])
def test_experts_keep_the_codes_of_the_file(toy: Checkpoint, packed: RankWeights, plain: Weights, number: int) -> None:
    experts, wanted = packed.layers[number].experts, plain.layers[number].experts
    gate, up, shared_gate, shared_up = unpack_up(experts.up)
    (down, _), shared_down = unpack_down(experts.down)
    with Reader(toy.entries) as reader:
        for expert in range(8):
            name = f"layers.{number}.ffn.experts.{expert}."
            for (codes, scales), leaf in ((gate, "w1"), (up, "w3")):
                assert torch.equal(codes[expert, :128], reader.read(f"{name}{leaf}.weight").view(torch.uint8))
                assert torch.equal(scales[expert, :128], reader.read(f"{name}{leaf}.scale"))
                assert not codes[expert, 128:].any()
            assert torch.equal(down[expert, :, :64], reader.read(f"{name}w2.weight").view(torch.uint8))
            assert not down[expert, :, 64:].any()
    assert corner(unpack_fp8(*shared_gate), wanted.up[-1][:128])
    assert corner(unpack_fp8(*shared_up), wanted.up[-1][128:])
    assert corner(unpack_fp8(*shared_down), wanted.down[-1])
    assert corner(bf16_rows.unpack(experts.gate).float(), wanted.gate[:8])
    if wanted.table is not None and experts.table is not None:
        assert torch.equal(experts.table.long(), wanted.table)
    assert (experts.table is None) == (wanted.table is None)
    if wanted.bias is not None and experts.bias is not None:
        assert torch.equal(experts.bias[:8], wanted.bias[:8])
        assert bool((experts.bias[8:] == -torch.inf).all())


def test_boundaries_embedding_and_head_are_those_of_the_file(packed: RankWeights, plain: Weights) -> None:
    assert torch.equal(packed.embed.float(), plain.embed)
    assert torch.equal(bf16_rows.unpack(packed.head).float(), plain.head)
    assert torch.equal(packed.hyper_head.fn, plain.hyper_head.fn)
    assert torch.equal(packed.hyper_head.scale, plain.hyper_head.scale.expand(4))
    for ours, theirs in zip(packed.layers, plain.layers, strict=True):
        for name in ("hyper_attention", "hyper_experts"):
            for field in ("fn", "scale", "base", "norm"):
                assert torch.equal(getattr(getattr(ours, name), field), getattr(getattr(theirs, name), field))


def test_a_wider_low_query_has_the_mean_of_its_own_columns(packed: RankWeights, plain: Weights) -> None:
    x, eps = torch.randn(256), 1e-6
    low = numbers(packed.layers[2].attention.down)[:512] @ x
    own = plain.layers[2].attention.down.weight[:128] @ x
    norm = packed.layers[2].attention.q_norm * (low * torch.rsqrt(low.square().mean() + eps))
    wanted = plain.layers[2].attention.q_norm * (own * torch.rsqrt(own.square().mean() + eps))
    assert torch.allclose(norm[:128], wanted, rtol=1e-5)


def test_each_tensor_is_read_once_and_told(toy: Checkpoint) -> None:
    steps: list[LoadStep] = []
    load_ranks(toy, [CPU], on_progress=steps.append)
    trunk = [entry for name, entry in toy.entries.items() if not name.startswith("mtp.")]
    told = [step.done_bytes for step in steps]
    assert told == sorted(set(told)) and len(told) > 100
    assert told[-1] == steps[-1].total_bytes == sum(entry.nbytes for entry in trunk)


def test_a_load_that_fails_keeps_nothing(toy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    pack = rank_loader.pack_layer

    def watched(*args: Any, **options: Any) -> Any:
        layers = pack(*args, **options)
        alive.extend(weakref.ref(layer.experts.up.routed) for layer in layers)
        return layers

    def stop(step: LoadStep) -> None:
        if len(alive) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(rank_loader, "pack_layer", watched)
    with pytest.raises(KeyboardInterrupt) as caught:
        load_ranks(toy, [CPU], on_progress=stop)
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fmt": "nvfp4"}, "stored as nvfp4; the GPU engine runs FP4"),
        ({"fmt": "bf16"}, "stored as bf16; the GPU engine runs FP4"),
        ({"index_topk": 16}, "index_topk is 16"),
    ],
)
def test_other_formats_and_sizes_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], told: str
) -> None:
    small: dict[str, Any] = {"compress_ratios": [4], "num_hidden_layers": 1, "num_hash_layers": 1, **options}
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path, **small), require_tokenizer=False)
    monkeypatch.setattr(rank_loader, "FileParts", None)
    with pytest.raises(CheckpointError, match=told):
        load_ranks(checkpoint, [CPU])


@pytest.fixture(scope="module")
def halves(toy: Checkpoint) -> tuple[RankWeights, ...]:
    return load_ranks(toy, [CPU, CPU])


@pytest.mark.parametrize("number", [0, 2, 3])
def test_two_ranks_have_halves_of_what_is_large(halves: tuple[RankWeights, ...], plain: Weights, number: int) -> None:
    wanted, parts = plain.layers[number], [rank.layers[number] for rank in halves]
    query, low, out = (
        [numbers(getattr(part.attention, name)) for part in parts] for name in ("query", "groups", "out")
    )
    rows = 2 * 128  # two heads of four, and one group of two
    assert all(corner(q, w) for q, w in zip(query, wanted.attention.query.weight.split(rows), strict=True))
    assert all(corner(g, w) for g, w in zip(low, wanted.attention.groups, strict=True))
    assert all(corner(o, w) for o, w in zip(out, wanted.attention.out.weight.split(64, 1), strict=True))
    assert torch.equal(torch.cat([part.attention.sink[:2] for part in parts]), wanted.attention.sink)
    for rank, part in enumerate(parts):
        gate, up, shared_gate, shared_up = unpack_up(part.experts.up)
        down, shared_down = unpack_down(part.experts.down)
        mine = slice(64 * rank, 64 * rank + 64)
        for expert in range(8):
            both = wanted.experts.up[expert].split(128)
            for found, theirs in zip((gate, up), both, strict=True):
                assert corner(unpack_fp4(found[0][expert], found[1][expert]), theirs[mine])
            assert corner(unpack_fp4(down[0][expert], down[1][expert]), wanted.experts.down[expert][:, mine])
        for shared, theirs in zip((shared_gate, shared_up), wanted.experts.up[-1].split(128), strict=True):
            assert corner(unpack_fp8(*shared), theirs[mine])
        assert corner(unpack_fp8(*shared_down), wanted.experts.down[-1][:, mine])


def test_two_ranks_have_what_is_small_whole(halves: tuple[RankWeights, ...], packed: RankWeights) -> None:
    assert torch.equal(torch.cat([bf16_rows.unpack(rank.head) for rank in halves]), bf16_rows.unpack(packed.head))
    for rank in halves:
        assert torch.equal(rank.embed, packed.embed)
        assert torch.equal(rank.hyper_head.fn, packed.hyper_head.fn)
        for ours, theirs in zip(rank.layers, packed.layers, strict=True):
            assert torch.equal(ours.attention.down.words, theirs.attention.down.words)
            assert torch.equal(ours.experts.gate.words, theirs.experts.gate.words)
            assert torch.equal(ours.hyper_experts.fn, theirs.hyper_experts.fn)
            if ours.attention.indexer is not None and theirs.attention.indexer is not None:
                assert torch.equal(ours.attention.indexer.query.words, theirs.attention.indexer.query.words)
                assert torch.equal(ours.attention.indexer.heads.words, theirs.attention.indexer.heads.words)


def test_two_ranks_read_each_tensor_once(toy: Checkpoint) -> None:
    steps: list[LoadStep] = []
    load_ranks(toy, [CPU, CPU], on_progress=steps.append)
    trunk = [entry for name, entry in toy.entries.items() if not name.startswith("mtp.")]
    told = [step.done_bytes for step in steps]
    assert told == sorted(set(told))
    assert told[-1] == sum(entry.nbytes for entry in trunk)
    (_, first), (_, second) = steps[-1].placed
    assert first == second == 6_185_532


def test_a_second_rank_that_fails_leaves_nothing_of_the_first(toy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    pack = kernel_layout.pack_routed_up

    def watched(*args: Any) -> Any:
        if len(alive) == 3:  # of the second layer's second rank
            raise torch.OutOfMemoryError("no room on the second GPU")
        packed = pack(*args)
        alive.append(weakref.ref(packed))
        return packed

    monkeypatch.setattr(kernel_layout, "pack_routed_up", watched)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        load_ranks(toy, [CPU, CPU])
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in alive] == [None] * 3


def test_numbers_of_ranks_that_do_not_divide_the_model_are_refused(
    toy: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_loader, "FileParts", None)
    with pytest.raises(RequestError, match="o_groups is 2: 2 groups of heads do not divide into 3 ranks"):
        load_ranks(toy, [CPU] * 3)


def test_a_damaged_scale_is_named_with_its_layer(toy: Checkpoint, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(toy.path, damaged)
    entry = toy.entries["layers.1.attn.wo_b.scale"]
    with (damaged / entry.file.name).open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff" * entry.nbytes)
    with pytest.raises(CheckpointError, match=r"layers.1 cannot be packed: .*e8m0 byte is at most 240.* got 255"):
        load_ranks(open_checkpoint(damaged), [CPU])


def test_weights_larger_than_the_gpu_are_refused_before_anything_is_read(
    toy: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 2_000_000))
    monkeypatch.setattr(rank_loader, "FileParts", None)
    with pytest.raises(NotEnoughMemory, match=r"as it is stored, on cuda:0; there are 0\.0 GB"):
        load_ranks(replace(toy), [torch.device("cuda:0")])


def test_each_gpu_must_have_room_for_its_half(toy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    half = 6_185_532  # as `test_two_ranks_read_each_tensor_once` finds it placed
    rooms = {torch.device("cuda:0"): half, torch.device("cuda:1"): half - 1}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (rooms[device], 2 * half))
    monkeypatch.setattr(rank_loader, "FileParts", None)
    with pytest.raises(NotEnoughMemory, match=r"as it is stored, on cuda:1"):
        load_ranks(toy, list(rooms))
