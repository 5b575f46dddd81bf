"""From the residual streams to logits (model.md 3.8)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine import ops
from dsv4nb.engine.hyper import Hyper
from dsv4nb.weights.store import Weights


def head_logits(stream: Tensor, weights: Weights, config: ModelConfig) -> Tensor:
    """Collapse, normalise and project whole tiles of rows: [n·8, HC, D] -> [n·8, V]."""
    return ops.bf16_rows(Hyper(config).collapse(stream, weights.hyper_head), weights.head)
