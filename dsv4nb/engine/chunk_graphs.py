"""What a chunk launches on one GPU, captured as CUDA graphs: the host launches one in place of many kernels.

Of GPUs that share the weights each has a graph from join to join. A chunk's launches depend on few things that the host
knows (`Key`): where its rows stand, and how many of them are tokens, comes from the device. A shape is launched kernel
by kernel the first time, which compiles its kernels, captured the second time, and replayed from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.graphs import Graphs, Held

MOST = 32  # shapes that are captured on the same caches; others are launched kernel by kernel


class Key(NamedTuple):
    """What the launches of a chunk depend on besides its caches.

    Attributes:
        rows: T.
        keys: index keys that are scored; 0 where every row reads all that it sees.
        piece: of the outputs, that the first sublayer writes.
        room_bytes: of what the chunks of a GPU share; where more was taken, something may have moved.
    """

    rows: int
    keys: int
    piece: int
    has_head: bool
    room_bytes: int


class _Pieces:
    """The graphs of one shape, and what each of them yields; the last one yields nothing."""

    def __init__(self) -> None:
        self.graphs: Held = {}
        self.parts: list[Tensor | None] = []


class ChunkGraphs:
    """Captures and replays on one GPU; on a CPU, and where it is off, it launches each time.

    Args:
        joins: whether what launches yield is joined with other GPUs' before they go on.
    """

    def __init__(self, device: torch.device, *, is_on: bool, joins: bool) -> None:
        self._graphs, self._joins = Graphs(device, is_on=is_on), joins
        # of each caches' addresses; None of a shape that was launched once
        self._held: WeakKeyDictionary[Caches, dict[Key, _Pieces | None]] = WeakKeyDictionary()

    def run(self, caches: Caches, key: Key, launches: Callable[[], Iterator[Tensor]]) -> Iterator[Tensor]:
        """Launch what `launches` launches, and yield what it yields where that is joined.

        Args:
            launches: of the same key, yields the same tensors each time.
        """
        held = self._held.setdefault(caches, {})
        if not self._graphs.is_on or (key not in held and len(held) == MOST):
            yield from launches()
        elif key not in held:
            yield from launches()
            held[key] = None
        elif (pieces := held[key]) is None:
            yield from self._capture(held, key, launches())
        else:
            for number, part in enumerate(pieces.parts):
                pieces.graphs[number].replay()
                if part is not None:
                    yield part

    def _capture(self, held: dict[Key, _Pieces | None], key: Key, launches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Capture piece by piece, and run each before the next one is captured: a join comes between."""
        pieces = _Pieces()

        def launch() -> None:
            if not self._joins:
                for _ in launches:
                    pass
            pieces.parts.append(next(launches, None))

        while not pieces.parts or pieces.parts[-1] is not None:
            number = len(pieces.parts)
            with warnings.catch_warnings():  # behind the last join there may be nothing left to do
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                self._graphs.capture(pieces.graphs, number, launch)
            pieces.graphs[number].replay()
            if (part := pieces.parts[-1]) is not None:
                yield part
        held[key] = pieces
