"""What the kernels' shapes ask of a model, pure.

The kernels take whole tiles: sixteen heads, 256 columns of a product. A smaller model is filled up with zeros, which
change no bit of its numbers; V4-Flash needs none. Where filling cannot help, the model is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.errors import CheckpointError

HEADS = 16  # heads of one program, of the attention and of the indexer
COLUMNS = 256  # a product's columns come in multiples of this
ROWS = 16  # and its rows in multiples of this
STREAMS = 4
PLACES = 32  # a list of keys is read in splits of this many
TOP_MAX = 512  # entries that a row can pick
CHOICES_MAX = 64  # choices of experts in one forward of eight rows
STEP_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShapes:
    """The sizes of a model as its kernels see it; each is the model's own or filled up.

    Attributes:
        heads: of the attention; groups: of its output projection, each of as many heads as the model's.
        latent: low rank of the query. It is the model's or four times that, and so on: a mean over four times as many
            columns is a quarter, which powers of two undo exactly.
        index_heads: of the indexer.
        experts: rows of the router.
        inner: of an expert.
    """

    heads: int
    groups: int
    latent: int
    index_heads: int
    experts: int
    inner: int


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return what one of `ranks` runs of every layer: its heads, its groups of them, its part of the experts' width."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        o_groups=config.o_groups // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
    )


def kernel_shapes(config: ModelConfig, ranks: int = 1) -> KernelShapes:
    """Return the sizes of `config` for the kernels of one of `ranks`, into which it divides.

    Raises:
        CheckpointError: no filling makes the model fit; the message names the field, its value and what is possible.
    """
    for field, value, fits, limit in _limits(config, ranks):
        if not fits:
            raise CheckpointError(
                f"{field} is {value}; the GPU engine runs {limit}. devices='cpu' runs this model", param=field
            )
    config = rank_config(config, ranks)
    together = config.num_attention_heads // config.o_groups
    heads = lcm(HEADS, together)
    while heads < config.num_attention_heads or heads // together * config.o_lora_rank % COLUMNS:
        heads += lcm(HEADS, together)
    latent = config.q_lora_rank
    while latent % COLUMNS:
        latent *= 4
    return KernelShapes(
        heads=heads,
        groups=heads // together,
        latent=latent,
        index_heads=filled(config.index_n_heads, HEADS),
        experts=filled(config.n_routed_experts, ROWS),
        inner=filled(config.moe_intermediate_size, COLUMNS),
    )


def filled(size: int, whole: int) -> int:
    """Return the next multiple of `whole`."""
    return -(-size // whole) * whole


def _limits(config: ModelConfig, ranks: int) -> list[tuple[str, object, bool, str]]:
    """List (field, value, whether it fits, what would) of everything that cannot be filled up."""
    heads, groups = config.num_attention_heads, config.o_groups
    width, index = config.head_dim, config.index_head_dim
    ratios = config.compress_ratios[: config.num_hidden_layers]
    has_indexer = 4 in ratios
    choices = STEP_ROWS * config.num_experts_per_tok
    latent, tail = config.q_lora_rank, config.qk_rope_head_dim
    return [
        ("hc_mult", config.hc_mult, config.hc_mult == STREAMS, f"{STREAMS} residual streams"),
        ("hidden_size", config.hidden_size, config.hidden_size % COLUMNS == 0, f"multiples of {COLUMNS}"),
        ("head_dim", width, width in (128, 256, 512), "128, 256 and 512"),
        ("qk_rope_head_dim", tail, 0 < tail < width and (width - tail) % 64 == 0, "what leaves a multiple of 64"),
        ("o_groups", groups, heads % groups == 0, f"divisors of the {heads} heads"),
        ("o_groups", groups, config.wo_a_width % COLUMNS == 0, f"groups of a multiple of {COLUMNS} columns"),
        ("o_lora_rank", config.o_lora_rank, config.o_lora_rank % ROWS == 0, f"multiples of {ROWS}"),
        ("q_lora_rank", latent, latent >= 128 and latent & (latent - 1) == 0, "powers of two from 128 on"),
        ("sliding_window", config.sliding_window, config.sliding_window % PLACES == 0, f"multiples of {PLACES}"),
        ("index_head_dim", index, not has_indexer or index in (128, 256), "128 and 256"),
        ("index_n_heads", config.index_n_heads, not has_indexer or _is_power(config.index_n_heads), "powers of two"),
        (
            "index_topk",
            config.index_topk,
            not has_indexer or (0 < config.index_topk <= TOP_MAX and config.index_topk % PLACES == 0),
            f"multiples of {PLACES} up to {TOP_MAX}",
        ),
        ("n_shared_experts", config.n_shared_experts, config.n_shared_experts == 1, "exactly 1 shared expert"),
        (
            "num_experts_per_tok",
            config.num_experts_per_tok,
            choices <= CHOICES_MAX,
            f"up to {CHOICES_MAX // STEP_ROWS}",
        ),
        ("moe_intermediate_size", config.moe_intermediate_size, config.moe_intermediate_size % 128 == 0, "whole 128s"),
        ("vocab_size", config.vocab_size, config.vocab_size % (ranks * ROWS) == 0, f"multiples of {ranks * ROWS}"),
        ("expert_dtype", config.expert_dtype, config.expert_dtype == "fp4", "FP4 experts"),
        ("quantization_config", "absent", config.quantized, "FP8 projections"),
    ]


def _is_power(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def chunk_fault(config: ModelConfig, shapes: KernelShapes) -> str:
    """Return why a prompt of such a model cannot go through the kernels of a chunk, "" where it can.

    They take larger tiles than those of decode rows, and nothing is filled up for them alone.
    """
    has_indexer, width = 4 in config.compress_ratios[: config.num_hidden_layers], shapes.heads * config.head_dim
    for name, value, fits, limit in (
        ("heads", shapes.heads, shapes.heads % 32 == 0, "multiples of 32"),
        ("o_lora_rank", config.o_lora_rank, config.o_lora_rank % 128 == 0, "multiples of 128"),
        ("sliding_window", config.sliding_window, config.sliding_window % 64 == 0, "multiples of 64"),
        ("index_topk", config.index_topk, not has_indexer or config.index_topk % 64 == 0, "multiples of 64"),
        ("n_routed_experts", config.n_routed_experts, config.n_routed_experts <= 1024, "1024 at most"),
        ("heads times head_dim", width, width <= 32768, "32768 at most"),
    ):
        if not fits:
            return f"{name} is {value}; a chunk's kernels take {limit}"
    return ""
