"""What a stretch of launches takes, on the clock of whoever runs them."""

from __future__ import annotations

import time

import torch


class Lap:
    """Begins when it is made; on a GPU, behind what the current stream was given."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
        self._began = self._ended = time.perf_counter()
        if self._events:
            self._events[0].record(torch.cuda.current_stream(device))
        self._device = device

    def stop(self) -> None:
        """End it, behind what was launched since."""
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._device))

    def ms(self) -> float:
        """Return what it took, once its end was waited for."""
        if not self._events:
            return 1e3 * (self._ended - self._began)
        first, last = self._events
        return float(first.elapsed_time(last))
