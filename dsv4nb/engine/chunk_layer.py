"""One trunk layer of a chunk of a prompt on a GPU: the order of `rank_layer`, with the kernels of a chunk.

The kernels keep a row apart from those beside it, so a row has the same bits in every chunk. They are not those of
the decode rows: products and the attention add in another order. What is the decode row's, bit for bit: the streams
between the sublayers, norms, rotations, entries, choices of entries and of experts, each from the same input.

Nothing here waits for the device, allocates after the first chunk, or looks at a value; how far a row can see at most
follows from the host's own count of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.cache import ENTRY_BLOCK, blocks_for, whole_blocks
from dsv4nb.engine.chunk_room import ChunkInputs, ChunkRoom, Outputs
from dsv4nb.engine.device_caches import EntryCache, LayerCaches
from dsv4nb.weights.kernel_shapes import KernelShapes, filled
from dsv4nb.weights.rank_store import RankAttention, RankCompressor, RankExperts, RankIndexer
from dsv4nb_kernels import (
    _chunk_plan,
    _kv_records,
    _round_chunk,
    bf16_chunk,
    chunk_attention,
    compress,
    expert_down_chunk,
    expert_up_chunk,
    fp8_chunk,
    hyper_mix,
    index_rows,
    index_scores,
    norm_rope_write,
    route,
    top_entries,
)
from dsv4nb_kernels._chunk_rows import ChunkRows
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.fp8_rows import Fp8Matrix

INDEXED = 4  # the ratio of the entries that an indexer chooses among
BAND = 16  # rows of a band come in multiples of this, so that its parts begin where a kernel may read
SEEN = 4096  # entries that are scored come in multiples of this, so that few forms of a kernel are compiled


class Peaks(NamedTuple):
    """The largest scale bytes of one layer's experts, [E, N] uint8: what `row_peaks` says of them."""

    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What the kernels of one chunk of T rows share.

    Attributes:
        end: the position behind the last row.
        boundary: the residual streams and the next sublayer's input.
        outputs: where a sublayer's output goes, a part of each rank.
        score_bytes: of one band of index scores.
    """

    config: ModelConfig
    contract: Contract
    shapes: KernelShapes
    inputs: ChunkInputs
    boundary: hyper_mix.Boundary
    outputs: Outputs
    room: ChunkRoom
    end: int
    score_bytes: int

    @property
    def rows(self) -> int:
        """T."""
        return self.inputs.rows

    @property
    def arranged(self) -> ChunkRows:
        """The next sublayer's input for products that round theirs."""
        assert self.boundary.arranged is not None
        return self.boundary.arranged

    def mix(self, y: Tensor | None, weights: hyper_mix.HyperWeights) -> None:
        """Add a sublayer's output [S, T, D] to the streams, nothing when None, and make the next one's input."""
        mix(self, y, self.boundary.stream, None if y is None else self.boundary, weights, self.boundary)

    def fp8(self, rows: ChunkRows, matrix: Fp8Matrix, groups: int = 1) -> Tensor:
        """Multiply; the result [1, T, N] stands until the next one does."""
        out = self.room.tensor("product", self.rows, 1, self.rows, matrix.n)
        return fp8_chunk.fp8_chunk(rows, matrix, groups=groups, out=out)

    def bf16(self, x: Tensor, matrix: Bf16Matrix, name: str = "product") -> Tensor:
        """Multiply likewise: [S, R, N] of R rows."""
        splits = bf16_chunk.tuning(matrix.n, matrix.k).splits
        out = self.room.tensor(name, len(x), splits, len(x), matrix.n)
        return bf16_chunk.bf16_chunk(x, matrix, out=out, dependent=True)

    def rounded(self, name: str, x: Tensor, *, act_fp8: bool) -> ChunkRows:
        """Prepare rows [S, T, W] or [T, W] for a product."""
        out = self.room.rounded(name, self.rows, x.shape[-1])
        return _round_chunk.round_chunk(x, act_fp8=act_fp8, out=out, dependent=True)


