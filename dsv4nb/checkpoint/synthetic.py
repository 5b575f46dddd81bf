"""Shapes of made-up checkpoints: their configs in both official spellings, and how their tensors fall into files.

    flash        DeepSeek-V4-Flash, the preview with its NextN block
    flash-0731   DeepSeek-V4-Flash-0731, with its DSpark drafter
    tiny         every kind of layer and of router in 6 MB
    tiny-0731    the same with a DSpark drafter

Any field can be changed. What depends on another one follows it unless it is given too: the ratios, hash layers and
taps follow `num_hidden_layers`, the choices of a token `n_routed_experts`, the noise token `vocab_size`. The numbers
are made by `dsv4nb.weights.synthetic`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from dsv4nb.checkpoint.config import DSPARK_STAGES
from dsv4nb.checkpoint.fields import Fields
from dsv4nb.checkpoint.inventory import Drafter, ExpertFormat
from dsv4nb.checkpoint.names import parse_name
from dsv4nb.errors import RequestError

Format = Literal["fp8fp4", "bf16", "nvfp4", "fp8"]
EXPERT_FORMATS: Mapping[Format, ExpertFormat] = {"fp8fp4": "fp4", "bf16": "bf16", "nvfp4": "nvfp4", "fp8": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape.

    Attributes:
        fields: of config.json, beside those of every checkpoint.
        dspark: the four `dspark_*` fields, without the prefix; the taps are the last three layers.
    """

    drafter: Drafter
    fields: Mapping[str, Any]
    dspark: Mapping[str, Any]


_FLASH = {
    "head_dim": 512,
    "hidden_size": 4096,
    "index_n_heads": 64,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "swiglu_limit": 10.0,
    "vocab_size": 129280,
}
_FLASH_DSPARK = {"block_size": 5, "markov_rank": 256, "noise_token_id": 128799}
_TINY = {
    "head_dim": 128,
    "hidden_size": 256,
    "index_n_heads": 32,
    "index_topk": 16,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 7,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "swiglu_limit": 1.5,  # so low that it is reached
    "vocab_size": 512,
}
_TINY_DSPARK = {"block_size": 5, "markov_rank": 32, "noise_token_id": 500}

SHAPES: Mapping[str, Shape] = {
    "flash": Shape(drafter="nextn", fields=_FLASH, dspark=_FLASH_DSPARK),
    "flash-0731": Shape(drafter="dspark", fields=_FLASH, dspark=_FLASH_DSPARK),
    "tiny": Shape(drafter="none", fields=_TINY, dspark=_TINY_DSPARK),
    "tiny-0731": Shape(drafter="dspark", fields=_TINY, dspark=_TINY_DSPARK),
}

_EVERYWHERE: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
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
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
}
_QUANTIZATION: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
_HASH_LAYERS = 3


def hf_config(
    shape: str,
    changes: Mapping[str, Any] = MappingProxyType({}),
    *,
    drafter: Drafter | None = None,
    fmt: Format = "fp8fp4",
) -> dict[str, Any]:
    """Return the config.json of a shape.

    Args:
        shape: a name of `SHAPES`.
        changes: fields with another value, e.g. `{"num_hidden_layers": 4}`; only what others follow is looked at here,
            `from_hf` checks all of them.
        drafter: another one than the shape's.
        fmt: of the weights; "fp8fp4" is that of the releases.

    Raises:
        RequestError: there is no such shape.
        CheckpointError: a count that others follow is none.
    """
    if shape not in SHAPES:
        raise RequestError(f"there is no shape {shape!r}; there are {', '.join(SHAPES)}", param="shape")
    chosen = SHAPES[shape]
    drafter = drafter or chosen.drafter
    fields = {**_EVERYWHERE, **chosen.fields, "expert_dtype": "fp4" if fmt in ("fp8fp4", "nvfp4") else fmt}
    if fmt != "bf16":
        fields["quantization_config"] = dict(_QUANTIZATION)
    given = Fields(fields | dict(changes), "the changed config")
    layers, experts = given.integer("num_hidden_layers"), given.integer("n_routed_experts")
    blocks = {"none": 0, "nextn": 1, "dspark": DSPARK_STAGES}[drafter]
    fields |= {
        "compress_ratios": [*_ratios(layers), *[0] * blocks],
        "num_experts_per_tok": min(fields["num_experts_per_tok"], experts),
        "num_hash_layers": min(_HASH_LAYERS, layers),
        "num_nextn_predict_layers": min(blocks, 1),  # that of the DSpark releases says 1 too
    }
    if drafter == "dspark":
        fields |= {f"dspark_{name}": value for name, value in chosen.dspark.items()}
        fields["dspark_noise_token_id"] = min(fields["dspark_noise_token_id"], given.integer("vocab_size") - 1)
        fields["dspark_target_layer_ids"] = list(range(max(layers - 3, 0), layers))
    return dict(sorted((fields | dict(changes)).items()))


def inference_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same facts in the spelling of inference/config.json."""
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


def official_shard(name: str) -> tuple[int, int]:
    """Return a key of the file that tensor `name` is in, in order: embed, each layer, the head, each drafter block."""
    where = parse_name(name)
    if where.layer is None:
        return (0, 0) if name == "embed.weight" else (2, 0)
    return (1 if where.stack == "layers" else 3, where.layer)


def field_change(text: str) -> tuple[str, Any]:
    """Read one of `changes` from a command line: FIELD=VALUE, the value as JSON.

    Raises:
        argparse.ArgumentTypeError: it is not that.
    """
    field, is_there, value = text.partition("=")
    try:
        return field, json.loads(value)
    except json.JSONDecodeError:
        wanted = "JSON after the =" if is_there else "FIELD=VALUE"
        raise argparse.ArgumentTypeError(f"{text!r} must have {wanted}, as in hidden_size=512") from None


def _ratios(layers: int) -> list[int]:
    """Two layers with the window alone, then ratios 4 and 128 in turn: V4-Flash has 43."""
    return [0, 0, *[4, 128] * layers][:layers]
