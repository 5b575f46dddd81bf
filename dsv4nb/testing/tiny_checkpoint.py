"""A small random checkpoint with every kind of layer, in the official layout.

Window, compressed and heavily compressed layers, hash- and score-routed experts, and either drafter.
The numbers are drawn so that clamps fire and no sublayer dominates. All formats of one seed hold the
same numbers: the bf16 one is the exact dequantisation of the FP8/FP4 one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, from_hf
from dsv4nb.checkpoint.headers import INDEX
from dsv4nb.checkpoint.inventory import Drafter, ExpertFormat, Spec, expected_tensors
from dsv4nb.weights.packing import e8m0_to_float, pack_fp4, pack_fp8, unpack_fp4, unpack_fp8

Format = Literal["fp8fp4", "bf16", "nvfp4", "fp8"]

_EXPERTS: Mapping[Format, ExpertFormat] = {"fp8fp4": "fp4", "bf16": "bf16", "nvfp4": "nvfp4", "fp8": "fp8"}

TRUNK_RATIOS = (0, 0, 4, 128, 4, 128, 4)


def write_tiny_checkpoint(
    folder: Path, *, drafter: Drafter = "none", fmt: Format = "fp8fp4", seed: int = 0, **overrides: Any
) -> Path:
    """Write config.json, inference/config.json, an index and two shards, three with a drafter; no tokenizer.

    Args:
        folder: made when it does not exist.
        fmt: "fp8fp4" and "bf16" are the usual ones; "nvfp4" and "fp8" change the routed experts.
        overrides: fields of config.json, e.g. `n_routed_experts=4`.

    Returns:
        `folder`.
    """
    raw = tiny_hf_config(drafter=drafter, fmt=fmt, **overrides)
    (folder / "inference").mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", raw)
    _write_json(folder / "inference" / "config.json", tiny_inference_config(raw))
    tensors = dict(_draw(raw, drafter, fmt, seed))

    middle = raw["num_hidden_layers"] // 2
    shards: list[dict[str, Tensor]] = [{}, {}, {}]
    for name, tensor in tensors.items():
        stack, _, rest = name.partition(".")
        if stack == "layers":
            shards[int(rest.split(".")[0]) >= middle][name] = tensor
        else:
            shards[{"embed": 0, "mtp": 2}.get(stack, 1)][name] = tensor
    shards = [s for s in shards if s]
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return folder


def tiny_hf_config(*, drafter: Drafter = "none", fmt: Format = "fp8fp4", **overrides: Any) -> dict[str, Any]:
    """config.json of the tiny checkpoint; `overrides` replace its fields."""
    n_blocks = {"none": 0, "nextn": 1, "dspark": DSPARK_STAGES}[drafter]
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": [*TRUNK_RATIOS, *[0] * n_blocks],
        "compress_rope_theta": 160000,
        "eos_token_id": 1,
        "expert_dtype": {"bf16": "bf16", "fp8": "fp8"}.get(fmt, "fp4"),
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 256,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 16,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 3,
        "num_hidden_layers": len(TRUNK_RATIOS),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": min(n_blocks, 1),
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 1.5,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": 512,
    }
    if fmt != "bf16":
        raw["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    if drafter == "dspark":
        raw |= {
            "dspark_block_size": 5,
            "dspark_markov_rank": 32,
            "dspark_noise_token_id": 500,
            "dspark_target_layer_ids": [4, 5, 6],
        }
    return raw | overrides


def tiny_inference_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts in the spelling of inference/config.json."""
    rope = raw["rope_scaling"]
    is_dspark = "dspark_block_size" in raw
    return {
        "vocab_size": raw["vocab_size"],
        "dim": raw["hidden_size"],
        "moe_inter_dim": raw["moe_intermediate_size"],
        "n_layers": raw["num_hidden_layers"],
        "n_hash_layers": raw["num_hash_layers"],
        "n_mtp_layers": DSPARK_STAGES if is_dspark else raw["num_nextn_predict_layers"],
        "n_heads": raw["num_attention_heads"],
        "n_routed_experts": raw["n_routed_experts"],
        "n_shared_experts": raw["n_shared_experts"],
        "n_activated_experts": raw["num_experts_per_tok"],
        "score_func": raw["scoring_func"],
        "route_scale": raw["routed_scaling_factor"],
        "swiglu_limit": raw["swiglu_limit"],
        "q_lora_rank": raw["q_lora_rank"],
        "head_dim": raw["head_dim"],
        "rope_head_dim": raw["qk_rope_head_dim"],
        "o_groups": raw["o_groups"],
        "o_lora_rank": raw["o_lora_rank"],
        "window_size": raw["sliding_window"],
        "original_seq_len": rope["original_max_position_embeddings"],
        "rope_theta": raw["rope_theta"],
        "rope_factor": rope["factor"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "compress_rope_theta": raw["compress_rope_theta"],
        "compress_ratios": raw["compress_ratios"],
        "index_n_heads": raw["index_n_heads"],
        "index_head_dim": raw["index_head_dim"],
        "index_topk": raw["index_topk"],
        "hc_mult": raw["hc_mult"],
        "hc_sinkhorn_iters": raw["hc_sinkhorn_iters"],
        "expert_dtype": raw["expert_dtype"],
        "dtype": "fp8" if "quantization_config" in raw else "bf16",
        "scale_fmt": "ue8m0",
        **{k: v for k, v in raw.items() if k.startswith("dspark_")},
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _draw(raw: Mapping[str, Any], drafter: Drafter, fmt: Format, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw every number in one order and write it as the inventory of `fmt` says."""
    generator = torch.Generator().manual_seed(seed)
    wanted = expected_tensors(from_hf(raw), drafter, _EXPERTS[fmt])
    # the matrices that are quantised somewhere, so that all formats draw and round alike
    fp8 = expected_tensors(from_hf({**raw, **_QUANTIZED}), drafter, "fp4")
    for name, spec in wanted.items():
        if name.rpartition(".")[2] in ("scale", "weight_scale", "weight_scale_2", "input_scale"):
            continue
        dtype = fp8[name].dtype
        if dtype == "I64":
            scores = torch.rand(*spec.shape[:1], raw["n_routed_experts"], generator=generator)
            yield name, scores.argsort(1)[:, : spec.shape[1]].contiguous()
            continue
        shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.dtype in ("I8", "U8") else spec.shape
        mean, std = _moments(name, shape)
        x = torch.randn(shape, generator=generator) * std + mean
        if dtype in ("F8_E4M3", "I8"):
            yield from _encode(name, x, is_fp4=dtype == "I8", spec=spec, wanted=wanted)
        else:
            yield name, x.to(torch.bfloat16 if dtype == "BF16" else torch.float32)


_QUANTIZED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def _encode(
    name: str, x: Tensor, *, is_fp4: bool, spec: Spec, wanted: Mapping[str, Spec]
) -> Iterator[tuple[str, Tensor]]:
    base = name.removesuffix("weight")
    codes, scale = pack_fp4(x) if is_fp4 else pack_fp8(x)
    if spec.dtype == "BF16":
        yield name, (unpack_fp4 if is_fp4 else unpack_fp8)(codes, scale).to(torch.bfloat16)
    elif spec.dtype == "U8":
        yield name, codes.view(torch.uint8)
        # e4m3 holds the powers 2**-9 … 2**8, around the middle of which the scales are moved
        yield base + "weight_scale", (e8m0_to_float(scale) * 2.0**6).to(torch.float8_e4m3fn).repeat_interleave(2, -1)
        yield base + "weight_scale_2", torch.tensor(2.0**-6)
        yield base + "input_scale", torch.tensor(1.0)
    elif wanted[base + "scale"].dtype == "F32":
        codes, scale = pack_fp8(unpack_fp4(codes, scale))
        yield name, codes
        yield base + "scale", e8m0_to_float(scale)
    else:
        yield name, codes
        yield base + "scale", scale.view(torch.float8_e8m0fnu)


# mean and standard deviation by the end of the name; a matrix that is not listed keeps the size of its input
_MOMENTS = (
    (r"norm\.weight|enorm\.weight|hnorm\.weight", 1.0, 0.1),
    (r"embed\.weight|markov_w1\.weight|attn_sink", 0.0, 1.0),
    (r"gate\.bias", 0.0, 0.3),
    (r"ape", 0.0, 0.7),
    (r"hc_(attn|ffn|head)_base", 0.0, 0.5),
    (r"hc_(attn|ffn)_scale", 0.8, 0.2),
    (r"hc_head_scale", 0.8, 0.1),
)
# small sublayer outputs keep a flipped rounding local; w1 and w3 reach the clamp
_GAINS = ((r"attn\.wo_b|w2", 0.7), (r"w1|w3", 1.5), (r"head", 2.0))


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    for pattern, mean, std in _MOMENTS:
        if re.search(rf"(^|\.|_)({pattern})$", name):
            return mean, std
    gain = next((g for pattern, g in _GAINS if re.search(rf"(^|\.)({pattern})\.weight$", name)), 1.0)
    return 0.0, gain * shape[-1] ** -0.5
