"""Fields that repeat others in the spelling of `transformers`: they must say the same (model.md 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4nb.checkpoint.fields import Fields

if TYPE_CHECKING:
    from dsv4nb.checkpoint.config import ModelConfig

_LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def check_aliases(f: Fields, c: ModelConfig) -> None:
    """Refuse an alias that is there and disagrees with the field it was made from; raises CheckpointError."""
    if f.has("layer_types"):
        f.fixed("layer_types", [_LAYER_TYPES[r] for r in c.compress_ratios])
    if f.has("mlp_layer_types"):
        hashed = c.num_hash_layers
        f.fixed("mlp_layer_types", ["hash_moe"] * hashed + ["moe"] * (c.num_hidden_layers - hashed))
    if f.has("compress_rates"):
        f.fixed("compress_rates", {_LAYER_TYPES[4]: 4, _LAYER_TYPES[128]: 128})
    if f.has("rope_parameters"):
        both = f.inside("rope_parameters")
        _check_rope(both.inside("main"), "default", c.rope_theta, c)
        _check_rope(both.inside("compress"), "yarn", c.compress_rope_theta, c)
        both.finish({})


def _check_rope(f: Fields, kind: str, theta: float, c: ModelConfig) -> None:
    f.fixed("rope_type", kind)
    expected = {"rope_theta": theta}
    if kind == "yarn":
        expected |= {
            "factor": c.rope_factor,
            "beta_fast": c.beta_fast,
            "beta_slow": c.beta_slow,
            "original_max_position_embeddings": c.original_max_position_embeddings,
        }
    for name, value in expected.items():
        f.require(f.number(name) == value, name, f"{value:g} as in the field it repeats")
    if f.has("partial_rotary_factor"):
        share = c.qk_rope_head_dim / c.head_dim
        f.require(f.number("partial_rotary_factor") == share, "partial_rotary_factor", f"{share:g}")
    # cos and sin are not scaled in this model (T3)
    if f.has("attention_factor"):
        f.fixed("attention_factor", 1.0, 1)
    f.finish({})
