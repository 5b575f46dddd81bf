"""Chunks of a prompt through all layers on one GPU, launched kernel by kernel; see `chunk_layer`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.cache import tap_width
from dsv4nb.engine.chunk_layer import Chunk, Peaks, attend, mix, mix_experts, reserve
from dsv4nb.engine.chunk_room import ChunkInputs, ChunkRoom, Sent
from dsv4nb.engine.device_caches import Caches, DraftCaches
from dsv4nb.engine.prefill import FAST_ROWS
from dsv4nb.engine.step import Turns
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb_kernels import _chunk_plan, bf16_rows, hyper_mix
from dsv4nb_kernels._rounded_rows import RoundedRows

SCORE_BYTES = 256 << 20  # of one band of index scores


class RankChunk:
    """Runs chunks of prompts through one rank's layers.

    Args:
        rows: of the longest chunk.
        score_bytes: the most that a band of index scores takes; a chunk is scored in as many bands as that asks for.
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
        score_bytes: int = SCORE_BYTES,
    ) -> None:
        self._weights, self._config, self._contract, self._max_seq = weights, config, contract, max_seq
        self.most = min(rows, max_seq)
        self._score_bytes, self._is_reserved = score_bytes, False
        self._room = ChunkRoom(self.most, weights.device)
        self._tail = ChunkRoom(min(config.sliding_window, self.most), weights.device)  # of what a drafter can see
        self.inputs = ChunkInputs(config, self._room, turns)
        self._none = RoundedRows.empty(0, config.hidden_size, weights.device)
        self._last = hyper_mix.Boundary.empty(1, config.hidden_size, weights.device)
        self._sent = Sent(self.inputs.given)
        row_peaks = _chunk_plan.row_peaks
        self._peaks = [
            Peaks(row_peaks(layer.experts.up.routed), row_peaks(layer.experts.down.routed)) for layer in weights.layers
        ]

    @property
    def nbytes(self) -> int:
        """What chunks take besides weights and caches; all of it from the first chunk on."""
        return self._room.nbytes + self._tail.nbytes + sum(peaks.nbytes for layer in self._peaks for peaks in layer)

    def run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> npt.NDArray[np.float32] | None:
        """Run `tokens` at positions pos …, and wait for the chunk before; with a head for the last row's logits too.

        So one chunk at most is on its way when the caller looks whether to go on.

        Args:
            tokens: more than 8, and no more than the longest chunk.

        Returns:
            [1, V] with a head.
        """
        self._sent.send(self.inputs.given, tokens, pos)
        chunk, y = self._launch(caches, len(tokens), pos)
        x = self._end(chunk, y, caches.draft, has_head=has_head)
        logits = None if x is None else self._head(chunk, x)
        self._sent.wait(all_of_it=has_head)
        return None if logits is None else np.asarray(logits.numpy())

    def _launch(self, caches: Caches, rows: int, pos: int) -> tuple[Chunk, Tensor]:
        """Launch the layers; return their chunk and the last one's output, [1, T, D], which its streams still lack."""
        config, weights, room = self._config, self._weights, self._room
        self.inputs.refresh(rows)
        chunk = Chunk(
            config=config,
            contract=self._contract,
            shapes=weights.shapes,
            inputs=self.inputs,
            boundary=self._boundary(room, rows),
            room=room,
            end=pos + rows,
            score_bytes=self._score_bytes,
        )
        if not self._is_reserved:
            reserve(chunk, self._max_seq)
            self._is_reserved = True
        embedded = room.tensor("embedded", rows, rows, config.hidden_size, dtype=torch.bfloat16)
        torch.index_select(weights.embed, 0, self.inputs.tokens, out=embedded)
        chunk.boundary.stream.copy_(embedded[:, None].expand_as(chunk.boundary.stream))
        y = None
        for number, (layer, peaks) in enumerate(zip(weights.layers, self._peaks, strict=True)):
            chunk.mix(y, layer.hyper_attention)
            if caches.draft is not None:
                self._tap(chunk.boundary.stream, number - 1)
            y = attend(chunk, layer.attention, caches.layers[number])
            chunk.mix(y, layer.hyper_experts)
            y = mix_experts(chunk, layer.experts, peaks)
        assert y is not None
        return chunk, y

    def _end(self, chunk: Chunk, y: Tensor, draft: DraftCaches | None, *, has_head: bool) -> Tensor | None:
        """Launch the last boundary, of as many rows as somebody needs, and keep the taps of a drafter.

        Returns:
            [1, D], the head's input of the last row; None without a head.
        """
        if draft is None and not has_head:
            return None
        rows = 1 if draft is None else self._tapped(chunk.rows)
        boundary, out = chunk.boundary, self._last if draft is None else self._boundary(self._tail, rows)
        before = hyper_mix.Boundary(
            stream=boundary.stream[-rows:], x=boundary.x[-rows:], rounded=boundary.rounded,
            post=boundary.post[-rows:], comb=boundary.comb[-rows:], parts=boundary.parts[-rows:],
        )  # fmt: skip
        mix(chunk, y[:, -rows:], before.stream, before, self._weights.hyper_head, out)
        if draft is not None:
            self._tap(out.stream, len(self._weights.layers) - 1)
            draft.taps.index_copy_(0, self.inputs.last_slots(rows), self._taps(rows))
        return out.x[-1:] if has_head else None

    def _tap(self, stream: Tensor, layer: int) -> None:
        """Launch what keeps the streams behind `layer`, of the rows that a drafter can see, if it is a tapped one."""
        assert self._config.dspark is not None
        if layer in self._config.dspark.target_layer_ids:
            rows, width = self._tapped(len(stream)), self._config.hidden_size
            first = self._config.dspark.target_layer_ids.index(layer) * width
            torch.mean(stream[-rows:], 1, out=self._taps(rows)[:, first : first + width])

    def _tapped(self, rows: int) -> int:
        return min(rows, self._tail.most)

    def _taps(self, rows: int) -> Tensor:
        return self._tail.tensor("taps", rows, rows, tap_width(self._config), dtype=torch.bfloat16)

    def _head(self, chunk: Chunk, x: Tensor) -> Tensor:
        """Launch the head by the kernels of a decode row, and the copy of its logits to the host."""
        matrix = self._weights.head
        splits = bf16_rows.tuning(matrix.n, matrix.k).splits
        parts = chunk.room.fixed("logits", splits, 1, matrix.n)
        bf16_rows.bf16_rows(x, matrix, out=parts, dependent=True)
        for part in parts[1:]:
            parts[0].add_(part)
        logits = torch.empty(1, matrix.n, pin_memory=self._sent.is_cuda)
        return logits.copy_(parts[0], non_blocking=True)

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
