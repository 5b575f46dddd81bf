"""Chunks of a prompt through one GPU's layers, launched kernel by kernel or by graphs (`chunk_graphs`).

See `chunk_layer`; `pair_chunk` and `pipeline_chunk` run several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.cache import tap_width
from dsv4nb.engine.chunk_graphs import ChunkGraphs, Key
from dsv4nb.engine.chunk_layer import Chunk, Peaks, attend, mix, mix_experts, reserve, scored_keys
from dsv4nb.engine.chunk_room import ChunkInputs, ChunkRoom, Outputs, Sent
from dsv4nb.engine.device_caches import Caches, DraftCaches
from dsv4nb.engine.handover import Handover, handover_bytes
from dsv4nb.engine.prefill import FAST_ROWS, padded_rows
from dsv4nb.engine.step import Turns
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb_kernels import _chunk_plan, bf16_rows, hyper_mix
from dsv4nb_kernels._rounded_rows import RoundedRows

SCORE_BYTES = 256 << 20  # of one band of index scores


class RankChunk:
    """Runs chunks of prompts through one rank's layers.

    Args:
        rows: of the longest chunk.
        rank, ranks: which of how many it is that share the weights; `PairChunk` runs two.
        score_bytes: the most that a band of index scores takes; a chunk is scored in as many bands as that asks for.
        graphs: capture and replay; without it every chunk is launched kernel by kernel.
    """

    def __init__(
        self,
        weights: RankWeights,
        config: ModelConfig,
        contract: Contract,
        max_seq: int,
        turns: Turns,
        *,
        rows: int = FAST_ROWS,
        rank: int = 0,
        ranks: int = 1,
        score_bytes: int = SCORE_BYTES,
        graphs: bool = True,
    ) -> None:
        self._weights, self._config, self._contract, self._max_seq = weights, config, contract, max_seq
        self.device, self.most = weights.device, min(rows, max_seq)
        self._score_bytes, self._is_reserved = score_bytes, False
        self._room = ChunkRoom(self.most, weights.device)
        self._tail = ChunkRoom(min(config.sliding_window, self.most), weights.device)  # of what a drafter can see
        self.inputs = ChunkInputs(config, self._room, turns)
        self.outputs = Outputs(self._room, config.hidden_size, rank=rank, ranks=ranks)
        self._none = RoundedRows.empty(0, config.hidden_size, weights.device)
        self._last = hyper_mix.Boundary.empty(1, config.hidden_size, weights.device)
        self._sent = Sent(self.inputs.given)
        self._graphs = ChunkGraphs(weights.device, is_on=graphs, joins=ranks > 1)
        row_peaks = _chunk_plan.row_peaks
        self._peaks = [
            Peaks(row_peaks(layer.experts.up.routed), row_peaks(layer.experts.down.routed)) for layer in weights.layers
        ]

    @property
    def nbytes(self) -> tuple[int, ...]:
        """What chunks take on each GPU besides weights and caches; all of it from the first prompt on."""
        peaks = sum(peaks.nbytes for layer in self._peaks for peaks in layer)
        return (self._room.nbytes + self._tail.nbytes + peaks,)

    def run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> npt.NDArray[np.float32] | None:
        """Run `tokens` at positions pos …, and wait for the chunk before; with a head for the last row's logits too.

        So one chunk at most is on its way when the caller looks whether to go on.

        Args:
            tokens: more than 8, and no more than the longest chunk.

        Returns:
            [1, V] with a head.
        """
        rows = self.rows_of(caches, len(tokens), pos)
        self.begin(tokens, pos, rows)
        for _ in self.replays(caches, rows, pos, has_head=has_head):
            pass
        return self.end(has_head=has_head)

    def rows_of(self, caches: Caches, tokens: int, pos: int) -> int:
        """Return the rows of a chunk of so many tokens at pos …: some more, if there is room for what they leave."""
        rows = padded_rows(tokens)
        return rows if rows <= self.most and pos + rows <= min(caches.positions, self._max_seq) else tokens

    def begin(self, tokens: Sequence[int], pos: int, rows: int) -> None:
        """Send `tokens` at positions pos … to the device, the first of `rows` rows."""
        self._sent.send(self.inputs.given, tokens, pos, rows)

    def end(self, *, has_head: bool) -> npt.NDArray[np.float32] | None:
        """Wait for the chunk before, with a head for this one too: return the logits of its last row that this has."""
        logits = None
        if has_head:
            kept = self._logits[0]
            logits = torch.empty(kept.shape, pin_memory=self._sent.is_cuda).copy_(kept, non_blocking=True)
        self._sent.wait(all_of_it=has_head)
        return None if logits is None else np.asarray(logits.numpy())

    def replays(self, caches: Caches, rows: int, pos: int, *, has_head: bool) -> Iterator[Tensor]:
        """Launch a chunk as `launches` does, by graphs where it can."""
        key = Key(
            rows=rows,
            keys=scored_keys(self._config, pos + rows),
            piece=self.outputs.piece,
            has_head=has_head,
            room_bytes=self._room.nbytes + self._tail.nbytes,
        )
        return self._graphs.run(caches, key, lambda: self.launches(caches, rows, pos, has_head=has_head))

    def launches(self, caches: Caches, rows: int, pos: int, *, has_head: bool) -> Iterator[Tensor]:
        """Launch a chunk, kernel by kernel; it yields a sublayer's output, [S, T, D], before that is joined."""
        weights = self._weights
        chunk = self._chunk(rows, pos)
        y = self._enter(chunk, caches)
        for number, layer, peaks in zip(weights.span, weights.layers, self._peaks, strict=True):
            if y is not None:
                yield y
            chunk.mix(y, layer.hyper_attention)
            if caches.draft is not None:
                self._tap(chunk.boundary.stream, number - 1)
            y = attend(chunk, layer.attention, caches.layers[number])
            yield y
            chunk.mix(y, layer.hyper_experts)
            y = mix_experts(chunk, layer.experts, peaks)
        assert y is not None
        if weights.span.stop < self._config.num_hidden_layers:
            self.handover("goes", caches, rows).leave(y, chunk.boundary, self._tapped_of(caches, rows))
            return
        yield y
        if needed := int(has_head) if caches.draft is None else self._tapped(rows):
            x = self._leave(chunk, y, needed, caches.draft)
            if has_head:
                self._head(x)

    def handover(self, name: Literal["came", "goes"], caches: Caches, rows: int) -> Handover:
        """Return what a span of layers begins with, or what it ends with, for `rows` rows."""

        def size(rows: int) -> int:
            return handover_bytes(self._config, rows, tapped=self._tapped(rows) if has_taps else 0)

        has_taps = caches.draft is not None
        whole = self._room.fixed(name, size(rows), dtype=torch.uint8, most=size(self.most))
        return Handover.within(whole, self._config, rows, tapped=self._tapped(rows) if has_taps else 0)

    def _enter(self, chunk: Chunk, caches: Caches) -> Tensor | None:
        """Launch what fills the streams; return the output that they still lack, None behind the embedding."""
        rows = chunk.rows
        if self._weights.span.start > 0:
            return self.handover("came", caches, rows).enter(chunk.boundary, self._tapped_of(caches, rows))
        embedded = self._room.tensor("embedded", rows, rows, self._config.hidden_size, dtype=torch.bfloat16)
        torch.index_select(self._weights.embed, 0, self.inputs.tokens, out=embedded)
        chunk.boundary.stream.copy_(embedded[:, None].expand_as(chunk.boundary.stream))
        return None

    def _chunk(self, rows: int, pos: int) -> Chunk:
        """Launch what a chunk begins with, and return it."""
        self.inputs.refresh(rows)
        chunk = Chunk(
            config=self._config,
            contract=self._contract,
            shapes=self._weights.shapes,
            inputs=self.inputs,
            boundary=self._boundary(self._room, rows),
            outputs=self.outputs,
            room=self._room,
            end=pos + rows,
            score_bytes=self._score_bytes,
        )
        if not self._is_reserved:
            reserve(chunk, self._max_seq)
            self._is_reserved = True
        return chunk

    def _leave(self, chunk: Chunk, y: Tensor, rows: int, draft: DraftCaches | None) -> Tensor:
        """Launch the last boundary of the last `rows` tokens and keep the taps of a drafter; `y` is that of all rows.

        Returns:
            [1, D], the head's input of the last token.
        """
        boundary, out = chunk.boundary, self._last if draft is None else self._boundary(self._tail, rows)
        before = hyper_mix.Boundary(
            stream=self._lasts("stream", boundary.stream, rows), x=out.x, rounded=self._none,
            post=self._lasts("post", boundary.post, rows), comb=self._lasts("comb", boundary.comb, rows),
            parts=out.parts,
        )  # fmt: skip
        mix(chunk, self._lasts("y", y, rows, 1), before.stream, before, self._weights.hyper_head, out)
        if draft is not None:
            self._tap(out.stream, self._config.num_hidden_layers - 1)
            draft.taps.index_copy_(0, self.inputs.last_slots(rows), self._taps(rows))
        return out.x[-1:]

    def _tap(self, stream: Tensor, layer: int) -> None:
        """Launch what keeps the streams behind `layer`, of the rows that a drafter can see, if it is a tapped one.

        Args:
            stream: of all rows; of those rows alone behind the last layer.
        """
        assert self._config.dspark is not None
        if layer in self._config.dspark.target_layer_ids:
            rows, width = self._tapped(len(stream)), self._config.hidden_size
            first = self._config.dspark.target_layer_ids.index(layer) * width
            if layer < self._config.num_hidden_layers - 1:
                stream = self._lasts("stream", stream, rows)
            torch.mean(stream, 1, out=self._taps(rows)[:, first : first + width])

    def _lasts(self, name: str, of: Tensor, rows: int, dim: int = 0) -> Tensor:
        """Launch the copy of the last `rows` tokens' rows of a tensor."""
        shape = (*of.shape[:dim], rows, *of.shape[dim + 1 :])
        out = self._tail.tensor(f"last {name}", rows, *shape, dtype=of.dtype)
        return torch.index_select(of, dim, self.inputs.last(rows), out=out)

    def _tapped(self, rows: int) -> int:
        return min(rows, self._tail.most)

    def _tapped_of(self, caches: Caches, rows: int) -> Tensor | None:
        return None if caches.draft is None else self._taps(self._tapped(rows))

    def _taps(self, rows: int) -> Tensor:
        return self._tail.tensor("taps", rows, rows, tap_width(self._config), dtype=torch.bfloat16)

    def _head(self, x: Tensor) -> None:
        """Launch the head by the kernels of a decode row."""
        parts = bf16_rows.bf16_rows(x, self._weights.head, out=self._logits, dependent=True)
        for part in parts[1:]:
            parts[0].add_(part)

    @property
    def _logits(self) -> Tensor:
        """Parts of the logits of one row, [S, 1, V]; behind a head the first is their sum."""
        matrix = self._weights.head
        return self._room.fixed("logits", bf16_rows.tuning(matrix.n, matrix.k).splits, 1, matrix.n)

    def _boundary(self, room: ChunkRoom, rows: int) -> hyper_mix.Boundary:
        width = self._config.hidden_size
        channels = hyper_mix.TUNING.channels
        return hyper_mix.Boundary(
            stream=room.tensor("stream", rows, rows, hyper_mix.STREAMS, width, dtype=torch.bfloat16),
            x=room.tensor("x", rows, rows, width, dtype=torch.bfloat16),
            rounded=self._none,
            post=room.tensor("post", rows, rows, hyper_mix.STREAMS),
            comb=room.tensor("comb", rows, rows, hyper_mix.STREAMS, hyper_mix.STREAMS),
            parts=room.tensor("parts", rows, rows, hyper_mix.LINE, width // channels),
            arranged=room.rounded("arranged", rows, width),
        )
