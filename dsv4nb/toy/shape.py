"""Dimensions of the bundled model, and its config.json."""

from __future__ import annotations

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig, from_hf

VOCAB_SIZE = 1280

# ratio 0, 4 and 128 twice each; window and top-k are small enough that both bind within a few hundred tokens
RATIOS = (0, 0, 4, 128, 4, 128)

NOISE_TOKEN_ID = 1266  # of `vocabulary.NOISE`: no text has it, its row of the embedding is what training began with

HF: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [*RATIOS, *[0] * DSPARK_STAGES],
    "compress_rope_theta": 160000,
    "dspark_block_size": 5,
    "dspark_markov_rank": 32,
    "dspark_noise_token_id": NOISE_TOKEN_ID,
    "dspark_target_layer_ids": [3, 4, 5],
    # the folder's name does not tell the encoding revision, so it is stated
    "dsv4_reasoning_effort_profile": "official",
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": len(RATIOS),
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
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
    "sliding_window": 64,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}


def hf_config(*, drafter: bool) -> dict[str, object]:
    """Return config.json; without a drafter there are no `dspark_*` keys, as loading asks of such a folder."""
    if drafter:
        return dict(HF)
    return {k: v for k, v in HF.items() if not k.startswith("dspark_")} | {"compress_ratios": [*RATIOS, 0]}


def model_config() -> ModelConfig:
    """Return the parsed form."""
    return from_hf(HF)
