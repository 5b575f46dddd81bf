"""Events as they are written: by one thread, read by any number of others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from dsv4nb.events import Done, Event, Failed, Generation

logger = logging.getLogger(__name__)

State = Literal["queued", "running", "done", "cancelled", "failed"]
OnEnd = Callable[[Generation | Failed, Sequence[Event]], None]


class Log:
    """What a request has said so far, and where it stands."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.events: list[Event] = []
        self.state: State = "queued"
        self._watchers: tuple[Callable[[], None], ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether the last event was written."""
        return self.state not in ("queued", "running")

    def poll(self, start: int) -> tuple[list[Event], bool]:
        """Return the events from index `start` on, without waiting, and whether these were the last."""
        with self.changed:
            return self.events[start:], self.is_finished

    def wait(self, start: int | None, timeout: float) -> bool:
        """Wait until there are more than `start` events or the run has ended; None waits for the end."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self.is_finished or (start is not None and len(self.events) > start), timeout
            )

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each change, on the thread that makes it; it must not block.

        Returns:
            A function that ends this.
        """
        with self.changed:
            self._watchers = (*self._watchers, callback)

        def remove() -> None:
            with self.changed:
                self._watchers = tuple(other for other in self._watchers if other is not callback)

        return remove

    def write(self, events: Sequence[Event], state: State | None = None) -> None:
        """Tell readers events, and a new state."""
        with self.changed:
            self.events += events
            self.state = state or self.state
            self.changed.notify_all()
            watchers = self._watchers
        for callback in watchers:
            callback()

    def end(self, last: Sequence[Event], outcome: Callable[[], Generation | Failed], on_end: OnEnd | None) -> None:
        """Write the last events; `on_end` is called before anybody sees them, and cannot keep them back."""
        try:
            if on_end is not None:
                on_end(outcome(), (*self.events, *last))
        except Exception:
            logger.exception("what listens for the end of a request failed")
        finally:
            self.write(last, _state_after(last[-1]))


def _state_after(last: Event) -> State:
    if not isinstance(last, Done):
        return "failed"
    return "cancelled" if last.stop_reason == "cancelled" else "done"
