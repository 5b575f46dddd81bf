"""The thoughts of a turn that made calls: each run has its own, and they are read one after the other."""

from __future__ import annotations

from dataclasses import replace

from dsv4nb.events import Event, PromptUsage, Token

GAP = "\n\n"  # between the thoughts of two runs


class Apart:
    """Sets the thoughts of a run apart from those of the runs before it; called with each event of a turn in order."""

    def __init__(self) -> None:
        self._has_thought = self._is_another = False

    def __call__(self, event: Event) -> Event:
        """Return the event; the first thought of another run has the gap in front."""
        match event:
            case PromptUsage():
                self._is_another = self._has_thought
            case Token(channel="reasoning", text=text) if text:
                is_first, self._has_thought, self._is_another = self._is_another, True, False
                return replace(event, text=GAP + text) if is_first else event
            case _:
                pass
        return event
