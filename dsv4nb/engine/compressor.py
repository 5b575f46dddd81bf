"""Source rows into the ring, finished windows into entries (model.md 3.4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4nb.engine import ops
from dsv4nb.engine.batch import Batch, Pooling
from dsv4nb.engine.state import CompressorCache
from dsv4nb.weights.store import CompressorWeights


def pool_entries(
    batch: Batch, x: Tensor, weights: CompressorWeights, cache: CompressorCache, *, eps: float
) -> Tensor | None:
    """Write the batch's source rows and pool the windows it completes.

    Args:
        x: [places, D], the attention sublayer's input.

    Returns:
        [n, d] normalised, neither rotated nor rounded; None when no window is complete.
    """
    pooling = batch.pooling(cache.shape)
    rows = ops.bf16_rows(x, weights.source)[batch.live] + weights.offset[pooling.phase]
    ops.write_rows(cache.source, pooling.slots, rows)
    if pooling.first == pooling.last:
        return None
    values, scores = _window_rows(cache, pooling)
    return ops.rms_norm(ops.compress(values, scores), weights.norm, eps)


def _window_rows(cache: CompressorCache, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """Gather the values and scores of the finished windows: each [n, reach, d]."""
    width, ratio = cache.shape.entry_width, cache.shape.ratio
    rows = cache.source[pooling.pooled]
    values, scores = rows.chunk(2, -1)
    if cache.shape.reach > ratio:
        # the window before gives its early channels, the window itself its late ones
        values = torch.cat((values[:, :ratio, :width], values[:, ratio:, width:]), 1)
        scores = torch.cat((scores[:, :ratio, :width], scores[:, ratio:, width:]), 1)
    if pooling.missing is not None:
        scores = scores.masked_fill(pooling.missing[:, :, None], -math.inf)
    return values, scores
