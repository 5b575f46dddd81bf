"""A drafter in kernel layout: the codes of the files, and what is said of one that cannot be run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.errors import DamagedCheckpoint, NotEnoughMemory
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.weights.draft_layout import draft_limit
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.packing import unpack_fp8
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.reader import Reader
from dsv4nb.weights.store import tensors_of
from dsv4nb_kernels import bf16_rows, fp8_rows
from dsv4nb_kernels._expert_weights import unpack_down

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "compress_ratios": [0, 0, 0, 0],
    "num_hidden_layers": 1,
    "num_hash_layers": 1,
    "dspark_noise_token_id": 60,
    "dspark_target_layer_ids": [0],
    "n_routed_experts": 4,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def toy() -> Checkpoint:
    return open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")


def small(folder: Path, **overrides: Any) -> Checkpoint:
    written = write_tiny_checkpoint(folder, drafter="dspark", **SMALL | overrides)
    return open_checkpoint(written, require_tokenizer=False)


def change(checkpoint: Checkpoint, name: str, values: Any) -> Checkpoint:
    """Write `checkpoint` anew with another tensor in the place of one."""
    shard = checkpoint.entries[name].file
    tensors = load_file(shard)
    tensors[name] = values(tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})
    return open_checkpoint(checkpoint.path, require_tokenizer=False)


def bytes_of(stored: torch.Tensor, value: int) -> torch.Tensor:
    """Put one byte that is no number, or too large a one, into a tensor."""
    changed = stored.clone()
    changed.view(torch.uint8)[-1, -1] = value
    return changed


def test_everything_of_a_drafter_is_that_of_the_file(toy: Checkpoint) -> None:
    wanted = load_weights(toy).drafter
    (rank,) = load_ranks(toy, [CPU], drafter=True)
    draft = rank.draft
    assert wanted is not None and draft is not None and rank.draft_fault == ""
    assert torch.equal(unpack_fp8(*fp8_rows.unpack(draft.main)), wanted.main.weight)
    with Reader(toy.entries) as reader:
        stored = reader.read("mtp.0.main_proj.weight").view(torch.uint8)
        assert torch.equal(fp8_rows.unpack(draft.main)[0].view(torch.uint8), stored)
        for stage, layer in enumerate(draft.stages):
            (codes, _), _ = unpack_down(layer.experts.down)
            assert torch.equal(codes[5, :, :64], reader.read(f"mtp.{stage}.ffn.experts.5.w2.weight").view(torch.uint8))
    for ours, theirs in zip(draft.stages, wanted.stages, strict=True):
        assert (ours.kind, ours.ratio) == ("swa", 0)
        assert torch.equal(ours.attention.kv_norm, theirs.attention.kv_norm)
        assert torch.equal(ours.hyper_experts.fn, theirs.hyper_experts.fn)
    for name in ("fn", "base", "norm"):
        assert torch.equal(getattr(draft.hyper_head, name), getattr(wanted.hyper_head, name))
    for name in ("main_norm", "markov_in", "markov_out", "confidence"):
        assert torch.equal(getattr(draft, name).float(), getattr(wanted, name)), name
    assert draft.markov_out.dtype == torch.bfloat16


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_read_where_it_is_wanted_and_every_tensor_once(toy: Checkpoint, ranks: int) -> None:
    steps: list[LoadStep] = []
    both = load_ranks(toy, [CPU] * ranks, drafter=True, on_progress=steps.append)
    told = [step.done_bytes for step in steps]
    assert told == sorted(set(told))
    assert steps[-1].done_bytes == steps[-1].total_bytes == sum(entry.nbytes for entry in toy.entries.values())
    assert [rank.draft is None for rank in both] == [False, True][:ranks]
    for rank in load_ranks(toy, [CPU] * ranks):
        assert rank.draft is None and rank.draft_fault == ""


def test_the_first_of_two_ranks_has_it_whole_and_the_head_once(toy: Checkpoint) -> None:
    (alone,) = load_ranks(toy, [CPU], drafter=True)
    first, second = load_ranks(toy, [CPU, CPU], drafter=True)
    assert alone.draft is not None and first.draft is not None
    assert first.draft.shapes == alone.draft.shapes == alone.shapes
    pairs = list(zip(tensors_of(first.draft), tensors_of(alone.draft), strict=True))
    assert len(pairs) > 40 and all(torch.equal(one, other) for one, other in pairs)
    assert first.draft.embed is first.embed
    halves = [bf16_rows.unpack(rank.head) for rank in (first, second)]
    assert torch.equal(torch.cat(halves), bf16_rows.unpack(alone.head))
    assert first.head.words.data_ptr() == first.draft.head.words.data_ptr()
    assert first.head.words.nbytes == second.head.words.nbytes == first.draft.head.words.nbytes // 2
    plain = load_ranks(toy, [CPU, CPU])
    own = sum(t.nbytes for t in tensors_of(replace(first.draft, embed=first.embed[:0]))) - first.head.words.nbytes
    assert first.resident_bytes == plain[0].resident_bytes + own
    assert second.resident_bytes == plain[1].resident_bytes


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("mtp.0.main_norm.weight", lambda t: t * torch.nan, "mtp.0.main_norm.weight is not finite"),
        ("mtp.2.hc_ffn_base", lambda t: t / 0, "mtp.2.hc_ffn_base is not finite"),
        ("mtp.1.attn.wkv.scale", lambda t: bytes_of(t, 0xFF), "mtp.1.attn.wkv.weight is not finite"),
        ("mtp.0.main_proj.weight", lambda t: bytes_of(t, 0x7F), "mtp.0.main_proj.weight is not finite"),
        ("mtp.2.ffn.experts.1.w1.scale", lambda t: bytes_of(t, 0xFF), "mtp.2.ffn.experts.1.w1.weight is not finite"),
        ("mtp.0.main_proj.scale", lambda t: bytes_of(t, 250), "it cannot be packed: scale_bytes"),
    ],
)
def test_a_drafter_that_cannot_run_is_left_out_and_named(tmp_path: Path, name: str, spoil: Any, told: str) -> None:
    checkpoint = change(small(tmp_path), name, spoil)
    (rank,) = load_ranks(checkpoint, [CPU], drafter=True)
    assert rank.draft is None and told in rank.draft_fault
    assert len(rank.layers) == 1


def test_the_first_gpu_must_have_room_for_all_of_it(toy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[LoadStep] = []
    load_ranks(toy, [CPU, CPU], drafter=True, on_progress=steps.append)
    (_, first), (_, second) = steps[-1].placed
    stored = sum(entry.nbytes for name, entry in toy.entries.items() if name.startswith("mtp."))
    assert first - second == stored + toy.entries["head.weight"].nbytes // 2
    rooms = {torch.device("cuda:0"): first - 1, torch.device("cuda:1"): second}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (rooms[device], first))
    with pytest.raises(NotEnoughMemory, match=r"as it is stored, on cuda:0"):  # before a tensor is sent anywhere
        load_ranks(toy, list(rooms), drafter=True)


def test_a_head_without_a_drafter_keeps_no_more_than_its_rows(tmp_path: Path) -> None:
    checkpoint = change(small(tmp_path), "mtp.0.main_norm.weight", lambda t: t * torch.nan)
    both = load_ranks(checkpoint, [CPU, CPU], drafter=True)
    assert [rank.draft for rank in both] == [None, None]
    assert all("mtp.0.main_norm.weight is not finite" in rank.draft_fault for rank in both)
    for rank in both:
        assert rank.head.words.untyped_storage().nbytes() == rank.head.words.nbytes == 2 * 32 * rank.head.k


def test_sizes_that_the_kernels_do_not_draft_with_are_named_and_nothing_is_read(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dspark_markov_rank=24)
    steps: list[LoadStep] = []
    (rank,) = load_ranks(checkpoint, [CPU], drafter=True, on_progress=steps.append)
    assert rank.draft is None
    assert rank.draft_fault == "dspark_markov_rank is 24; the GPU engine runs 16, 32, 64, 128, 256 and 512"
    assert steps[-1].total_bytes == sum(e.nbytes for name, e in checkpoint.entries.items() if name[:3] != "mtp")
    config = checkpoint.config
    assert config.dspark is not None
    fitting = replace(config, dspark=replace(config.dspark, markov_rank=32))
    assert draft_limit(fitting) == ""
    odd = replace(fitting, vocab_size=96)
    assert draft_limit(odd) == "vocab_size is 96; the GPU engine drafts from multiples of 64"
    wide = replace(config, dspark=replace(config.dspark, block_size=9))
    assert draft_limit(wide) == "dspark_block_size is 9; the GPU engine drafts up to 8"


def test_a_file_that_ends_early_is_no_fault_of_the_drafter(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    last = max((e for name, e in checkpoint.entries.items() if name.startswith("mtp.1.")), key=lambda e: e.offset)
    os.truncate(last.file, last.offset + last.nbytes - 1)
    told = f"{last.name} needs {last.nbytes} bytes, {last.nbytes - 1} are there"
    with pytest.raises(DamagedCheckpoint, match=told):
        load_ranks(checkpoint, [CPU], drafter=True)
