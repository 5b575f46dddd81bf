"""One trunk layer on one GPU: the same order of operations as `layer`, each a kernel launched after the other.

Nothing here waits for the device, allocates after the first time, or looks at a value: a run can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import EntryCache, LayerCaches
from dsv4nb.engine.handover import Handover
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.engine.step import Inputs, Room, Windows
from dsv4nb.weights.kernel_shapes import PLACES, KernelShapes
from dsv4nb.weights.rank_store import RankAttention, RankCompressor, RankExperts, RankIndexer, RankLayer
from dsv4nb_kernels import (
    _compress_both,
    bf16_rows,
    compress,
    expert_down,
    expert_up,
    fp8_rows,
    hyper_mix,
    index_rows,
    index_scores,
    norm_rope_write,
    peer_join,
    route,
    sparse_attention,
    top_entries,
)
from dsv4nb_kernels._expert_rows import ExpertRows
from dsv4nb_kernels._peer import Link
from dsv4nb_kernels._rounded_rows import RoundedRows, round_rows
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.fp8_rows import Fp8Matrix

StepKey = tuple[int, int, bool]  # rows, extent, whether there is a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Joins that nobody waits for, so that their kernels are compiled and loaded before one has to.

    Attributes:
        link: an end that gives up at once.
        boundary: room for what is left of it: NaN.
    """

    link: Link
    boundary: hyper_mix.Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the kernels of one forward of T rows share.

    Attributes:
        boundary: the residual streams and the next sublayer's input.
        spread: the same input for the experts.
        extent: positions that it covers; 0 for rows that see the window alone.
        link: this GPU's end of a pair, whose halves of a sublayer's output meet in `mix`.
        trial: where joins are tried, while kernels are made; then the streams take this GPU's halves alone.
        came, goes: what a span of layers begins with and what it ends with; None at the ends of the network.
    """

    config: ModelConfig
    contract: Contract
    shapes: KernelShapes
    inputs: Inputs
    boundary: hyper_mix.Boundary
    spread: ExpertRows
    room: Room
    extent: int = 0
    link: Link | None = None
    trial: Trial | None = None
    came: Handover | None = None
    goes: Handover | None = None

    @property
    def rows(self) -> int:
        """T."""
        return self.inputs.tokens.shape[0]

    def key(self, *, has_head: bool) -> StepKey:
        """Return what its graph is held by."""
        return self.rows, self.extent, has_head

    def mix(self, y: Tensor | None, weights: hyper_mix.HyperWeights, *, for_experts: bool = False) -> None:
        """Add a sublayer's output [S, T, D] to the streams, nothing when None, and make the next one's input.

        Where GPUs are emulated, `push` must have brought the other one's half.
        """
        spread, link = self.spread if for_experts else None, None if y is None else self.link
        if self.trial is not None and link is not None:
            self._mix(y, weights, spread, self.trial.link, self.trial.boundary)
            link = None
        self._mix(y, weights, spread, link, self.boundary)

    def _mix(
        self,
        y: Tensor | None,
        weights: hyper_mix.HyperWeights,
        spread: ExpertRows | None,
        link: Link | None,
        out: hyper_mix.Boundary,
    ) -> None:
        hyper_mix.hyper_mix(
            y, self.boundary.stream, None if y is None else self.boundary, weights,
            iterations=self.config.hc_sinkhorn_iters, hc_eps=self.config.hc_eps, norm_eps=self.config.rms_norm_eps,
            act_fp8=self.contract.act_fp8, spread=spread, out=out, dependent=True,
            link=link, pushed=link is not None and self.is_emulated,
        )  # fmt: skip

    @property
    def is_emulated(self) -> bool:
        """Whether there is no GPU, so that no two kernels run at a time."""
        return self.boundary.x.device.type == "cpu"

    def push(self, y: Tensor) -> None:
        """Bring this GPU's half of a sublayer's output to the other one, ahead of `mix`, where they are emulated."""
        if self.link is not None and self.is_emulated:
            peer_join.launch(y, self.link, takes=False)

    def fp8(
        self, name: str, rows: RoundedRows, matrix: Fp8Matrix, groups: int = 1, *, rows_are_older: bool = False
    ) -> Tensor:
        """Multiply; the result [S, T, N] is called `name`."""
        out = self.room.tensor(name, fp8_rows.tuning(matrix.n, matrix.k).splits, self.rows, matrix.n)
        return fp8_rows.fp8_rows(rows, matrix, groups=groups, out=out, dependent=True, rows_are_older=rows_are_older)

    def bf16(self, name: str, x: Tensor, matrix: Bf16Matrix) -> Tensor:
        """Multiply likewise."""
        return bf16_rows.bf16_rows(x, matrix, out=self.product(name, matrix), dependent=True)

    def product(self, name: str, matrix: Bf16Matrix) -> Tensor:
        """Return where `bf16` puts a product of that name: [S, T, N]."""
        return self.room.tensor(name, bf16_rows.tuning(matrix.n, matrix.k).splits, self.rows, matrix.n)


def run_layer(step: Step, y: Tensor | None, weights: RankLayer, caches: LayerCaches) -> Tensor:
    """Run one layer, writing its caches.

    Args:
        y: [S, T, D], the output of the sublayer before, which the streams still lack; None before the first layer.

    Returns:
        [S, T, D], this layer's last output.
    """
    return run_experts(step, run_attention(step, y, weights, caches), weights)


def run_attention(
    step: Step,
    y: Tensor | None,
    weights: RankLayer,
    caches: LayerCaches,
    seen: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Run the first half of a layer; what it takes and returns is as of `run_layer`.

    Args:
        seen: called with the streams [T, HC, D] once `y` is in them, to launch what looks at them.
    """
    step.mix(y, weights.hyper_attention)
    if seen is not None:
        seen(step.boundary.stream)
    return _attend(step, weights.attention, caches)


