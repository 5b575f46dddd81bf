"""config.json as a typed value, strictly parsed (model.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["swa", "csa", "hca"]  # ratio 0, 4, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """The four `dspark_*` fields."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything of config.json that changes shapes or arithmetic; HF field names.

    Attributes:
        compress_ratios: one per trunk layer: 0, 4 or 128. The tail for the drafter is `drafter_ratios`.
        rope_factor, beta_fast, beta_slow, original_max_position_embeddings: the YaRN fields of `rope_scaling`.
        expert_dtype: format of the routed experts on disk: "fp4", "fp8" or "bf16".
        quantized: whether projections are FP8 with 128x128 scales (False: plain bf16 checkpoint).
        dspark: None when the four keys are absent.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_hash_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    drafter_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    expert_dtype: str
    quantized: bool
    bos_token_id: int
    eos_token_id: int
    dspark: DSparkConfig | None

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of trunk layer `layer`."""
        return {0: "swa", 4: "csa", 128: "hca"}[self.compress_ratios[layer]]  # type: ignore[return-value]

    def is_hashed(self, layer: int) -> bool:
        """Whether trunk layer `layer` routes by the token-id table."""
        return layer < self.num_hash_layers
