"""A job that the pump does again and again, as long as there is something to tell."""

from __future__ import annotations

import time
from collections.abc import Callable

from dsv4nb.stream.frames import News, Watch


class _Nothing:
    state = ""

    def poll(self, start: int) -> tuple[list[object], bool]:
        return [], False


class Ticks(Watch):
    """Calls `job` on the pump's thread after `period_s`, and again after as long, until it returns False."""

    def __init__(self, period_s: float, job: Callable[[], bool]) -> None:
        super().__init__(0, _Nothing(), lambda news: None)  # type: ignore[arg-type]
        self._period, self._job = period_s, job
        self._due = time.monotonic() + period_s

    def news(self) -> list[News]:
        """Do the job when it is due; there is nothing for a sink."""
        now = time.monotonic()
        if not self.over and now >= self._due:
            self._due = now + self._period
            self.over = not self._job()
        return []
