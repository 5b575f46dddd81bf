"""T rows through all layers on one GPU: the launches, and the CUDA graphs that repeat them.

The first forward of a width on given caches launches kernel by kernel, which also compiles them, and is captured
afterwards; every later one is a replay. Between the copy of tokens to the device and the copy of logits back nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.rank_layer import Step, run_layer
from dsv4nb.engine.step import TOKENS_AT, Room, StepInputs, Turns
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb_kernels._expert_rows import ExpertRows
from dsv4nb_kernels.hyper_mix import Boundary

STAGED = 8  # forwards that may be on their way before the host waits for the oldest


class RankForward:
    """The network on one GPU.

    Args:
        graphs: capture and replay; without it, and in Triton's interpreter, every forward is launched kernel by kernel.
    """

    def __init__(
        self, weights: RankWeights, config: ModelConfig, contract: Contract, max_seq: int, *, graphs: bool = True
    ) -> None:
        self._weights, self._config, self._contract, self._max_seq = weights, config, contract, max_seq
        self.device = weights.device
        self._turns = Turns.of(config, max_seq, self.device)
        self._room = Room(self.device)
        self._steps: dict[int, Step] = {}
        is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None
        self._pool = torch.cuda.graph_pool_handle() if is_cuda and graphs else None
        self._staging = _Staging(self.device)
        if is_cuda:
            torch.cuda.synchronize(self.device)  # weights and tables were written on another stream

    @contextmanager
    def running(self) -> Iterator[None]:
        """Launch what is inside on this rank's stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def rows(self, caches: Caches, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Run `tokens` at positions pos … and wait for their logits: [T, V]."""
        logits = self._run(caches, tokens, pos, has_head=True)
        assert logits is not None
        host = torch.empty(logits.shape, pin_memory=self._stream is not None)
        host.copy_(logits, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return np.asarray(host.numpy())

    def fill(self, caches: Caches, tokens: Sequence[int], pos: int) -> None:
        """Run `tokens` likewise for the caches alone, and wait for nothing."""
        self._run(caches, tokens, pos, has_head=False)

    def _run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> Tensor | None:
        step = self._step(len(tokens))
        self._staging.send(step.inputs.given, tokens, pos)
        key = (len(tokens), has_head)
        if (graph := caches.graphs.get(key)) is not None:
            graph.replay()
            return self._logits(step) if has_head else None
        logits = self._launch(step, caches, has_head=has_head)
        if self._pool is not None:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._launch(step, caches, has_head=has_head)
            finally:
                graph.capture_end()
            caches.graphs[key] = graph
        return logits

    def _launch(self, step: Step, caches: Caches, *, has_head: bool) -> Tensor | None:
        step.inputs.refresh()
        rows = self._room.tensor("embedded", step.rows, self._config.hidden_size, dtype=torch.bfloat16)
        torch.index_select(self._weights.embed, 0, step.inputs.tokens, out=rows)
        step.boundary.stream.copy_(rows[:, None].expand_as(step.boundary.stream))
        y = None
        for weights, own in zip(self._weights.layers, caches.layers, strict=True):
            y = run_layer(step, y, weights, own)
        if not has_head:
            return None
        step.mix(y, self._weights.hyper_head)
        parts = step.bf16("logits", step.boundary.x, self._weights.head)
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0]

    def _logits(self, step: Step) -> Tensor:
        """Where the head of a step of so many rows leaves its logits."""
        return step.product("logits", self._weights.head)[0]

    def _step(self, rows: int) -> Step:
        if rows not in self._steps:
            config, shapes, width = self._config, self._weights.shapes, self._config.hidden_size
            self._steps[rows] = Step(
                config=config,
                contract=self._contract,
                shapes=shapes,
                inputs=StepInputs(config, rows, self._max_seq, self._turns),
                boundary=Boundary.empty(rows, width, self.device),
                spread=ExpertRows.empty(rows, width, self.device),
                room=self._room,
            )
        return self._steps[rows]


class _Staging:
    """Host buffers that copies to the device start from; one is written again only after its copy was made."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(TOKENS_AT + 8, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(STAGED)]
        self._copied: list[torch.cuda.Event | None] = [None] * STAGED
        self._next = 0

    def send(self, given: Tensor, tokens: Sequence[int], pos: int) -> None:
        """Start the copy of a position and its tokens on the current stream."""
        number, self._next = self._next, (self._next + 1) % STAGED
        if (copied := self._copied[number]) is not None:
            copied.synchronize()
        buffer = self._buffers[number][: given.shape[0]]
        buffer[0] = pos
        buffer[TOKENS_AT:] = torch.tensor(tokens, dtype=torch.int32)
        given.copy_(buffer, non_blocking=True)
        if self._is_cuda:
            self._copied[number] = torch.cuda.Event()
            self._copied[number].record()  # type: ignore[union-attr]
