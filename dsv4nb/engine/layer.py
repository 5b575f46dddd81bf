"""One trunk layer on the residual streams (model.md 3.0)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine import ops
from dsv4nb.engine.attention import Attention
from dsv4nb.engine.batch import Batch
from dsv4nb.engine.experts import mix_experts
from dsv4nb.engine.hyper import Hyper
from dsv4nb.engine.state import LayerCache
from dsv4nb.engine.taps import Watch, seen
from dsv4nb.weights.store import LayerWeights


class Layer:
    """The arithmetic of every layer of a model."""

    def __init__(self, config: ModelConfig, contract: Contract) -> None:
        self._config, self._contract = config, contract
        self._hyper = Hyper(config)
        self._attention = Attention(config, contract)

    def __call__(
        self, batch: Batch, stream: Tensor, weights: LayerWeights, cache: LayerCache, watch: Watch | None = None
    ) -> Tensor:
        """Run one layer, writing its caches: [places, HC, D] -> [places, HC, D]."""
        x, post, comb = self._hyper.mix(stream, weights.hyper_attention)
        x = seen(watch, "attention.in", x)
        y = seen(watch, "attention.out", self._attention(batch, x, weights.attention, cache, watch))
        stream = seen(watch, "middle", ops.hyper_expand(y, stream, post, comb))
        x, post, comb = self._hyper.mix(stream, weights.hyper_experts)
        x = seen(watch, "experts.in", x)
        y = mix_experts(batch, x, weights.experts, self._config, self._contract, watch)
        return seen(watch, "out", ops.hyper_expand(seen(watch, "experts.out", y), stream, post, comb))
