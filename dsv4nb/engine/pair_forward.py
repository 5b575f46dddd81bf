"""T rows through all layers on two GPUs that share the weights, from one thread.

Each runs every layer with its half of the heads, of the experts' inner width and of the vocabulary; the halves of a
sublayer's output meet in the boundary behind it, twice a layer. Caches are on both, with the same bits.

The streams are whole on both, so the first GPU has all that a drafter looks at: it drafts alone, and joins nothing.
Behind the last layer the halves meet where a head or a drafter follows, and then on both GPUs.

A GPU that waits in a join for kernels that the host has yet to launch would wait in vain. So the launches of a forward
alternate from join to join, and those of a graph are all there when it is replayed; and every forward runs alone on
either GPU before its first join, with a trial of the joins, so that no kernel is compiled or loaded while the other GPU
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.config import SamplerConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.pair_chunk import PairChunk
from dsv4nb.engine.pair_turns import on, take_turns
from dsv4nb.engine.rank_drafter import RankDrafter
from dsv4nb.engine.rank_draws import Flight
from dsv4nb.engine.rank_forward import RankForward, all_running
from dsv4nb.engine.rank_layer import Step, StepKey, Trial
from dsv4nb.errors import EngineError
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb_kernels._peer import ERROR_WORDS, connect
from dsv4nb_kernels.hyper_mix import Boundary

_Halves = Sequence[tuple[RankForward, Step, Caches]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """The error words of both GPUs on the host.

    Attributes:
        words: of each, as a `Mailbox` has them.
        events: behind the copies; none on a CPU.
    """

    words: tuple[Tensor, ...]
    events: tuple[torch.cuda.Event, ...]

    @classmethod
    def of(cls, places: Sequence[torch.device]) -> _Watch:
        is_cuda = places[0].type == "cuda"
        return cls(
            words=tuple(torch.zeros(ERROR_WORDS, dtype=torch.int32, pin_memory=is_cuda) for _ in places),
            events=tuple(torch.cuda.Event() for _ in places if is_cuda),
        )


class PairForward:
    """The network on two GPUs; a CPU may stand for both, which then run in turn.

    Args:
        ranks: two, the first with the first half of everything.
        graphs: as of `RankForward`.

    Attributes:
        device: the first GPU.
        drafter: the first GPU's; None without one.

    Raises:
        ValueError: the GPUs do not reach each other's memory.
    """

    def __init__(
        self,
        ranks: tuple[RankWeights, RankWeights],
        config: ModelConfig,
        contract: Contract,
        max_seq: int,
        *,
        graphs: bool = True,
    ) -> None:
        places, width = (ranks[0].device, ranks[1].device), config.hidden_size
        drafts = ranks[0].draft is not None
        self._links = connect(width, places)
        self._hasty = connect(width, places, polls=1)
        with torch.inference_mode(False):  # so that `settle` may write them wherever it is called
            self._watches = cycle([_Watch.of(places), _Watch.of(places)])  # of two forwards on their way
        self._sides = [
            RankForward(weights, config, contract, max_seq, graphs=graphs, link=link, joins_last=drafts)
            for weights, link in zip(ranks, self._links, strict=True)
        ]
        self._width, self._tried = width, set[StepKey]()
        self.device = places[0]
        self.drafter: RankDrafter | None = self._sides[0].drafter

    def running(self) -> AbstractContextManager[None]:
        """Launch what is inside on the GPUs' streams; the first GPU is the current one."""
        return all_running(self._sides)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """As of `RankForward`, of either."""
        return tuple(nbytes for side in self._sides for nbytes in side.nbytes)

    def chunks(self, rows: int) -> PairChunk:
        """Return what runs chunks of prompts, of up to `rows` rows, on both."""
        first, second = (side.chunks(rows, rank=rank, ranks=2) for rank, side in enumerate(self._sides))
        return PairChunk((first, second))

    def compile(self, caches: Caches, extent: int) -> None:
        """As of `RankForward`, on both."""
        for side, own in zip(self._sides, caches.copies, strict=True):
            with on(side.device):
                side.compile(own, extent)

    def rows(self, caches: Caches, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Run `tokens` at positions pos … and wait for their logits: [T, V].

        Raises:
            EngineError: a join waited in vain; the caches hold nothing of these rows, and the next forward can run.
        """
        steps, first = self._run(caches, tokens, pos, has_head=True), self._sides[0]
        with on(first.device):
            logits = first.to_host(self._gathered(steps))
        self.settle()
        return np.asarray(logits.numpy())

    def draw(
        self,
        caches: Caches,
        tokens: Sequence[int],
        pos: int,
        config: SamplerConfig,
        drafted: Tensor | None = None,
    ) -> Flight:
        """Run `tokens` likewise, choose behind each of them on the first GPU, and wait for nothing.

        Whoever lets it land is told what `rows` raises.

        Args:
            drafted: as of `RankForward`.
        """
        return self._chosen(self._run(caches, tokens, pos, has_head=True, drafted=drafted), config)

    def go_on(
        self, caches: Caches, rows: int, stop: int, config: SamplerConfig, after: Tensor, drafted: Tensor | None = None
    ) -> Flight:
        """As of `RankForward`; the second GPU is sent what the first one found."""
        steps = []
        for side in self._sides:
            with on(side.device):
                steps.append(side.follow(rows, stop, after, drafted))
        self._go(steps, caches, has_head=True)
        return self._chosen(steps, config)

    def _chosen(self, steps: Sequence[Step], config: SamplerConfig) -> Flight:
        first = self._sides[0]
        with on(first.device):
            flight = first.draws.launch(self._gathered(steps), steps[0].inputs, config)
        watch = self._watch()  # behind the choices too
        return replace(flight, events=watch.events, check=partial(self._require, watch))

    def fill(self, caches: Caches, tokens: Sequence[int], pos: int) -> None:
        """Run `tokens` likewise for the caches alone, and wait for nothing."""
        self._run(caches, tokens, pos, has_head=False)

    def settle(self) -> None:
        """Wait for everything that was launched.

        Raises:
            EngineError: since the last time a join has waited in vain, and what ran after it is in no cache.
        """
        watch = self._watch()
        for event in watch.events:
            event.synchronize()
        self._require(watch)

    def _watch(self) -> _Watch:
        """Start to look whether a join waited in vain, behind everything that was launched."""
        watch = next(self._watches)
        for link, word in zip(self._links, watch.words, strict=True):
            with on(link.mine.error.device):
                word.copy_(link.mine.error, non_blocking=True)
        for side, event in zip(self._sides, watch.events, strict=False):  # none on a CPU
            with on(side.device):
                event.record()
        return watch

    def _require(self, watch: _Watch) -> None:
        """Refuse what ran behind a join that waited in vain, and connect the GPUs anew; see `settle`."""
        if not any(word.numpy()[0] for word in watch.words):  # no operation of torch: see `_Staging`
            return
        for side in self._sides:
            side.wait()  # for what was launched since
        self._connect_anew()
        names = " and ".join(str(side.device) for side in self._sides)
        raise EngineError(
            f"{names} lost each other: one waited in vain for the other's half of a sum. They are connected anew;"
            " go on from the last committed position",
            param="devices",
        )

    def _run(
        self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool, drafted: Tensor | None = None
    ) -> list[Step]:
        steps = []
        for side in self._sides:
            with on(side.device):
                steps.append(side.begin(tokens, pos, drafted))
        self._go(steps, caches, has_head=has_head)
        return steps

    def _go(self, steps: Sequence[Step], caches: Caches, *, has_head: bool) -> None:
        """Launch what stands ready."""
        halves = list(zip(self._sides, steps, caches.copies, strict=True))
        key = steps[0].key(has_head=has_head)
        if self.device.type == "cuda" and key not in self._tried:
            self._try(halves, has_head=has_head)
            self._tried.add(key)
        if not self._sides[0].graphs.is_on:
            self._launch(halves, has_head=has_head)
            return
        for side, step, own in halves:
            with on(side.device):
                if key not in own.graphs:
                    side.graphs.capture(own.graphs, key, partial(side.launch, step, own, has_head=has_head))
        for side, _, own in halves:
            with on(side.device):
                own.graphs[key].replay()

    def _gathered(self, steps: Sequence[Step]) -> Tensor:
        return self._sides[0].gathered([side.left(step) for side, step in zip(self._sides, steps, strict=True)])

    def _try(self, halves: _Halves, *, has_head: bool) -> None:
        """Run either half alone. What it leaves in the caches is written again by the forward that follows."""
        for (side, step, own), link in zip(halves, self._hasty, strict=True):
            with on(side.device):
                trial = Trial(link=link, boundary=Boundary.empty(step.rows, self._width, side.device))
                side.launch(replace(step, trial=trial), own, has_head=has_head)
        for side in self._sides:
            side.wait()

    def _launch(self, halves: _Halves, *, has_head: bool) -> None:
        """Launch both, by turns from join to join."""
        turns = [side.launches(step, own, has_head=has_head) for side, step, own in halves]

        def push(halves_of_sum: Sequence[Tensor]) -> None:
            for (_, step, _), y in zip(halves, halves_of_sum, strict=True):
                step.push(y)

        take_turns([side.device for side in self._sides], turns, push)

    def _connect_anew(self) -> None:
        """Begin to count joins from the first again, where the graphs look for it."""
        for link in self._links:
            with on(link.mine.error.device):
                for words in (link.mine.words, link.mine.counts, link.mine.error):
                    words.zero_()
        for side in self._sides:
            side.wait()