def mix(
    chunk: Chunk,
    y: Tensor | None,
    stream: Tensor,
    before: hyper_mix.Boundary | None,
    weights: hyper_mix.HyperWeights,
    out: hyper_mix.Boundary,
) -> None:
    """Make a boundary from any rows of a chunk."""
    config = chunk.config
    follows = y is None or len(y) == 1  # a kernel; behind a join there is a copy, for which none may start early
    hyper_mix.hyper_mix(
        y, stream, before, weights, iterations=config.hc_sinkhorn_iters, hc_eps=config.hc_eps,
        norm_eps=config.rms_norm_eps, act_fp8=chunk.contract.act_fp8, spread=None, out=out, dependent=follows,
    )  # fmt: skip


def attend(chunk: Chunk, weights: RankAttention, caches: LayerCaches) -> Tensor:
    """Run the first half of a layer of its input, writing its caches: [S, T, D], of which this rank's part is there."""
    config, contract, inputs, room = chunk.config, chunk.contract, chunk.inputs, chunk.room
    rows, shapes, eps = chunk.rows, chunk.shapes, chunk.config.rms_norm_eps
    cos, sin, back = inputs.turn(is_compressed=weights.compressor is not None)
    ring = inputs.window.ring("window", caches.window)
    inputs.window.take(caches.window, ring)
    product = chunk.fp8(chunk.arranged, weights.down)
    latent = room.rounded("latent", rows, shapes.latent)
    norm_rope_write.norm_rope_chunk(
        product, weights.q_norm, weights.kv_norm, cos, sin, inputs.slots, ring,
        eps=eps, act_fp8=contract.act_fp8, kv_fp8=contract.kv_fp8, out=latent, dependent=True,
    )  # fmt: skip
    inputs.window.leave(ring, caches.window)
    entries = _entries(chunk, latent, weights, caches)
    flat = chunk.fp8(latent, weights.query)
    query = room.tensor("heads", rows, rows, shapes.heads, config.head_dim, dtype=torch.bfloat16)
    norm_rope_write.norm_rope_heads(flat, cos, sin, heads=shapes.heads, eps=eps, out=query, dependent=True)
    mixed = room.tensor("mixed", rows, *query.shape, dtype=torch.bfloat16)
    if contract.kv_fp8:
        ring, entries = _unpack(chunk, ring, entries)
    window = chunk_attention.Window(ring=ring, width=config.sliding_window)
    chunk_attention.chunk_attention(
        query, inputs.position, window, entries, weights.sink, cos, back, scale=config.head_dim**-0.5, out=mixed
    )
    # queries are not needed any more, and rounded rows take the room of as many bytes
    low = chunk.fp8(chunk.rounded("heads", mixed.flatten(1), act_fp8=False), weights.groups, shapes.groups)
    fp8_chunk.fp8_chunk(chunk.rounded("low", low, act_fp8=contract.act_fp8), weights.out, out=chunk.outputs.own(rows))
    return chunk.outputs.parts(rows)


def _entries(
    chunk: Chunk, latent: ChunkRows, weights: RankAttention, caches: LayerCaches
) -> chunk_attention.Entries | None:
    """Write the entries and index keys that the rows complete, and list what each row reads where it has a choice."""
    if weights.compressor is None or caches.compressor is None:
        return None
    kv_rounding: compress.Rounding = "kv" if chunk.contract.kv_fp8 else "none"
    _pool(chunk, weights.compressor, caches.compressor, kv_rounding)
    ratio, places = caches.compressor.shape.ratio, None
    if weights.indexer is not None and caches.indexer is not None:
        index_rounding: compress.Rounding = "index" if chunk.contract.index_fp4 else "none"
        _pool(chunk, weights.indexer.compressor, caches.indexer, index_rounding)
        if chunk.end // ratio > chunk.config.index_topk:  # else every row reads all that it sees
            places = _pick(chunk, latent, weights.indexer, caches.indexer)
    return chunk_attention.Entries(cache=caches.compressor.entries, ratio=ratio, places=places)


