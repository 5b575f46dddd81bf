"""Stop strings across deltas."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text through until a stop string is complete.

    The stop that is completed first ends the text; among stops completed by the same character, the longest.
    The result does not depend on how the text is cut into deltas. A tail that could still become a stop is
    held back, so nothing shown is ever taken back.

    Attributes:
        hit: the stop that was completed, None so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Take a delta; return what may be shown now."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """End of the stream; return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Longest proper beginning of `stop` that ends `text`, in characters."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
