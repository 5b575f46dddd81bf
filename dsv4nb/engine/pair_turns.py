"""Two GPUs from one thread: the launches of both, by turns from join to join."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one inside; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def take_turns(
    devices: Sequence[torch.device], turns: Sequence[Iterator[Tensor]], join: Callable[[Sequence[Tensor]], None]
) -> None:
    """Launch everything that ranks have to launch.

    Args:
        turns: of each rank, launches; it yields its own part of a sum before that is joined, as often as the others do.
        join: called with the parts of all ranks once their kernels are launched, and before anything behind them is.
    """
    while True:
        parts = []
        for device, turn in zip(devices, turns, strict=True):
            with on(device):
                parts.append(next(turn, None))
        there = [part for part in parts if part is not None]
        if not there:
            return
        assert len(there) == len(parts), "a part of a sum that nobody else has"
        join(there)