def _unpack(
    chunk: Chunk, ring: Tensor, entries: chunk_attention.Entries | None
) -> tuple[Tensor, chunk_attention.Entries | None]:
    """Launch what makes rows of the records that the attention is going to read; each of them it reads many times."""
    width, tail, room = chunk.config.head_dim, chunk.config.qk_rope_head_dim, chunk.room
    rows = room.fixed("ring rows", len(ring), width, dtype=torch.bfloat16)
    window, seen = _kv_records.Unpacked(records=ring, rows=rows), None
    if entries is not None:
        records = entries.cache[: unpacked_entries(chunk.config, chunk.end, entries.ratio)]
        seen = _kv_records.Unpacked(records=records, rows=_entry_rows(chunk, len(records)))
        entries = replace(entries, cache=seen.rows)
    _kv_records.unpack_records(window, seen, tail=tail)
    return rows, entries


def unpacked_entries(config: ModelConfig, end: int, ratio: int) -> int:
    """Return how many entries are unpacked in a chunk that ends at `end`, where there are as many: all that a row sees.

    Chunks that score as many keys unpack as many entries, because what one of them launches serves the others too.
    """
    keys = scored_keys(config, end) or config.index_topk
    return whole_blocks((INDEXED * (keys + 1) - 1) // ratio)


def _entry_rows(chunk: Chunk, count: int) -> Tensor:
    return chunk.room.fixed("entry rows", count, chunk.config.head_dim, dtype=torch.bfloat16)


def _pool(chunk: Chunk, weights: RankCompressor, cache: EntryCache, rounding: compress.Rounding) -> None:
    """Write source rows, and the entries of the windows that they complete."""
    ratio = cache.shape.ratio
    carry = chunk.inputs.sources[ratio]
    ring = carry.ring(f"{ratio} {cache.shape.entry_width}", cache.source)
    carry.take(cache.source, ring)
    product = chunk.bf16(chunk.boundary.x, weights.source)
    cos, sin, _ = chunk.inputs.entry_turn(ratio)
    compress.compress(
        product, weights.offset, chunk.inputs.position, ring, weights.norm, cos, sin, cache.entries,
        eps=chunk.config.rms_norm_eps, rounding=rounding, dependent=True,
    )  # fmt: skip
    carry.leave(ring, cache.source)


def _pick(chunk: Chunk, latent: ChunkRows, weights: RankIndexer, cache: EntryCache) -> Tensor:
    """Choose entries for each row, a band of rows after the other: [T, index_topk] int32 ascending, -1 at the end."""
    config, room, rows = chunk.config, chunk.room, chunk.rows
    cos, sin, _ = chunk.inputs.turn(is_compressed=True)
    heads, ratio = chunk.shapes.index_heads, cache.shape.ratio
    flat = chunk.fp8(latent, weights.query)
    query = room.tensor("index heads", rows, rows, heads, config.index_head_dim, dtype=torch.bfloat16)
    index_rows.index_rows(flat, cos, sin, heads=heads, index_fp4=chunk.contract.index_fp4, out=query, dependent=True)
    picked, visible = _picked(chunk, rows), chunk.inputs.visible(ratio)
    # no row sees more than the last one
    keys = cache.entries[: min(filled(chunk.end // ratio, SEEN), len(cache.entries))]
    band = _band(chunk.score_bytes, len(keys))
    for first in range(0, rows, band):
        some = slice(first, min(first + band, rows))
        shares = chunk.bf16(chunk.boundary.x[some], weights.heads, name="index shares")
        scores, scratch = _scored(chunk, some.stop - first, len(keys))
        index_scores.index_scores(query[some], keys, shares, visible[some], out=scores, dependent=True)
        top_entries.top_entries(
            scores, visible[some], config.index_topk, scratch=scratch, out=picked[some], dependent=True
        )
    return picked


def scored_keys(config: ModelConfig, end: int) -> int:
    """Return how many index keys are scored in a chunk that ends at `end`, 0 where every row reads all it sees."""
    seen = end // INDEXED
    return filled(seen, SEEN) if seen > config.index_topk else 0


def _band(score_bytes: int, count: int) -> int:
    """Return how many rows have their `count` scores within the budget; at least one band's worth."""
    return max(score_bytes // (4 * count) // BAND, 1) * BAND


def _picked(chunk: Chunk, rows: int) -> Tensor:
    return chunk.room.tensor("picked", rows, rows, chunk.config.index_topk, dtype=torch.int32)


def _scored(chunk: Chunk, rows: int, count: int) -> tuple[Tensor, top_entries.Scratch]:
    """Return room for the scores of a band, and between the rounds of its choice."""
    room = chunk.room
    scores = room.fixed("scores", rows, count)
    rounds = top_entries.tuning(rows).rounds(count, chunk.config.index_topk)[:-1]
    left = [(rows, each.blocks * each.kept) for each in rounds]
    return scores, top_entries.Scratch(
        rounds=tuple(
            (
                room.fixed(f"top keys {i}", *shape, dtype=torch.int32),
                room.fixed(f"top entries {i}", *shape, dtype=torch.int32),
            )
            for i, shape in enumerate(left)
        )
    )


def reserve(chunk: Chunk, max_seq: int) -> None:
    """Take the room that only a chunk far down a sequence needs, so that it is there by then."""
    config, room, ratios = chunk.config, chunk.room, chunk.inputs.sources
    if chunk.contract.kv_fp8 and ratios:
        _entry_rows(chunk, whole_blocks(max_seq // min(ratios)))
    if INDEXED not in ratios or max_seq // INDEXED <= config.index_topk:
        return
    rows, most, heads = chunk.rows, room.most, chunk.shapes.index_heads
    room.tensor("index heads", rows, rows, heads, config.index_head_dim, dtype=torch.bfloat16)
    room.tensor("product", rows, 1, rows, heads * config.index_head_dim)
    room.tensor("index shares", rows, bf16_chunk.tuning(heads, config.hidden_size).splits, rows, heads)
    _picked(chunk, rows)
    largest = blocks_for(max_seq // INDEXED) * ENTRY_BLOCK
    for count in {*range(min(SEEN, largest), largest, SEEN), largest}:
        _scored(chunk, min(_band(chunk.score_bytes, count), most), count)


def mix_experts(chunk: Chunk, weights: RankExperts, peaks: Peaks) -> Tensor:
    """Run the second half of a layer of its input: [S, T, D], likewise."""
    config, room, rows, k = chunk.config, chunk.room, chunk.rows, chunk.config.num_experts_per_tok
    logits = chunk.bf16(chunk.boundary.x, weights.gate)
    chosen = room.tensor("experts", rows, rows, k, dtype=torch.int32), room.tensor("shares", rows, rows, k)
    route.route(
        logits, bias=weights.bias, table=weights.table, tokens=None if weights.table is None else chunk.inputs.tokens,
        k=k, factor=config.routed_scaling_factor, out=chosen, dependent=True,
    )  # fmt: skip
    experts, lines = len(weights.up.routed), rows * (k + 1)
    plan = _chunk_plan.plan_chunk(chosen[0], experts, out=room.plan(rows, k, experts))
    inner = room.tensor("inner", rows, lines, weights.up.inner, dtype=torch.float16)
    expert_up_chunk.expert_up_chunk(
        chunk.arranged, plan, chosen[1], weights.up, peaks.up, limit=config.swiglu_limit, out=inner
    )
    parts = room.tensor("product", rows, lines, config.hidden_size)
    own = chunk.outputs.own(rows)[0]
    expert_down_chunk.expert_down_chunk(inner, plan, weights.down, peaks.down, rows=rows, parts=parts, out=own)
    return chunk.outputs.parts(rows)
