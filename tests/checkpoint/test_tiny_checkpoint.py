from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4nb.checkpoint.inventory import Drafter
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.errors import CheckpointError
from dsv4nb.testing.tiny_checkpoint import Format, write_tiny_checkpoint
from dsv4nb.weights.packing import unpack_fp4, unpack_fp8, unpack_nvfp4


def tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize("fmt", ["fp8fp4", "nvfp4"])
def test_all_formats_hold_the_numbers_of_the_plain_one(fmt: Format, tmp_path: Path) -> None:
    plain = tensors(write_tiny_checkpoint(tmp_path / "plain", drafter="dspark", fmt="bf16", seed=5))
    packed = tensors(write_tiny_checkpoint(tmp_path / "packed", drafter="dspark", fmt=fmt, seed=5))
    for name, expected in plain.items():
        found = packed[name]
        base = name.removesuffix("weight")
        if base + "weight_scale" in packed:
            found = unpack_nvfp4(found, packed[base + "weight_scale"], packed[base + "weight_scale_2"]).bfloat16()
        elif found.dtype == torch.int8:
            found = unpack_fp4(found, packed[base + "scale"]).bfloat16()
        elif found.dtype == torch.float8_e4m3fn:
            found = unpack_fp8(found, packed[base + "scale"]).bfloat16()
        assert torch.equal(found, expected), name


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    a, b, c = (
        {k: v.view(torch.uint8) for k, v in tensors(write_tiny_checkpoint(tmp_path / n, seed=s)).items() if v.ndim}
        for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])


@pytest.mark.parametrize(("drafter", "n_shards"), [("none", 2), ("nextn", 3), ("dspark", 3)])
def test_has_an_index_and_a_few_shards(drafter: Drafter, n_shards: int, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, drafter=drafter)
    assert len(list(folder.glob("*.safetensors"))) == n_shards
    assert open_checkpoint(folder, require_tokenizer=False).drafter == drafter


def test_overrides_are_fields_of_the_config(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(
        tmp_path, n_routed_experts=5, num_hidden_layers=2, num_hash_layers=1, compress_ratios=[4, 128]
    )
    config = open_checkpoint(folder, require_tokenizer=False).config
    assert (config.n_routed_experts, config.kind(0), config.kind(1)) == (5, "csa", "hca")
    with pytest.raises(CheckpointError, match="unknown field n_experts"):
        write_tiny_checkpoint(tmp_path / "x", n_experts=5)


def test_routing_tables_name_distinct_experts(tmp_path: Path) -> None:
    table = tensors(write_tiny_checkpoint(tmp_path))["layers.2.ffn.gate.tid2eid"]
    assert table.shape == (512, 2)
    assert 0 <= table.min() < table.max() < 8
    assert (table[:, 0] != table[:, 1]).all()
