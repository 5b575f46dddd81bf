"""T rows through all layers on one GPU: the launches, and the CUDA graphs that repeat them.

The first forward of a width on given caches launches kernel by kernel, which also compiles them, and is captured
afterwards; every later one is a replay. Between the copy of tokens to the device and the copy of logits back nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.graphs import Graphs
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.engine.rank_chunk import RankChunk
from dsv4nb.engine.rank_drafter import RankDrafter
from dsv4nb.engine.rank_layer import Step, run_attention, run_experts
from dsv4nb.engine.step import TOKENS_AT, Room, StepInputs, Turns
from dsv4nb.weights.rank_store import RankDraft, RankWeights
from dsv4nb_kernels._expert_rows import ExpertRows
from dsv4nb_kernels._peer import Link
from dsv4nb_kernels.hyper_mix import Boundary

STAGED = 8  # forwards that may be on their way before the host waits for the oldest


class RankForward:
    """The network on one GPU, or one GPU's half of it.

    Args:
        graphs: capture and replay; without it, and in Triton's interpreter, every forward is launched kernel by kernel.
        link: its end of a pair, of which it is one GPU; `PairForward` runs both.
    """

    def __init__(
        self,
        weights: RankWeights,
        config: ModelConfig,
        contract: Contract,
        max_seq: int,
        *,
        graphs: bool = True,
        link: Link | None = None,
    ) -> None:
        self._weights, self._config, self._contract, self._max_seq = weights, config, contract, max_seq
        self.device, self._link = weights.device, link
        self._turns = Turns.of(config, max_seq + MAX_ROWS, self.device)  # a drafter's block may stand past the end
        self._room = Room(self.device)
        self._steps: dict[int, Step] = {}
        is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None
        self.graphs = Graphs(self.device, is_on=graphs)
        self._staging = _Staging(self.device)
        self.drafter = None if weights.draft is None or link is not None else self._make_drafter(weights.draft)
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

    def chunks(self, rows: int) -> RankChunk:
        """Return what runs chunks of prompts, of up to `rows` rows."""
        return RankChunk(self._weights, self._config, self._contract, self._max_seq, self._turns, rows=rows)

    def rows(self, caches: Caches, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Run `tokens` at positions pos … and wait for their logits: [T, V]."""
        logits = self.logits(self._run(caches, tokens, pos, has_head=True))
        self.wait()
        return np.asarray(logits.numpy())

    def fill(self, caches: Caches, tokens: Sequence[int], pos: int) -> None:
        """Run `tokens` likewise for the caches alone, and wait for nothing."""
        self._run(caches, tokens, pos, has_head=False)

    def settle(self) -> None:
        """Refuse what was filled and did not come to its end; one GPU alone has nobody to wait for."""

    def _run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> Step:
        step = self.begin(tokens, pos)
        key = (step.rows, has_head)
        self.graphs.run(caches.graphs, key, lambda: self.launch(step, caches, has_head=has_head))
        return step

    def begin(self, tokens: Sequence[int], pos: int) -> Step:
        """Send `tokens` at positions pos … to the device, and return the step that runs them."""
        step = self._step(len(tokens))
        self._staging.send(step.inputs.given, tokens, pos)
        return step

    def launch(self, step: Step, caches: Caches, *, has_head: bool) -> None:
        """Launch a forward, kernel by kernel."""
        for _ in self.launches(step, caches, has_head=has_head):
            pass

    def logits(self, step: Step) -> Tensor:
        """Start the copy of a step's logits to the host, as many as this rank has: [T, V]."""
        return self.to_host(step.product("logits", self._weights.head)[0])

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to the host; `wait` for it."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait for everything that was launched."""
        if self._stream is not None:
            self._stream.synchronize()

    def launches(self, step: Step, caches: Caches, *, has_head: bool) -> Iterator[Tensor]:
        """Launch a forward, kernel by kernel; it yields a sublayer's output before that is joined."""
        step.inputs.refresh()
        rows = self._room.tensor("embedded", step.rows, self._config.hidden_size, dtype=torch.bfloat16)
        torch.index_select(self._weights.embed, 0, step.inputs.tokens, out=rows)
        step.boundary.stream.copy_(rows[:, None].expand_as(step.boundary.stream))
        y: Tensor | None = None
        for number, (weights, own) in enumerate(zip(self._weights.layers, caches.layers, strict=True)):
            if y is not None:
                yield y
            y = run_attention(step, y, weights, own, seen=self._tap(number - 1))
            yield y
            y = run_experts(step, y, weights)
        if has_head or self.drafter is not None:
            assert y is not None
            yield y
            step.mix(y, self._weights.hyper_head)
        if self.drafter is not None:
            self.drafter.tap(step.boundary.stream, self._config.num_hidden_layers - 1)
            self.drafter.keep_taps(caches, step.inputs.slots)
        if has_head:
            parts = step.bf16("logits", step.boundary.x, self._weights.head)
            for part in parts[1:]:
                parts[0].add_(part)

    def _tap(self, layer: int) -> Callable[[Tensor], None] | None:
        """Return what keeps the streams behind `layer` for the drafter."""
        return None if self.drafter is None else partial(self.drafter.tap, layer=layer)

    def _make_drafter(self, draft: RankDraft) -> RankDrafter:
        return RankDrafter(
            self._weights,
            draft,
            self._config,
            self._contract,
            turns=self._turns,
            room=self._room,
            graphs=self.graphs,
            send=self._staging.send,
        )

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
                link=self._link,
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
