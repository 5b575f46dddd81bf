"""In which order a load packs the stored tensors, pure: what reads ahead of `rank_loader` has to know it.

A batch is tensors that are taken together. The reading holds the two to each other: a tensor that is asked for out of
turn ends the load.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.weights.kernel_layout import groups_of_experts

Names = tuple[str, ...]


def load_order(entries: Container[str], config: ModelConfig) -> list[Names]:
    """List the batches of the trunk, and those of its DSpark drafter where `entries` has one."""
    batches = [
        *_layers("layers", enumerate(config.compress_ratios[: config.num_hidden_layers]), entries, config),
        *_single("", ("embed.weight", "head.weight", *_hyper("hc_head", "norm.weight"))),
    ]
    if "mtp.0.main_proj.weight" in entries:
        first, last = "mtp.0.", f"mtp.{DSPARK_STAGES - 1}."
        markov = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight")
        batches += _layers("mtp", ((stage, 0) for stage in range(DSPARK_STAGES)), entries, config)
        batches += _single(first, (*_matrix("main_proj"), "main_norm.weight"))
        batches += _single(last, (*_hyper("hc_head", "norm.weight"), *markov))
    return [batch for batch in batches if batch[0] in entries]


def _layers(
    stack: str, ratios: Iterable[tuple[int, int]], entries: Container[str], config: ModelConfig
) -> Iterator[Names]:
    for number, ratio in ratios:
        prefix = f"{stack}.{number}."
        for some in _experts(config):
            yield tuple(f"{prefix}{name}" for name in some)
        router = "ffn.gate.tid2eid" if f"{prefix}ffn.gate.tid2eid" in entries else "ffn.gate.bias"
        yield from _single(prefix, (*_hyper("hc_attn", "attn_norm.weight"), *_attention(ratio)))
        yield from _single(prefix, (*_hyper("hc_ffn", "ffn_norm.weight"), "ffn.gate.weight", router))


def _experts(config: ModelConfig) -> Iterator[Names]:
    for w in ("w1", "w3", "w2"):
        yield from _single("ffn.shared_experts.", _matrix(w))
    for some in groups_of_experts(config):
        for w in ("w1", "w3", "w2"):
            for leaf in _matrix(w):
                yield tuple(f"ffn.experts.{expert}.{leaf}" for expert in some)


def _attention(ratio: int) -> Iterator[str]:
    yield from (*_matrix("attn.wq_a"), "attn.q_norm.weight", *_matrix("attn.wkv"), "attn.kv_norm.weight")
    yield from (*_matrix("attn.wq_b"), "attn.attn_sink", *_matrix("attn.wo_a"), *_matrix("attn.wo_b"))
    if ratio:
        yield from _compressor("attn.compressor.")
    if ratio == 4:
        yield from (*_matrix("attn.indexer.wq_b"), "attn.indexer.weights_proj.weight")
        yield from _compressor("attn.indexer.compressor.")


def _compressor(name: str) -> Names:
    return tuple(f"{name}{leaf}" for leaf in ("ape", "wkv.weight", "wgate.weight", "norm.weight"))


def _hyper(name: str, norm: str) -> Names:
    return f"{name}_fn", f"{name}_scale", f"{name}_base", norm


def _matrix(name: str) -> Names:
    return f"{name}.weight", f"{name}.scale"


def _single(prefix: str, names: Iterable[str]) -> Iterator[Names]:
    """Yield batches of one tensor each."""
    return ((f"{prefix}{name}",) for name in names)
