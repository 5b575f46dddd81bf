"""T rows through all layers: prefill chunk, plain step and verify batch alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.batch import Batch, Rotary
from dsv4nb.engine.cache import PREFILL_ROWS
from dsv4nb.engine.head import head_logits
from dsv4nb.engine.layer import Layer
from dsv4nb.engine.ops import TILE
from dsv4nb.engine.state import CpuState
from dsv4nb.engine.taps import EMBED, Taps, Watch, seen
from dsv4nb.weights.store import Weights


class Forward:
    """The network with its weights.

    Attributes:
        taps: who watches its forwards, nobody when None.
    """

    def __init__(self, weights: Weights, config: ModelConfig, contract: Contract) -> None:
        self._weights, self._config = weights, config
        self._layer = Layer(config, contract)
        self._rotary = Rotary(config)
        self.taps: Taps | None = None
        self._tapped = frozenset(config.dspark.target_layer_ids) if config.dspark is not None else frozenset[int]()

    def rows(self, state: CpuState, tokens: Sequence[int]) -> Tensor:
        """Run `tokens` provisionally from state.pos on and return all logits: [T, V]."""
        batch, stream = self._run(state, tokens)
        return head_logits(stream, self._weights, self._config)[batch.live]

    def last_row(self, state: CpuState, tokens: Sequence[int]) -> Tensor:
        """Run `tokens` likewise and return the logits of the last one: [V]."""
        batch, stream = self._run(state, tokens)
        tile = head_logits(stream[-TILE:], self._weights, self._config)
        return tile[batch.live.stop - batch.places - 1]

    def fill(self, state: CpuState, tokens: Sequence[int]) -> None:
        """Run `tokens` likewise for the caches alone."""
        self._run(state, tokens)

    def read_out(self, streams: Tensor, positions: Tensor) -> Tensor:
        """Return logits [n, V] of streams [n, HC, D], each row in the slot of its position; see `Watchable`."""
        tiles, tile = torch.unique(positions // TILE, return_inverse=True)
        place = tile * TILE + positions % TILE
        placed = streams.new_zeros(len(tiles) * TILE, *streams.shape[1:])
        placed[place] = streams
        return head_logits(placed, self._weights, self._config)[place]

    def _run(self, state: CpuState, tokens: Sequence[int]) -> tuple[Batch, Tensor]:
        assert 0 < len(tokens) <= PREFILL_ROWS, len(tokens)
        state.pending = 0
        state.reserve(len(tokens))
        batch = Batch(tokens, state.pos, self._config, self._rotary)
        stream = self._weights.embed[batch.tokens][:, None].expand(-1, self._config.hc_mult, -1).contiguous()
        watch = None if self.taps is None else Watch(self.taps, batch)
        stream = seen(watch, EMBED, stream)
        taps = []
        for number, (weights, cache) in enumerate(zip(self._weights.layers, state.layers, strict=True)):
            stream = self._layer(batch, stream, weights, cache, None if watch is None else watch.of(number))
            if state.rings is not None and number in self._tapped:
                taps.append(stream[batch.live].mean(1))
        if state.rings is not None:
            state.rings.put(batch.window_slots, torch.cat(taps, 1))
        state.pending = len(tokens)
        return batch, stream
