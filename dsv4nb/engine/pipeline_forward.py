"""T rows through all layers on several GPUs, each with the span of layers that it holds, from one thread.

A GPU begins when the one before has left its rows (`handover`): the streams order themselves, and the host waits for
nothing but the last one's logits. So forwards that nobody waits for follow each other, and then all GPUs compute at
once. Every kernel has the shape that it has on one GPU, and so has every row the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.config import SamplerConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.draft_walk import Drafting
from dsv4nb.engine.pipeline_chunk import PipelineChunk
from dsv4nb.engine.protocol import ChooseDraft, Proposal
from dsv4nb.engine.rank_drafter import RankDrafter
from dsv4nb.engine.rank_draws import Flight
from dsv4nb.engine.rank_forward import RankForward, all_running
from dsv4nb.engine.rank_layer import Step
from dsv4nb.weights.rank_store import RankWeights


class PipelineForward:
    """The network on GPUs that run one after the other; a CPU may stand for all of them.

    Args:
        ranks: their spans follow each other and are all layers.
        graphs: as of `RankForward`.

    Attributes:
        device: the first GPU.
        drafter: on the last GPU; None without one.
    """

    def __init__(
        self,
        ranks: Sequence[RankWeights],
        config: ModelConfig,
        contract: Contract,
        max_seq: int,
        *,
        graphs: bool = True,
    ) -> None:
        has_drafter = ranks[-1].draft is not None
        self._spans = [
            RankForward(weights, config, contract, max_seq, graphs=graphs, is_tapped=has_drafter) for weights in ranks
        ]
        self.device, last = ranks[0].device, self._spans[-1]
        self.drafter = None if last.drafter is None else LastDrafter(last, last.drafter)

    def running(self) -> AbstractContextManager[None]:
        """Launch what is inside on the GPUs' streams; the first GPU is the current one."""
        return all_running(self._spans)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """As of `RankForward`, of each."""
        return tuple(nbytes for span in self._spans for nbytes in span.nbytes)

    def chunks(self, rows: int) -> PipelineChunk:
        """Return what runs chunks of prompts, of up to `rows` rows, on all of them."""
        made = []
        for span in self._spans:
            with span.running():
                made.append((span, span.chunks(rows)))
        return PipelineChunk(made)

    def compile(self, caches: Caches, extent: int) -> None:
        """As of `RankForward`, on all of them."""
        for span in self._spans:
            with span.running():
                span.compile(caches, extent)

    def rows(self, caches: Caches, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Run `tokens` at positions pos … and wait for their logits: [T, V]."""
        last = self._spans[-1]
        logits = last.logits(self._run(caches, tokens, pos, has_head=True))
        last.wait()
        return np.asarray(logits.numpy())

    def draw(
        self,
        caches: Caches,
        tokens: Sequence[int],
        pos: int,
        config: SamplerConfig,
        drafted: Tensor | None = None,
    ) -> Flight:
        """Run `tokens` likewise, choose behind each of them on the last GPU, and wait for nothing.

        Args:
            drafted: as of `RankForward`.
        """
        step, last = self._run(caches, tokens, pos, has_head=True, drafted=drafted), self._spans[-1]
        with last.running():
            return last.chosen(step, config)

    def go_on(
        self, caches: Caches, rows: int, stop: int, config: SamplerConfig, after: Tensor, drafted: Tensor | None = None
    ) -> Flight:
        """As of `RankForward`; the other GPUs are sent what the last one found."""
        last = self._spans[-1]
        step = self._go(caches, lambda span: span.follow(rows, stop, after, drafted), has_head=True)
        with last.running():
            return last.chosen(step, config)

    def fill(self, caches: Caches, tokens: Sequence[int], pos: int) -> None:
        """Run `tokens` likewise for the caches alone, and wait for nothing."""
        self._run(caches, tokens, pos, has_head=False)

    def settle(self) -> None:
        """Refuse what was filled and did not come to its end; nobody waits for anybody in vain here."""

    def _run(
        self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool, drafted: Tensor | None = None
    ) -> Step:
        return self._go(caches, lambda span: span.begin(tokens, pos, drafted), has_head=has_head)

    def _go(self, caches: Caches, begin: Callable[[RankForward], Step], *, has_head: bool) -> Step:
        """Launch one span after the other; return the last one's step."""
        before: Step | None = None
        for number, span in enumerate(self._spans):
            with span.running():
                step = begin(span)
                if before is not None:
                    _take_over(before, step)
                ends = has_head and step.goes is None
                launch = partial(span.launch, step, caches, has_head=ends)
                span.graphs.run(caches.graphs, (number, step.key(has_head=ends)), launch)
                before = step
        assert before is not None
        return before


class LastDrafter:
    """The drafter, on the GPU that it is on: the last one, which is not the current one."""

    def __init__(self, last: RankForward, drafter: RankDrafter) -> None:
        self._last, self._drafter = last, drafter

    @property
    def block_size(self) -> int:
        """Drafts of one call."""
        return self._drafter.block_size

    def write_context(self, caches: Caches, first: int, stop: int) -> None:
        """As of `RankDrafter`."""
        with self._last.running():
            self._drafter.write_context(caches, first, stop)

    def begin(self, caches: Caches, pos: int, pending: int, config: SamplerConfig) -> Drafting:
        """As of `RankDrafter`."""
        with self._last.running():
            return self._drafter.begin(caches, pos, pending, config)

    def go_on(self, caches: Caches, first: int, config: SamplerConfig, after: Tensor) -> Drafting:
        """As of `RankDrafter`."""
        with self._last.running():
            return self._drafter.go_on(caches, first, config, after)

    def draft(self, caches: Caches, pos: int, pending: int, choose: ChooseDraft) -> Proposal:
        """As of `RankDrafter`."""
        with self._last.running():
            return self._drafter.draft(caches, pos, pending, choose)


def _take_over(before: Step, step: Step) -> None:
    """Launch the copy from one GPU to the next: it waits for both, and the next one's stream for it."""
    assert before.goes is not None and step.came is not None
    step.came.whole.copy_(before.goes.whole, non_blocking=True)
