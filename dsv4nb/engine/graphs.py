"""Launches that are captured as CUDA graphs the first time, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable

import torch

Held = dict[object, torch.cuda.CUDAGraph]  # by the launcher's key


class Graphs:
    """Captures and replays; on a CPU, and where it is off, it launches each time.

    Attributes:
        pool: of the memory that captures share; None where nothing is captured.
        captured: graphs so far.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self.pool = torch.cuda.graph_pool_handle() if is_on and device.type == "cuda" else None
        self._first: torch.cuda.CUDAGraph | None = None  # kept, since a pool ends with the last graph in it
        self.captured = 0

    @property
    def is_on(self) -> bool:
        return self.pool is not None

    def run(self, held: Held, key: object, launch: Callable[[], None]) -> None:
        """Replay what `held` has of `key`; else launch it, which compiles its kernels, and capture it afterwards.

        Args:
            launch: reads and writes the same addresses each time, allocates nothing after the first, and looks at no
                value.
        """
        if (graph := held.get(key)) is not None:
            graph.replay()
            return
        launch()
        self.capture(held, key, launch)

    def capture(self, held: Held, key: object, launch: Callable[[], None]) -> bool:
        """Capture what was launched before, and return whether that can be."""
        if self.pool is None:
            return False
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        held[key] = graph
        self._first = self._first or graph
        self.captured += 1
        return True
