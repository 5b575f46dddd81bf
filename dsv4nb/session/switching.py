"""While a request runs, Python changes threads sooner than it does by default.

A cell that computes in pure Python keeps the interpreter for 5 ms at a time, and the serving thread needs it several
times per step. `python -m dsv4nb.bench gil`, two quiet cores: a step that waits 4 ms for a device, as a captured graph
does, keeps 44 % of its speed beside such a cell at 5 ms, 87 % at 0.5 ms and 97 % at 0.1 ms, and the cell loses 3 %. So
the engine stays a thread of the notebook's process. The bundled model on a CPU takes the interpreter hundreds of times
per token: it keeps a quarter at best, and was seen to all but stop, most of all at 5 ms (0.1 tokens/s).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 1e-4

_lock = threading.Lock()
_running = 0
_before = _ours = 0.0


@contextmanager
def brisk_switching() -> Iterator[None]:
    """Shorten the interval as long as any block runs; an interval that is shorter already stays."""
    global _running, _before, _ours
    with _lock:
        _running += 1
        if _running == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(INTERVAL_S, _before))
            _ours = sys.getswitchinterval()  # microseconds, rounded down
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            # whoever has set another interval meanwhile keeps it
            if _running == 0 and sys.getswitchinterval() == _ours:
                sys.setswitchinterval(_before)