def run_experts(step: Step, y: Tensor, weights: RankLayer) -> Tensor:
    """Run the second half of a layer, of the first half's output."""
    step.mix(y, weights.hyper_experts, for_experts=True)
    return _mix_experts(step, weights.experts)


def _attend(step: Step, weights: RankAttention, caches: LayerCaches) -> Tensor:
    contract, inputs, room = step.contract, step.inputs, step.room
    rows, shapes, eps = step.rows, step.shapes, step.config.rms_norm_eps
    cos, sin, _ = inputs.turn(is_compressed=weights.compressor is not None)
    product = step.fp8("down", step.boundary.rounded, weights.down)
    latent = room.rounded("latent", rows, shapes.latent)
    norm_rope_write.norm_rope_rows(
        product, weights.q_norm, weights.kv_norm, cos, sin, inputs.slots, caches.window,
        eps=eps, act_fp8=contract.act_fp8, kv_fp8=contract.kv_fp8, out=latent, dependent=True,
    )  # fmt: skip
    entries = _entries(step, latent, weights, caches)
    # where entries are chosen, `index_scores` has waited for the latent: the choice and the product take place together
    flat = step.fp8("query", latent, weights.query, rows_are_older=_chooses(step, caches))
    norm_rope_write.norm_rope_heads(flat, cos, sin, heads=shapes.heads, eps=eps, out=_query(step), dependent=True)
    mixed = mix_keys(step, weights, caches, entries)
    low = step.fp8("groups", mixed, weights.groups, shapes.groups)
    rounded = room.rounded("low", rows, weights.out.k)
    round_rows(low, act_fp8=contract.act_fp8, out=rounded, dependent=True)
    return step.fp8("attended", rounded, weights.out)


def _query(step: Step) -> Tensor:
    """Return room for the rows' heads: [T, H, hd]."""
    return step.room.tensor("heads", step.rows, step.shapes.heads, step.config.head_dim, dtype=torch.bfloat16)


