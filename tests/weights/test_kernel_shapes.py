"""What the kernels' shapes ask of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.errors import CheckpointError
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config
from dsv4nb.weights.kernel_shapes import KernelShapes, filled, kernel_shapes, rank_config

FLASH: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
}


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    return replace(from_hf(tiny_hf_config()), index_topk=32)


def test_the_real_model_is_run_as_it_is(tiny: ModelConfig) -> None:
    assert kernel_shapes(replace(tiny, **FLASH)) == KernelShapes(
        heads=64, groups=8, latent=1024, index_heads=64, experts=256, inner=2048
    )


def test_half_of_the_real_model_is_run_as_it_is(tiny: ModelConfig) -> None:
    half = {**FLASH, "num_attention_heads": 32, "o_groups": 4, "moe_intermediate_size": 1024}
    assert kernel_shapes(replace(tiny, **half)) == KernelShapes(
        heads=32, groups=4, latent=1024, index_heads=64, experts=256, inner=1024
    )


def test_a_rank_of_two_runs_half_of_the_model(tiny: ModelConfig) -> None:
    assert kernel_shapes(replace(tiny, **FLASH), 2) == KernelShapes(
        heads=32, groups=4, latent=1024, index_heads=64, experts=256, inner=1024
    )
    assert rank_config(replace(tiny, **FLASH), 2).num_attention_heads == 32
    with pytest.raises(CheckpointError, match="vocab_size is 129296; the GPU engine runs multiples of 32"):
        kernel_shapes(replace(tiny, **{**FLASH, "vocab_size": 129296}), 2)


def test_a_small_model_is_filled_up_to_whole_tiles(tiny: ModelConfig) -> None:
    shapes = kernel_shapes(replace(tiny, o_lora_rank=64, index_n_heads=4))
    assert shapes == KernelShapes(heads=16, groups=8, latent=512, index_heads=16, experts=16, inner=256)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hc_mult", 2, "hc_mult is 2; the GPU engine runs 4 residual streams"),
        ("hidden_size", 320, "hidden_size is 320; the GPU engine runs multiples of 256"),
        ("head_dim", 64, "head_dim is 64; the GPU engine runs 128, 256 and 512"),
        ("q_lora_rank", 1536, "q_lora_rank is 1536; the GPU engine runs powers of two"),
        ("sliding_window", 100, "sliding_window is 100; the GPU engine runs multiples of 32"),
        ("index_topk", 16, "index_topk is 16; the GPU engine runs multiples of 32 up to 512"),
        ("index_topk", 1024, "index_topk is 1024"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9; the GPU engine runs up to 8"),
        ("expert_dtype", "fp8", "expert_dtype is fp8; the GPU engine runs FP4 experts"),
        ("quantized", False, "runs FP8 projections"),
    ],
)
def test_what_cannot_be_filled_up_is_refused_by_name(tiny: ModelConfig, field: str, value: Any, told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        kernel_shapes(replace(tiny, **{field: value}))
    assert told in str(caught.value)
    assert str(caught.value).endswith("devices='cpu' runs this model")


def test_an_indexer_is_asked_for_only_where_there_is_one(tiny: ModelConfig) -> None:
    ratios = (0, 128, 128, 128, 128, 128, 0)
    assert kernel_shapes(replace(tiny, compress_ratios=ratios, index_topk=16)).heads == 16


def test_filled() -> None:
    assert [filled(size, 16) for size in (0, 1, 16, 17)] == [0, 16, 16, 32]
