"""Which compressed entries a row of a ratio-4 layer attends to (model.md 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine import ops
from dsv4nb.engine.batch import Batch
from dsv4nb.engine.compressor import pool_entries
from dsv4nb.engine.state import CompressorCache
from dsv4nb.weights.store import IndexerWeights


def index_keys(
    batch: Batch, x: Tensor, weights: IndexerWeights, cache: CompressorCache, config: ModelConfig, contract: Contract
) -> None:
    """Write the index keys that the batch completes."""
    pooled = pool_entries(batch, x, weights.compressor, cache, eps=config.rms_norm_eps)
    if pooled is not None:
        pooling = batch.pooling(cache.shape)
        keys = ops.index_rows(pooled[:, None], *pooling.turn, index_fp4=contract.index_fp4)
        cache.entries.put(pooling.first, keys[:, 0])


def pick_entries(
    batch: Batch,
    x: Tensor,
    latent: Tensor,
    weights: IndexerWeights,
    cache: CompressorCache,
    config: ModelConfig,
    contract: Contract,
) -> Tensor | None:
    """Choose entries for each live row.

    Args:
        x: [places, D]; latent: [places, q rank], the normalised low-rank query of the attention.

    Returns:
        [T, index_topk] ascending, -1 where a row sees fewer; None when every row keeps all it sees.
    """
    pooling = batch.pooling(cache.shape)
    if pooling.last <= config.index_topk:
        return None
    scores = score_entries(batch, x, latent, weights, cache, config, contract)
    return ops.top_entries(scores, pooling.visible, config.index_topk)


def score_entries(
    batch: Batch,
    x: Tensor,
    latent: Tensor,
    weights: IndexerWeights,
    cache: CompressorCache,
    config: ModelConfig,
    contract: Contract,
) -> Tensor:
    """Tell how much each live row wants each entry: [T, C], entries that it may not see among them."""
    pooling = batch.pooling(cache.shape)
    flat = ops.fp8_rows(latent, weights.query.weight, act_fp8=contract.act_fp8 and weights.query.is_fp8)
    query = torch.unflatten(flat[batch.live], -1, (config.index_n_heads, config.index_head_dim))
    turn = batch.turn(is_compressed=True).rows(batch.live)
    query = ops.index_rows(query, *turn, index_fp4=contract.index_fp4)
    heads = ops.bf16_rows(x, weights.heads)[batch.live]
    return torch.cat([ops.index_scores(query, keys, heads) for keys in cache.entries.whole(pooling.last)], 1)