def mix_keys(
    step: Step, weights: RankAttention, caches: LayerCaches, entries: sparse_attention.Keys | None
) -> RoundedRows:
    """Launch the attention of the rows' heads, which are in their room, to the window and `entries`: [T, H · hd]."""
    shapes, width, room, window = step.shapes, step.config.head_dim, step.room, step.inputs.window
    cos, _, back = step.inputs.turn(is_compressed=weights.compressor is not None)
    places = most = window.shape[1]
    if entries is not None:
        places, most = places + entries.places.shape[1], most + _most(step, caches)
    return sparse_attention.sparse_attention(
        _query(step), sparse_attention.Keys(cache=caches.window, places=window), entries, weights.sink, cos, back,
        scale=width**-0.5,
        partials=room.partials(step.rows, places // PLACES, shapes.heads, width, most=most // PLACES),
        out=room.rounded("mixed", step.rows, shapes.heads * width), dependent=True,
    )  # fmt: skip


def _entries(
    step: Step, latent: RoundedRows, weights: RankAttention, caches: LayerCaches
) -> sparse_attention.Keys | None:
    """Write the entries and index keys that the rows complete, and list what each row reads."""
    if weights.sources is None or weights.compressor is None or caches.compressor is None:
        return None
    windows, position = step.inputs.windows[caches.compressor.shape.ratio], step.inputs.position
    (cos, sin, _), eps = windows.turn, step.config.rms_norm_eps
    product = step.bf16("source", step.boundary.x, weights.sources)
    own = _made(weights.compressor, caches.compressor, "kv" if step.contract.kv_fp8 else "none")
    if weights.indexer is None or caches.indexer is None:
        compress.compress(
            product, own.offset, position, own.ring, own.norm, cos, sin, own.entries,
            eps=eps, rounding=own.rounding, dependent=True,
        )  # fmt: skip
        places = windows.places
    else:
        keys = _made(weights.indexer.compressor, caches.indexer, "index" if step.contract.index_fp4 else "none")
        _compress_both.compress_both(product, position, cos, sin, own, keys, eps=eps, dependent=True)
        places = _pick(step, latent, shares_of(product, weights.indexer), weights.indexer, caches.indexer)
    assert places is not None
    return sparse_attention.Keys(cache=caches.compressor.entries, places=places)


def shares_of(product: Tensor, weights: RankIndexer) -> Tensor:
    """Return what weighs the index heads, of the product by a layer's `sources`: [S, T, Hi]."""
    return product[..., -weights.heads.n :]


def _made(weights: RankCompressor, cache: EntryCache, rounding: compress.Rounding) -> _compress_both.Cache:
    return _compress_both.Cache(
        offset=weights.offset, ring=cache.source, norm=weights.norm, entries=cache.entries, rounding=rounding
    )


def _chooses(step: Step, caches: LayerCaches) -> bool:
    """Whether entries are chosen by their scores in this extent."""
    indexer = caches.indexer
    return indexer is not None and step.inputs.windows[indexer.shape.ratio].places is None


def _most(step: Step, caches: LayerCaches) -> int:
    """Return how many entries a row of this layer may read in the longest extent."""
    assert caches.compressor is not None
    most = step.inputs.windows[caches.compressor.shape.ratio].most
    return most if caches.indexer is None else min(step.config.index_topk, most)


def _pick(step: Step, latent: RoundedRows, shares: Tensor, weights: RankIndexer, cache: EntryCache) -> Tensor:
    """Choose entries for each row by the shares of its heads: [T, K] int32 ascending, -1 where a row sees fewer than K.

    In an extent of no more than K entries the choice is all of them, and nothing is scored.
    """
    cos, sin, _ = step.inputs.turn(is_compressed=True)
    heads, windows = step.shapes.index_heads, step.inputs.windows[cache.shape.ratio]
    if windows.places is not None:
        return windows.places
    flat, query = step.fp8("index query", latent, weights.query), index_heads(step)
    index_rows.index_rows(flat, cos, sin, heads=heads, index_fp4=step.contract.index_fp4, out=query, dependent=True)
    score(step, windows, query, cache.entries[: windows.entries], shares)
    return choose(step, windows)


def index_heads(step: Step) -> Tensor:
    """Return room for the queries of the rows' index heads: [T, Hi, d]."""
    shape = step.rows, step.shapes.index_heads, step.config.index_head_dim
    return step.room.tensor("index heads", *shape, dtype=torch.bfloat16)


def score(step: Step, windows: Windows, query: Tensor, keys: Tensor, shares: Tensor) -> None:
    """Launch the scores of the keys into their room."""
    scores = _scores(step, windows, len(keys))
    index_scores.index_scores(query, keys, shares, windows.visible, out=scores, dependent=True)


def _scores(step: Step, windows: Windows, count: int) -> Tensor:
    """Return room for what each row gives each of `count` entries: [T, E]."""
    return step.room.part("scores", MAX_ROWS * windows.most, step.rows, count)


def choose(step: Step, windows: Windows) -> Tensor:
    """Launch the choice of the best scores, which are in their room: [T, K] int32."""
    k = min(step.config.index_topk, windows.entries)
    scratch = _scratch(step.room, step.rows, windows.entries, windows.most, k)
    picked = step.room.tensor("picked", step.rows, k, dtype=torch.int32)
    scores = _scores(step, windows, windows.entries)
    return top_entries.top_entries(scores, windows.visible, k, scratch=scratch, out=picked, dependent=True)


def _scratch(room: Room, rows: int, count: int, most: int, k: int) -> top_entries.Scratch:
    """Return room between the rounds of a choice among `count` entries, in that of one among `most`."""
    cut, made = top_entries.TUNING, []
    for i, (each, longest) in enumerate(zip(cut.rounds(count, k)[:-1], cut.rounds(most, k), strict=False)):
        left, room_for = each.blocks * each.kept, MAX_ROWS * longest.blocks * longest.kept
        keys, entries = (
            room.part(f"top {what} {i}", room_for, rows, left, dtype=torch.int32) for what in ("keys", "entries")
        )
        made.append((keys, entries))
    return top_entries.Scratch(rounds=tuple(made))


def _mix_experts(step: Step, weights: RankExperts) -> Tensor:
    config, room, rows, k = step.config, step.room, step.rows, step.config.num_experts_per_tok
    logits = step.bf16("gate", step.boundary.x, weights.gate)
    chosen = room.tensor("experts", rows, k, dtype=torch.int32), room.tensor("shares", rows, k)
    route.route(
        logits, bias=weights.bias, table=weights.table, tokens=None if weights.table is None else step.inputs.tokens,
        k=k, factor=config.routed_scaling_factor, out=chosen, dependent=True,
    )  # fmt: skip
    lines = rows * (k + 1) + 1
    inner = room.tensor("inner", lines, weights.up.inner)
    expert_up.expert_up(step.spread, *chosen, weights.up, limit=config.swiglu_limit, out=inner, dependent=True)
    rounded = room.tensor("inner rounded", lines, weights.up.inner, dtype=torch.float16)
    out = room.tensor("moved", rows, config.hidden_size)
    return expert_down.expert_down(inner, chosen[0], weights.down, rounded=rounded, out=out, dependent=True)[None]
