"""How much memory is free, and how long a session can get in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path


def largest_session(state_bytes: Callable[[int], Mapping[str, int]], max_seq: int, free_bytes: int) -> int:
    """Return the most positions, at most `max_seq`, whose caches fit into `free_bytes`; 0 when not even one does.

    Args:
        state_bytes: positions -> bytes per class of cache; does not fall with more positions.
    """
    fits, too_many = 0, max_seq + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if sum(state_bytes(middle).values()) <= free_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


def free_host_bytes() -> int:
    """Return the memory that a process can take without pushing others out, as the system estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
