"""Trained parameters → a checkpoint folder in the official layout and formats (model.md section 2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4nb.checkpoint.names import parse_name
from dsv4nb.checkpoint.synthetic import inference_config
from dsv4nb.toy.shape import hf_config
from dsv4nb.weights.packing import pack_fp4, pack_fp8, unpack_fp4, unpack_fp8

_FP8_LEAVES = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj"}
_BF16_LEAVES = {
    "weights_proj", "gate", "embed", "head", "norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "wgate",
    "main_norm", "markov_w1", "markov_w2", "proj",
}  # fmt: skip


def pack(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that hold one parameter on disk: itself, or codes and scales.

    Args:
        name: official tensor name; its path decides the format.
        value: float32, or int64 for the token-id table.
    """
    path = name.split(".")
    if path[-1] != "weight":
        return {name: value.contiguous()}  # float32 and int64 leaves are stored as they are
    owner = path[-2]
    scale_name = f"{name.removesuffix('weight')}scale"
    if "experts" in path:
        codes, scale = pack_fp4(value)
        return {name: codes, scale_name: scale.view(torch.float8_e8m0fnu)}
    if owner in _BF16_LEAVES or "compressor" in path:
        return {name: value.bfloat16()}
    if owner not in _FP8_LEAVES:
        raise ValueError(f"no disk format is known for {name!r}")
    codes, scale = pack_fp8(value)
    return {name: codes, scale_name: scale.view(torch.float8_e8m0fnu)}


def write_checkpoint(folder: Path, parameters: Mapping[str, Tensor], tokenizer_json: str) -> int:
    """Write config, tokenizer, index and shards; return the payload bytes.

    Args:
        parameters: official names, float32 master values; they are rounded to their disk formats here.
    """
    return write_packed(folder, pack_all(parameters), tokenizer_json)


def pack_all(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on disk of all parameters."""
    packed: dict[str, Tensor] = {}
    for name in sorted(parameters):
        packed |= pack(name, parameters[name])
    return packed


def write_packed(folder: Path, packed: Mapping[str, Tensor], tokenizer_json: str) -> int:
    """Write a checkpoint of tensors in their disk formats; as `write_checkpoint`. A drafter is one with `mtp.*`."""
    (folder / "inference").mkdir(parents=True, exist_ok=True)
    groups: dict[str, dict[str, Tensor]] = {"layers": {}, "top": {}, "mtp": {}}
    for name, tensor in packed.items():
        groups[parse_name(name).stack][name] = tensor.contiguous()
    shards = [tensors for tensors in groups.values() if tensors]
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(t.numel() * t.element_size() for t in packed.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    config = hf_config(drafter=bool(groups["mtp"]))
    _write_json(folder / "config.json", config)
    _write_json(folder / "inference" / "config.json", inference_config(config))
    # the answers are facts and sums: the default is the most likely one
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.0, "top_p": 1.0}
    )
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return total


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def rounded(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a reader of the checkpoint would get back, as float32: for comparing before and after export."""
    out: dict[str, Tensor] = {}
    for name, value in parameters.items():
        disk = pack(name, value)
        if len(disk) == 1:
            held = disk[name]
            out[name] = held if held.dtype == torch.int64 else held.float()
        else:
            codes, scale = disk.values()
            scale = scale.view(torch.uint8)
            out[name] = unpack_fp4(codes, scale) if "experts" in name.split(".") else unpack_fp8(codes, scale)
    return out
