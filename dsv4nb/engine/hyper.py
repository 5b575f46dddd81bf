"""The residual streams of a model around its sublayers (model.md 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine import ops
from dsv4nb.weights.store import HyperWeights


@dataclass(frozen=True, slots=True)
class Hyper:
    """Mix in before a sublayer, collapse after the last one."""

    config: ModelConfig

    def mix(self, stream: Tensor, weights: HyperWeights) -> ops.Mixed:
        """Collapse [places, HC, D] into the input of a sublayer."""
        return ops.hyper_mix(
            stream,
            weights.fn,
            weights.scale,
            weights.base,
            weights.norm,
            iterations=self.config.hc_sinkhorn_iters,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )

    def collapse_raw(self, stream: Tensor, weights: HyperWeights) -> Tensor:
        """Collapse [places, HC, D] likewise, without the norm."""
        return ops.hyper_collapse(
            stream,
            weights.fn,
            weights.scale,
            weights.base,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )

    def collapse(self, stream: Tensor, weights: HyperWeights) -> Tensor:
        """Collapse [places, HC, D] into the head's input."""
        return ops.hyper_head(
            stream,
            weights.fn,
            weights.scale,
            weights.base,
            weights.norm,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )
