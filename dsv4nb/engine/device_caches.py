"""The caches of one sequence on one GPU, addressed by absolute position, with room for some number of positions.

Key/value rows and a compressor's entries are records where the contract rounds them to e4m3 (`_kv_records`), else they
are bfloat16, as index keys are. Rings are those of `cache`. Entries lie in one piece, entry w in row w, because a
captured graph holds addresses. So a snapshot copies the entries that it needs and shares nothing, and a sequence that
grows moves to larger caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.engine.cache import (
    CompressorShape,
    LayerShape,
    Part,
    blocks_for,
    layer_shape,
    live_parts,
    tap_width,
    whole_blocks,
    window_rows,
)
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb_kernels._kv_records import record_bytes

BLOCK_ROWS = 8  # rows of a drafter's stage behind its ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """How the rows of a cache lie.

    Attributes:
        width: values of a row, which are bytes of a record.
    """

    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize

    def zeros(self, rows: int, device: torch.device) -> Tensor:
        """Return so many rows: [rows, width]."""
        return torch.zeros(rows, self.width, dtype=self.dtype, device=device)


def row_form(config: ModelConfig, *, kv_fp8: bool) -> RowForm:
    """Return how key/value rows and a compressor's entries lie."""
    if kv_fp8:
        return RowForm(width=record_bytes(config.head_dim, config.qk_rope_head_dim), dtype=torch.uint8)
    return RowForm(width=config.head_dim, dtype=torch.bfloat16)


def index_form(config: ModelConfig) -> RowForm:
    """Return how index keys lie."""
    return RowForm(width=config.index_head_dim, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one GPU holds of the caches of every sequence.

    Attributes:
        layers: all of them where GPUs share layers, one after the other's where they run in turn.
        kv_fp8: whether key/value rows are records.
        has_drafter: the drafter's too.
    """

    device: torch.device
    layers: range
    kv_fp8: bool
    has_drafter: bool = False

    def holds(self, part: Part) -> bool:
        """Whether `part` is one of its."""
        of_layer, _, _ = part.name.partition(".")
        return self.has_drafter if of_layer == "mtp" else int(of_layer) in self.layers


def share_of(weights: RankWeights, *, kv_fp8: bool) -> Share:
    """Return what belongs to the layers and the drafter of a rank."""
    return Share(device=weights.device, layers=weights.span, kv_fp8=kv_fp8, has_drafter=weights.draft is not None)


class EntryCache:
    """Source rows and finished entries of one compressor.

    Attributes:
        source: [source_rows, source_width] float32 ring.
        entries: [E, R] uint8 records or [E, d] bfloat16, E whole blocks for so many positions.
    """

    def __init__(self, shape: CompressorShape, form: RowForm, positions: int, device: torch.device) -> None:
        self.shape = shape
        self.source = torch.zeros(shape.source_rows, shape.source_width, device=device)
        self.entries = form.zeros(whole_blocks(positions // shape.ratio), device)


class LayerCaches:
    """The caches of one layer.

    Attributes:
        window: ring of key/value rows, [window_rows, R] uint8 records or [window_rows, hd] bfloat16.
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    def __init__(self, shape: LayerShape, rows: RowForm, index: RowForm, positions: int, device: torch.device) -> None:
        self.window = rows.zeros(shape.window_rows, device)
        self.compressor = None if shape.compressor is None else EntryCache(shape.compressor, rows, positions, device)
        self.indexer = None if shape.indexer is None else EntryCache(shape.indexer, index, positions, device)

    def buffers(self) -> Iterator[Tensor]:
        """In the order of `live_parts`."""
        yield self.window
        for cache in (self.compressor, self.indexer):
            if cache is not None:
                yield from (cache.entries, cache.source)


class DraftCaches:
    """What the drafter looks at.

    Attributes:
        taps: [C, K·D] bfloat16 ring of what the tapped layers left.
        stages: one each; their windows hold the context rows, and `BLOCK_ROWS` rows behind the ring for what no
            position owns: a block, and rows that are made to no purpose.
    """

    def __init__(self, config: ModelConfig, share: Share) -> None:
        length, device = window_rows(config), share.device
        forms = row_form(config, kv_fp8=share.kv_fp8), index_form(config)
        self.taps = torch.zeros(length, tap_width(config), dtype=torch.bfloat16, device=device)
        shape = LayerShape(window_rows=length + BLOCK_ROWS, window_width=config.head_dim, compressor=None, indexer=None)
        self.stages = [LayerCaches(shape, *forms, 0, device) for _ in range(DSPARK_STAGES)]
        self._length = length

    def rings(self) -> Iterator[Tensor]:
        """Yield the context rows of each stage, as a layer's window has them: C rows."""
        for stage in self.stages:
            yield stage.window[: self._length]

    def buffers(self) -> Iterator[Tensor]:
        """Yield everything there is."""
        yield self.taps
        for stage in self.stages:
            yield from stage.buffers()


class Caches:
    """All caches of one sequence.

    Args:
        shares: of GPUs that hold some layers each, one behind the other; or one of all.

    Attributes:
        positions: that they have room for.
        device: the first layer's; devices: those of all.
        layers: one each.
        draft: what a drafter needs; None without one.
        graphs: what was captured on these addresses, by the runner's key.
        mirrors: the layers' on the other GPUs that share the weights, which compute and write the same bits.
    """

    def __init__(self, config: ModelConfig, positions: int, shares: Sequence[Share]) -> None:
        self._config, self.positions, self.device = config, positions, shares[0].device
        self._kv_fp8 = shares[0].kv_fp8
        rows = row_form(config, kv_fp8=self._kv_fp8)
        self.devices = tuple(share.device for share in shares)
        self.layers = [
            LayerCaches(layer_shape(config, index), rows, index_form(config), positions, share.device)
            for share in shares
            for index in share.layers
        ]
        drafting = [DraftCaches(config, share) for share in shares if share.has_drafter]
        self.draft = drafting[0] if drafting else None
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self.mirrors: tuple[Caches, ...] = ()

    @classmethod
    def on(cls, config: ModelConfig, positions: int, shares: Sequence[Share]) -> Caches:
        """Return one where each of several shares is a span of layers; where each is all, the first with mirrors."""
        if len(shares[0].layers) < config.num_hidden_layers:
            return cls(config, positions, shares)
        first, *mirrors = (cls(config, positions, [share]) for share in shares)
        first.mirrors = tuple(mirrors)
        return first

    @property
    def copies(self) -> tuple[Caches, ...]:
        """Those of every GPU, the first one's first."""
        return (self, *self.mirrors)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers())

    def parts(self, pos: int) -> Iterator[tuple[Part, Tensor]]:
        """Yield every buffer and which of its rows a later position can see, in a fixed order; no taps."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers()]
        if self.draft is not None:
            buffers += self.draft.rings()
        parts = device_parts(self._config, pos, has_drafter=self.draft is not None, kv_fp8=self._kv_fp8)
        yield from zip(parts, buffers, strict=True)

    def fill(self, smaller: Caches) -> None:
        """Launch the copy of everything that `smaller` holds, to where the same positions find it."""
        for own, other in zip(self.copies, smaller.copies, strict=True):
            for ours, theirs in zip(own._buffers(), other._buffers(), strict=True):
                ours[: len(theirs)].copy_(theirs)

    def blank(self) -> None:
        """Launch what makes them as they were made: zeros everywhere. Their graphs stay."""
        for own in self.copies:
            for buffer in own._buffers():
                buffer.zero_()

    def _buffers(self) -> Iterator[Tensor]:
        for owner in self._owners():
            yield from owner.buffers()

    def _owners(self) -> Iterator[LayerCaches | DraftCaches]:
        yield from self.layers
        if self.draft is not None:
            yield self.draft


def read_part(buffer: Tensor, part: Part) -> Tensor:
    """Return a copy of the rows of `part`, in order."""
    if part.is_entries:
        return buffer[part.first : part.last].clone()
    return torch.index_select(buffer, 0, _slots(buffer, part))


def write_part(buffer: Tensor, part: Part, rows: Tensor) -> None:
    """Put the rows of `part` where `read_part` finds them."""
    if part.is_entries:
        buffer[part.first : part.last] = rows
    else:
        buffer.index_copy_(0, _slots(buffer, part), rows)


def _slots(ring: Tensor, part: Part) -> Tensor:
    return torch.arange(part.first, part.last, device=ring.device) % ring.shape[0]


def device_parts(config: ModelConfig, pos: int, *, has_drafter: bool = False, kv_fp8: bool) -> Iterator[Part]:
    """Yield `live_parts` in the widths that rows have here."""
    width = row_form(config, kv_fp8=kv_fp8).width
    for part in live_parts(config, pos, has_drafter=has_drafter):
        yield replace(part, width=width) if _holds_rows(part) else part


def dtype_of(part: Part, *, kv_fp8: bool) -> torch.dtype:
    """Return the type of the values of `part`."""
    if part.name.endswith(".source"):
        return torch.float32
    return torch.uint8 if kv_fp8 and _holds_rows(part) else torch.bfloat16


def _holds_rows(part: Part) -> bool:
    """Whether its rows are keys and values of the attention."""
    return part.name.endswith((".window", ".compressor.entries"))


def blocks_of(config: ModelConfig, pos: int) -> int:
    """Blocks of entries that a sequence of `pos` positions fills, the last of each cache partly."""
    return sum(blocks_for(part.last) for part in live_parts(config, pos) if part.is_entries)


def device_state_bytes(
    config: ModelConfig, positions: int, *, kv_fp8: bool, has_drafter: bool = False, layers: range | None = None
) -> dict[str, int]:
    """Return what the caches of a sequence of so many positions take, by class: whole rings and whole blocks.

    Args:
        kv_fp8: whether key/value rows are records.
        layers: that are counted; all when None.
    """
    row, key = row_form(config, kv_fp8=kv_fp8).nbytes, index_form(config).nbytes
    source = torch.float32.itemsize
    total = dict.fromkeys(("window", "compressor", "indexer", "source"), 0)
    for index in range(config.num_hidden_layers) if layers is None else layers:
        shape = layer_shape(config, index)
        total["window"] += row * shape.window_rows
        for kind, cache, each in (("compressor", shape.compressor, row), ("indexer", shape.indexer, key)):
            if cache is not None:
                total["source"] += source * cache.source_rows * cache.source_width
                total[kind] += each * whole_blocks(positions // cache.ratio)
    if has_drafter:
        length = window_rows(config)
        taps = torch.bfloat16.itemsize * length * tap_width(config)
        total["drafter"] = taps + DSPARK_STAGES * (length + BLOCK_ROWS) * row
    return total


def device_layout(config: ModelConfig, *, kv_fp8: bool, has_drafter: bool = False) -> str:
    """Return what fixes names, shapes and meaning of dumped rows, in one line."""
    ratios = ",".join(map(str, config.compress_ratios[: config.num_hidden_layers]))
    tail = config.qk_rope_head_dim
    records = f", e4m3 records of {record_bytes(config.head_dim, tail)} bytes, tail {tail}" if kv_fp8 else ""
    return (
        f"cache 1, bfloat16 as uint16, float32 source{records}, window {config.sliding_window} x {config.head_dim},"
        f" index {config.index_head_dim}, ratios {ratios}{f', drafter {DSPARK_STAGES}' if has_drafter else ''}"
    )
