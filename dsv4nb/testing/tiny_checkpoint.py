"""A small random checkpoint with every kind of layer, in the official layout.

Window, compressed and heavily compressed layers, hash- and score-routed experts, and either drafter. All formats of
one seed hold the same numbers; see `dsv4nb.weights.synthetic`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4nb.checkpoint.inventory import Drafter
from dsv4nb.checkpoint.names import parse_name
from dsv4nb.checkpoint.synthetic import Format, hf_config
from dsv4nb.weights.synthetic import write_synthetic

# one layer of each kind, as small as the tiles of the kernels that read prompts in chunks are
CHUNKED: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "num_attention_heads": 32,
    "o_groups": 16,
    "o_lora_rank": 128,
    "index_n_heads": 16,
    "index_topk": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 256,
    "sliding_window": 64,
    "vocab_size": 64,
}


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
    middle = raw["num_hidden_layers"] // 2

    def shard_of(name: str) -> tuple[int, ...]:
        where = parse_name(name)
        if where.stack == "mtp":
            return (2,)
        return (0 if name == "embed.weight" or (where.layer is not None and where.layer < middle) else 1,)

    write_synthetic(folder, raw, fmt=fmt, seed=seed, shard_of=shard_of)
    return folder


def tiny_hf_config(*, drafter: Drafter = "none", fmt: Format = "fp8fp4", **overrides: Any) -> dict[str, Any]:
    """config.json of the tiny checkpoint; `overrides` replace its fields."""
    return hf_config("tiny", overrides, drafter=drafter, fmt=fmt)
