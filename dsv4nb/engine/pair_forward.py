"""T rows through all layers on two GPUs that share the weights, from one thread.

Each runs every layer with its half of the heads, of the experts' inner width and of the vocabulary; the halves of a
sublayer's output meet in the boundary behind it, twice a layer. Caches are on both, with the same bits.

A GPU that waits in a join for kernels that the host has yet to launch would wait in vain. So the launches of a forward
alternate from join to join, and those of a graph are all there when it is replayed; and every forward runs alone on
either GPU before its first join, with a trial of the joins, so that no kernel is compiled or loaded while the other GPU
waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.rank_drafter import RankDrafter
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.engine.rank_layer import Step, Trial
from dsv4nb.errors import EngineError
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb_kernels._peer import connect
from dsv4nb_kernels.hyper_mix import Boundary

_Halves = Sequence[tuple[RankForward, Step, Caches]]


class PairForward:
    """The network on two GPUs; a CPU may stand for both, which then run in turn.

    Args:
        ranks: two, the first with the first half of everything.
        graphs: as of `RankForward`.

    Attributes:
        device: the first GPU.
        drafter: none; two GPUs do not draft.

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
        self._links = connect(width, places)
        self._hasty = connect(width, places, polls=1)
        self._sides = [
            RankForward(weights, config, contract, max_seq, graphs=graphs, link=link)
            for weights, link in zip(ranks, self._links, strict=True)
        ]
        self._width, self._tried = width, set[tuple[int, bool]]()
        self.device = places[0]
        self.drafter: RankDrafter | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Launch what is inside on the GPUs' streams; the first GPU is the current one."""
        with ExitStack() as stack:
            for side in reversed(self._sides):
                stack.enter_context(side.running())
            yield

    def rows(self, caches: Caches, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Run `tokens` at positions pos … and wait for their logits: [T, V].

        Raises:
            EngineError: a join waited in vain; the caches hold nothing of these rows, and the next forward can run.
        """
        steps = self._run(caches, tokens, pos, has_head=True)
        halves = []
        for side, step in zip(self._sides, steps, strict=True):
            with _on(side.device):
                halves.append(side.logits(step))
        self.settle()
        return np.concatenate([half.numpy() for half in halves], 1)

    def fill(self, caches: Caches, tokens: Sequence[int], pos: int) -> None:
        """Run `tokens` likewise for the caches alone, and wait for nothing."""
        self._run(caches, tokens, pos, has_head=False)

    def settle(self) -> None:
        """Wait for everything that was launched.

        Raises:
            EngineError: since the last time a join has waited in vain, and what ran after it is in no cache.
        """
        errors = []
        for side, link in zip(self._sides, self._links, strict=True):
            with _on(side.device):
                errors.append(side.to_host(link.mine.error))
        for side in self._sides:
            side.wait()
        if any(bool(error[0]) for error in errors):
            self._connect_anew()
            names = " and ".join(str(side.device) for side in self._sides)
            raise EngineError(
                f"{names} lost each other: one waited in vain for the other's half of a sum. They are connected anew;"
                " go on from the last committed position",
                param="devices",
            )

    def _run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> list[Step]:
        steps = []
        for side in self._sides:
            with _on(side.device):
                steps.append(side.begin(tokens, pos))
        halves = list(zip(self._sides, steps, caches.copies, strict=True))
        key = (len(tokens), has_head)
        if self.device.type == "cuda" and key not in self._tried:
            self._try(halves, has_head=has_head)
            self._tried.add(key)
        if not self._sides[0].graphs.is_on:
            self._launch(halves, has_head=has_head)
            return steps
        for side, step, own in halves:
            with _on(side.device):
                if key not in own.graphs:
                    side.graphs.capture(own.graphs, key, partial(side.launch, step, own, has_head=has_head))
        for side, _, own in halves:
            with _on(side.device):
                own.graphs[key].replay()
        return steps

    def _try(self, halves: _Halves, *, has_head: bool) -> None:
        """Run either half alone. What it leaves in the caches is written again by the forward that follows."""
        for (side, step, own), link in zip(halves, self._hasty, strict=True):
            with _on(side.device):
                trial = Trial(link=link, boundary=Boundary.empty(step.rows, self._width, side.device))
                side.launch(replace(step, trial=trial), own, has_head=has_head)
        for side in self._sides:
            side.wait()

    def _launch(self, halves: _Halves, *, has_head: bool) -> None:
        """Launch both, by turns from join to join."""
        turns = [side.launches(step, own, has_head=has_head) for side, step, own in halves]
        is_on_its_way = True
        while is_on_its_way:
            joined = []
            for (side, _, _), turn in zip(halves, turns, strict=True):
                with _on(side.device):
                    joined.append(next(turn, None))
            for (_, step, _), y in zip(halves, joined, strict=True):
                if y is not None:
                    step.push(y)
            is_on_its_way = joined[0] is not None

    def _connect_anew(self) -> None:
        """Begin to count joins from the first again, where the graphs look for it."""
        for link in self._links:
            with _on(link.mine.error.device):
                for words in (link.mine.words, link.mine.counts, link.mine.error):
                    words.zero_()
        for side in self._sides:
            side.wait()


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
