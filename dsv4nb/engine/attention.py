"""One layer's attention (model.md 3.3): window rows, compressed entries, grouped output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine import ops
from dsv4nb.engine.batch import Batch, Places
from dsv4nb.engine.compressor import pool_entries
from dsv4nb.engine.indexer import index_keys, pick_entries, score_entries
from dsv4nb.engine.rope import Turn
from dsv4nb.engine.state import CompressorCache, LayerCache
from dsv4nb.engine.taps import Watch
from dsv4nb.weights.store import AttentionWeights

SPLIT = 32  # entries per split of the keys; the cut depends on the place in a row's list and on nothing else

Keys = tuple[Tensor, Tensor]  # [T, S, hd] and [T, S] hidden


@dataclass(frozen=True, slots=True)
class Attention:
    """The arithmetic of every attention sublayer of a model."""

    config: ModelConfig
    contract: Contract

    def __call__(
        self, batch: Batch, x: Tensor, weights: AttentionWeights, cache: LayerCache, watch: Watch | None = None
    ) -> Tensor:
        """Attend for all rows, writing the layer's caches: [places, D] -> [places, D]."""
        config, act_fp8 = self.config, self.contract.act_fp8
        turn = batch.turn(is_compressed=weights.compressor is not None)
        down = ops.fp8_rows(x, weights.down.weight, act_fp8=act_fp8 and weights.down.is_fp8)
        latent = ops.rms_norm(down[:, : config.q_lora_rank], weights.q_norm, config.rms_norm_eps)
        self._write(batch, down[:, config.q_lora_rank :], x, weights, cache)

        picked = self._pick(batch, x, latent, weights, cache)
        splits = [_window(batch, cache), *_entries(batch, picked, cache.compressor)]
        look = None
        if watch is not None and watch.wants_reads():
            entries = _numbers(batch, picked, cache.compressor)
            scores = self._scores(batch, x, latent, weights, cache)
            look = partial(watch.reads, keys=splits, sink=weights.sink, entries=entries, scores=scores)
        return self.attend(batch, latent, splits, turn, weights, look)

    def attend(
        self,
        batch: Places,
        latent: Tensor,
        splits: Sequence[Keys],
        turn: Turn,
        weights: AttentionWeights,
        look: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Make the queries, attend to `splits` and project: [places, q rank] -> [places, D].

        Args:
            turn: angles of all places.
            look: is shown the queries, [T, H, hd].
        """
        config = self.config
        flat = ops.fp8_rows(latent, weights.query.weight, act_fp8=self.contract.act_fp8 and weights.query.is_fp8)
        query = torch.unflatten(flat, -1, (config.num_attention_heads, config.head_dim))
        query = ops.norm_rope_heads(query, *turn, eps=config.rms_norm_eps)[batch.live]
        if look is not None:
            look(query)
        mixed = ops.sparse_attention(query, splits, weights.sink, scale=config.head_dim**-0.5)
        back = turn.rows(batch.live).back
        mixed = ops.rotate_tail(mixed, back.cos[:, None], back.sin[:, None])
        return self._project(batch, mixed, weights)

    def _write(self, batch: Batch, rows: Tensor, x: Tensor, weights: AttentionWeights, cache: LayerCache) -> None:
        eps, kv_fp8 = self.config.rms_norm_eps, self.contract.kv_fp8
        turn = batch.turn(is_compressed=weights.compressor is not None)
        rows = ops.norm_rope_rows(rows, weights.kv_norm, *turn, eps=eps, kv_fp8=kv_fp8)
        ops.write_rows(cache.window, batch.window_slots, rows[batch.live])
        if weights.compressor is not None and cache.compressor is not None:
            pooled = pool_entries(batch, x, weights.compressor, cache.compressor, eps=eps)
            if pooled is not None:
                pooling = batch.pooling(cache.compressor.shape)
                cache.compressor.entries.put(pooling.first, ops.rope_entries(pooled, *pooling.turn, kv_fp8=kv_fp8))
        if weights.indexer is not None and cache.indexer is not None:
            index_keys(batch, x, weights.indexer, cache.indexer, self.config, self.contract)

    def _pick(
        self, batch: Batch, x: Tensor, latent: Tensor, weights: AttentionWeights, cache: LayerCache
    ) -> Tensor | None:
        """Choose entries; None when every row reads all that it sees."""
        if weights.indexer is None or cache.indexer is None:
            return None
        return pick_entries(batch, x, latent, weights.indexer, cache.indexer, self.config, self.contract)

    def _scores(
        self, batch: Batch, x: Tensor, latent: Tensor, weights: AttentionWeights, cache: LayerCache
    ) -> Tensor | None:
        """Tell what the choice rests on, also where there was nothing to choose."""
        if weights.indexer is None or cache.indexer is None or batch.pooling(cache.indexer.shape).last == 0:
            return None
        return score_entries(batch, x, latent, weights.indexer, cache.indexer, self.config, self.contract)

    def _project(self, batch: Places, mixed: Tensor, weights: AttentionWeights) -> Tensor:
        placed = mixed.new_zeros(batch.places, mixed[0].numel())
        placed[batch.live] = mixed.flatten(1)
        parts = placed.chunk(len(weights.groups), 1)
        low = torch.cat([ops.bf16_rows(part, group) for part, group in zip(parts, weights.groups, strict=True)], 1)
        return ops.fp8_rows(low, weights.out.weight, act_fp8=self.contract.act_fp8 and weights.out.is_fp8)


def _window(batch: Batch, cache: LayerCache) -> Keys:
    return cache.window[batch.window_seen], batch.window_hidden


def _entries(batch: Batch, picked: Tensor | None, cache: CompressorCache | None) -> list[Keys]:
    if cache is None or batch.pooling(cache.shape).last == 0:
        return []
    return _all(batch, cache) if picked is None else _picked(picked, cache)


def _numbers(batch: Batch, picked: Tensor | None, cache: CompressorCache | None) -> Tensor:
    """Return which entries each row reads, [T, S] ascending, ABSENT where there is none."""
    if picked is not None:
        return picked
    if cache is None:
        return torch.empty(len(batch.positions), 0, dtype=torch.int64)
    pooling = batch.pooling(cache.shape)
    numbers = torch.arange(pooling.last).expand(len(batch.positions), -1)
    return numbers.masked_fill(numbers >= pooling.visible[:, None], ops.ABSENT)


def _all(batch: Batch, cache: CompressorCache) -> list[Keys]:
    """Every entry that a row sees, in splits that all rows share."""
    pooling = batch.pooling(cache.shape)
    count = batch.positions.shape[0]
    splits = []
    for first in range(0, pooling.last, SPLIT):
        index = torch.arange(first, first + SPLIT)
        keys = cache.entries.rows(first, min(first + SPLIT, pooling.last))
        if keys.shape[0] < SPLIT:
            # entries that do not exist yet are hidden; the last one stands in for them
            keys = keys[(index - first).clamp_max(keys.shape[0] - 1)]
        splits.append((keys.expand(count, -1, -1), index >= pooling.visible[:, None]))
    return splits


def _picked(picked: Tensor, cache: CompressorCache) -> list[Keys]:
    """The picked entries of each row, in splits."""
    picked = torch.nn.functional.pad(picked, (0, -picked.shape[1] % SPLIT), value=ops.ABSENT)
    return [(cache.entries.pick(part.clamp_min(0)), part < 0) for part in picked.chunk(picked.shape[1] // SPLIT, 1)]
