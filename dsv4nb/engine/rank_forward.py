"""T rows through all layers on one GPU: the launches, and the CUDA graphs that repeat them.

The first forward of a width on given caches launches kernel by kernel, which also compiles them, and is captured
afterwards; every later one is a replay. Between the copy of tokens to the device and the copy of logits back nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.config import SamplerConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.extent import extent_of
from dsv4nb.engine.extent_kernels import compile_extent
from dsv4nb.engine.graphs import Graphs
from dsv4nb.engine.handover import Handover
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.engine.rank_chunk import RankChunk
from dsv4nb.engine.rank_drafter import RankDrafter, tap, taps_of
from dsv4nb.engine.rank_draws import Flight, RankDraws
from dsv4nb.engine.rank_layer import Step, run_attention, run_experts
from dsv4nb.engine.step import TOKENS_AT, Room, StepInputs, Turns
from dsv4nb.weights.rank_store import RankDraft, RankWeights
from dsv4nb.weights.store import tensors_of
from dsv4nb_kernels._expert_rows import ExpertRows
from dsv4nb_kernels._peer import Link
from dsv4nb_kernels.hyper_mix import Boundary

STAGED = 8  # forwards that may be on their way before the host waits for the oldest


class RankForward:
    """The network on one GPU, or one GPU's half of it, or its span of layers.

    Args:
        weights: of a span of layers, which begins with what comes from the span before and ends with what goes to the
            next one, where it is not all of them; `PipelineForward` runs spans.
        graphs: capture and replay; without it, and in Triton's interpreter, every forward is launched kernel by kernel.
        link: its end of a pair, of which it is one GPU; `PairForward` runs both.
        is_tapped: the drafter is on another GPU, and needs taps of this span.
        joins_last: the drafter is on the other GPU of a pair, so that both join behind the last layer without a head.
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
        is_tapped: bool = False,
        joins_last: bool = False,
    ) -> None:
        self._weights, self._config, self._contract, self._max_seq = weights, config, contract, max_seq
        self.device, self._link = weights.device, link
        self._turns = Turns.of(config, max_seq + MAX_ROWS, self.device)  # a drafter's block may stand past the end
        self._room = Room(self.device)
        self._steps: dict[int, Step] = {}
        self._shorter: dict[tuple[int, int], Step] = {}
        is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None
        self.graphs = Graphs(self.device, is_on=graphs)
        self._staging = _Staging(self.device)
        self._draws: RankDraws | None = None
        self._left: dict[int, Tensor] = {}  # by number of rows
        self._behind: dict[int, tuple[Tensor, Tensor]] = {}  # likewise: where drafts go, and where they come from
        self.drafter = None if weights.draft is None else self._make_drafter(weights.draft)
        self._is_tapped = is_tapped or self.drafter is not None
        self._joins_last = joins_last or self.drafter is not None
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

    @property
    def nbytes(self) -> tuple[int, ...]:
        """What it takes besides weights, caches and the chunks of prompts, on its GPU; any thread may ask."""
        steps = [(step.boundary, step.spread, step.came, step.goes) for step in list(self._steps.values())]
        return (self._room.nbytes + sum(tensor.nbytes for tensor in tensors_of((self._turns, *steps))),)

    def chunks(self, rows: int, *, rank: int = 0, ranks: int = 1) -> RankChunk:
        """Return what runs chunks of prompts, of up to `rows` rows, on one of `ranks` that share the weights."""
        model = (self._weights, self._config, self._contract, self._max_seq, self._turns)
        return RankChunk(*model, rows=rows, rank=rank, ranks=ranks, graphs=self.graphs.is_on)

    def rows(self, caches: Caches, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Run `tokens` at positions pos … and wait for their logits: [T, V]."""
        logits = self.logits(self._run(caches, tokens, pos, has_head=True))
        self.wait()
        return np.asarray(logits.numpy())

    def draw(
        self,
        caches: Caches,
        tokens: Sequence[int],
        pos: int,
        config: SamplerConfig,
        drafted: Tensor | None = None,
    ) -> Flight:
        """Run `tokens` likewise, choose behind each of them, and wait for nothing.

        Args:
            drafted: [B] int32 on the drafter's device, in place of all tokens but the first; always there.
        """
        return self.chosen(self._run(caches, tokens, pos, has_head=True, drafted=drafted), config)

    def go_on(
        self, caches: Caches, rows: int, stop: int, config: SamplerConfig, after: Tensor, drafted: Tensor | None = None
    ) -> Flight:
        """Draw likewise where the host does not know yet what is to be run.

        Args:
            stop: where the rows end at most, in the extent in which they end wherever they stand.
            after: [5] int32, as of `RankDraws.after`: where the first row stands, and its token.
            drafted: as of `draw`, for the others.
        """
        step = self.follow(rows, stop, after, drafted)
        self._launch(step, caches, has_head=True)
        return self.chosen(step, config)

    def chosen(self, step: Step, config: SamplerConfig) -> Flight:
        """Choose behind the rows of a step that was launched with its head."""
        return self.draws.launch(self.left(step), step.inputs, config)

    @property
    def draws(self) -> RankDraws:
        """Draws from the rows of this rank, made when somebody first asks for them."""
        if self._draws is None:
            self._draws = RankDraws(self._config.vocab_size, self.device, self._room, self.graphs)
        return self._draws

    def fill(self, caches: Caches, tokens: Sequence[int], pos: int) -> None:
        """Run `tokens` likewise for the caches alone, and wait for nothing."""
        self._run(caches, tokens, pos, has_head=False)

    def settle(self) -> None:
        """Refuse what was filled and did not come to its end; one GPU alone has nobody to wait for."""

    def _run(
        self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool, drafted: Tensor | None = None
    ) -> Step:
        step = self.begin(tokens, pos, drafted)
        self._launch(step, caches, has_head=has_head)
        return step

    def _launch(self, step: Step, caches: Caches, *, has_head: bool) -> None:
        launch = partial(self.launch, step, caches, has_head=has_head)
        self.graphs.run(caches.graphs, step.key(has_head=has_head), launch)

    def compile(self, caches: Caches, extent: int) -> None:
        """Launch the kernels that an extent has of its own, of rows that see nothing; `caches` may be smaller."""
        layers = [caches.layers[number] for number in self._weights.span]
        compile_extent(self._step(1, extent), zip(self._weights.layers, layers, strict=True))

    def begin(self, tokens: Sequence[int], pos: int, drafted: Tensor | None = None) -> Step:
        """Send `tokens` at positions pos … to the device, and return the step that runs them; see `draw`."""
        step = self._next_step(len(tokens), pos + len(tokens))
        self._staging.send(step.inputs.given, tokens, pos)
        return self._with_drafts(step, drafted)

    def follow(self, rows: int, stop: int, after: Tensor, drafted: Tensor | None = None) -> Step:
        """Return the step of rows that are told on a device; the host sends nothing; see `go_on`."""
        step = self._next_step(rows, stop)
        step.inputs.given[: len(after)].copy_(after, non_blocking=True)
        return self._with_drafts(step, drafted)

    def _next_step(self, rows: int, stop: int) -> Step:
        step = self._step(rows, extent_of(stop, self._max_seq))
        if self._draws is not None:
            self._draws.recall()
        return step

    def _with_drafts(self, step: Step, drafted: Tensor | None) -> Step:
        if drafted is not None:
            if step.rows not in self._behind:
                self._behind[step.rows] = step.inputs.tokens[1:], drafted[: step.rows - 1]
            behind, ids = self._behind[step.rows]
            behind.copy_(ids, non_blocking=True)
        return step

    def launch(self, step: Step, caches: Caches, *, has_head: bool) -> None:
        """Launch a forward, kernel by kernel."""
        for _ in self.launches(step, caches, has_head=has_head):
            pass

    def logits(self, step: Step) -> Tensor:
        """Start the copy of a step's logits to the host, as many as this rank has: [T, V]."""
        return self.to_host(self.left(step))

    def left(self, step: Step) -> Tensor:
        """Return where a step leaves its logits, as many as this rank has: [T, V]."""
        if step.rows not in self._left:
            self._left[step.rows] = step.product("logits", self._weights.head)[0]
        return self._left[step.rows]

    def gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """Start the copies of what the ranks left of the logits to this one, whose stream waits for them: [T, V]."""
        rows, width = parts[0].shape
        whole = self._room.tensor("whole logits", rows, len(parts) * width)
        for part, left in zip(whole.split(width, 1), parts, strict=True):
            part.copy_(left, non_blocking=True)
        return whole

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
        y = self._enter(step)
        for number, weights in zip(self._weights.span, self._weights.layers, strict=True):
            if y is not None:
                yield y
            y = run_attention(step, y, weights, caches.layers[number], seen=self._tap(number - 1))
            yield y
            y = run_experts(step, y, weights)
        assert y is not None
        if step.goes is not None:
            step.goes.leave(y, step.boundary, self._taps(step))
            return
        if has_head or self._joins_last:
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
        return partial(tap, self._room, self._config, layer=layer) if self._is_tapped else None

    def _taps(self, step: Step) -> Tensor | None:
        return taps_of(self._room, self._config, step.rows) if self._is_tapped else None

    def _enter(self, step: Step) -> Tensor | None:
        """Launch what fills the streams; return the output that they still lack, None behind the embedding."""
        if step.came is not None:
            return step.came.enter(step.boundary, self._taps(step))
        rows = self._room.tensor("embedded", step.rows, self._config.hidden_size, dtype=torch.bfloat16)
        torch.index_select(self._weights.embed, 0, step.inputs.tokens, out=rows)
        step.boundary.stream.copy_(rows[:, None].expand_as(step.boundary.stream))
        return None

    def _handover(self, rows: int, *, exists: bool) -> Handover | None:
        if not exists:
            return None
        return Handover.empty(self._config, rows, self.device, has_taps=self._is_tapped)

    def _make_drafter(self, draft: RankDraft) -> RankDrafter:
        return RankDrafter(
            draft,
            self._config,
            self._contract,
            turns=self._turns,
            room=self._room,
            graphs=self.graphs,
            send=self._staging.send,
        )

    def _step(self, rows: int, extent: int) -> Step:
        """Return the step of so many rows that covers `extent` positions, in the memory of the longest."""
        if (rows, extent) not in self._shorter:
            longest = self._longest(rows)
            assert isinstance(longest.inputs, StepInputs)
            self._shorter[rows, extent] = replace(longest, inputs=longest.inputs.at(extent), extent=extent)
        return self._shorter[rows, extent]

    def _longest(self, rows: int) -> Step:
        if rows not in self._steps:
            config, shapes, width = self._config, self._weights.shapes, self._config.hidden_size
            span = self._weights.span
            self._steps[rows] = Step(
                config=config,
                contract=self._contract,
                shapes=shapes,
                inputs=StepInputs(config, rows, self._max_seq, self._turns),
                boundary=Boundary.empty(rows, width, self.device),
                spread=ExpertRows.empty(rows, width, self.device),
                room=self._room,
                link=self._link,
                came=self._handover(rows, exists=span.start > 0),
                goes=self._handover(rows, exists=span.stop < config.num_hidden_layers),
            )
        return self._steps[rows]


@contextmanager
def all_running(forwards: Sequence[RankForward]) -> Iterator[None]:
    """Launch what is inside on the streams of several GPUs; the first one is the current one."""
    with ExitStack() as stack:
        for one in reversed(forwards):
            stack.enter_context(one.running())
        yield


class _Staging:
    """Host buffers that copies to the device start from; one is written again only after its copy was made.

    They are written through numpy: every operation of torch hands the interpreter to whoever waits for it, and a cell
    that computes meanwhile keeps it.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        buffers = [torch.zeros(TOKENS_AT + MAX_ROWS, dtype=torch.int32, pin_memory=is_cuda) for _ in range(STAGED)]
        self._views = [buffer.numpy() for buffer in buffers]
        self._parts = [[buffer[:end] for end in range(len(buffer) + 1)] for buffer in buffers]
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in range(STAGED)]
        self._next = 0

    def send(self, given: Tensor, tokens: Sequence[int], pos: int) -> None:
        """Start the copy of a position and its tokens on the current stream."""
        number, self._next = self._next, (self._next + 1) % STAGED
        copied, view, end = self._copied[number], self._views[number], given.shape[0]
        if copied is not None:
            copied.synchronize()  # at once before the first record
        view[0], view[TOKENS_AT:end] = pos, tokens
        given.copy_(self._parts[number][end], non_blocking=True)
        if copied is not None:
            copied.record()
