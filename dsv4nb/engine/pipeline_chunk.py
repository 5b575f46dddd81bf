"""Chunks of a prompt on several GPUs, each with the span of layers that it holds, from one thread; see `rank_chunk`.

A GPU begins a chunk when the one before has left it (`handover`), and the one before goes on with the next chunk
meanwhile: so of a long prompt all GPUs compute at once. Streams order themselves; the host waits as on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.rank_chunk import RankChunk


class Running(Protocol):
    """A GPU on whose stream launches go."""

    def running(self) -> AbstractContextManager[None]: ...


class PipelineChunk:
    """Runs chunks of prompts through all spans; a CPU may stand for all GPUs.

    Args:
        spans: with what runs chunks of each, the first one first.

    Attributes:
        most: rows of the longest chunk.
    """

    def __init__(self, spans: Sequence[tuple[Running, RankChunk]]) -> None:
        self._spans, self.most = tuple(spans), spans[0][1].most

    @property
    def nbytes(self) -> tuple[int, ...]:
        """What chunks take on each GPU, as `RankChunk` says it."""
        return tuple(nbytes for _, chunks in self._spans for nbytes in chunks.nbytes)

    def run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> npt.NDArray[np.float32] | None:
        """Run `tokens` at positions pos …, as `RankChunk` does: [1, V] with a head."""
        logits = None
        rows = self._spans[0][1].rows_of(caches, len(tokens), pos)
        before: RankChunk | None = None
        for number, (span, chunks) in enumerate(self._spans, 1):
            ends = has_head and number == len(self._spans)
            with span.running():
                chunks.begin(tokens, pos, rows)
                if before is not None:
                    goes, came = before.handover("goes", caches, rows), chunks.handover("came", caches, rows)
                    came.whole.copy_(goes.whole, non_blocking=True)
                for _ in chunks.replays(caches, rows, pos, has_head=ends):
                    pass
            before = chunks
        for number, (span, chunks) in enumerate(self._spans, 1):
            with span.running():
                logits = chunks.end(has_head=has_head and number == len(self._spans))
        return logits
