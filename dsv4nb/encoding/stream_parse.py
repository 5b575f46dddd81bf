"""Generated text → reasoning, content and tool-call text as it arrives (encoding.md section 9).

This splits; what stands inside a block is read by whoever gets the "tool" channel.
"""

from __future__ import annotations

import re
from typing import Literal

from dsv4nb.encoding.constants import DSML, EOS, THINK_CLOSE, THINK_OPEN

Channel = Literal["reasoning", "content", "tool", "hidden"]
_State = Literal["reasoning", "content", "block", "invoke", "parameter", "done"]

# the first is the format's; models were seen to write the others
_NAMES = ("tool_calls", "toolcalls", "function_calls")
_OPENERS = tuple(f"<{DSML}{name}>" for name in _NAMES)
_CLOSERS = tuple(f"</{DSML}{name}>" for name in _NAMES)
_INVOKE, _INVOKE_CLOSE = f"<{DSML}invoke", f"</{DSML}invoke>"
_PARAMETER, _PARAMETER_CLOSE = f"<{DSML}parameter", f"</{DSML}parameter>"
_BLANKS = " \t\r\n"

_PLAIN = (THINK_OPEN, THINK_CLOSE, EOS)
_ORPHANS = (*_CLOSERS, _INVOKE_CLOSE, _PARAMETER_CLOSE)

# what ends or changes a state; every marker starts with the only "<" it has, and none begins another
_MARKERS: dict[_State, tuple[str, ...]] = {
    "reasoning": (*_PLAIN, *_OPENERS),
    "content": (*_PLAIN, *_OPENERS, _INVOKE, *_ORPHANS),
    "block": (EOS, *_CLOSERS, _INVOKE),
    "invoke": (EOS, *_CLOSERS, _INVOKE_CLOSE, _PARAMETER),
    # a value may quote any tag but its own closer
    "parameter": (EOS, _PARAMETER_CLOSE),
    "done": (),
}


def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


_PATTERNS = {state: _pattern(markers) for state, markers in _MARKERS.items() if markers}
_WITHOUT_TOOLS = _pattern(_PLAIN)


class Splitter:
    """Sorts generated text into channels; joined in order they are the text again, character by character.

    "hidden" holds what nobody is shown: control tokens, the up to two newlines in front of a block, and all
    that follows a block or the end token. The result does not depend on how the text is cut into deltas. A
    tail that could still become a marker, newlines that could still be a separator and an opener that no
    invocation has followed yet are held back, so nothing shown is ever taken back.

    Args:
        thinking: whether the prompt ended in `<think>`.
        tools_enabled: whether tools were offered; otherwise a block is ordinary text.
    """

    def __init__(self, *, thinking: bool, tools_enabled: bool = False) -> None:
        self._state: _State = "reasoning" if thinking else "content"
        self._tools = tools_enabled
        self._held = ""
        self._out: list[tuple[Channel, str]] = []
        self._reasoning_end = ""  # last character of the reasoning so far
        self._answered = False  # something visible stands in content
        self._block_closed = False

    @property
    def block_closed(self) -> bool:
        """Whether a block of calls is complete: generation stops here."""
        return self._block_closed

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """Take a delta; return what may be shown now."""
        text, self._held = self._held + text, ""
        start = 0
        while self._state != "done" and (match := self._pattern().search(text, start)):
            end = self._take(text, start, match.start(), match[0])
            if end is None:  # an opener whose sequel decides what it was
                held = self._separator(text, start, match.start())
                return self._release(text, start, held)
            start = end
        return self._release(text, start, self._safe_end(text, start))

    def flush(self) -> list[tuple[Channel, str]]:
        """End of the stream; return what was held back, which is no marker."""
        text, self._held = self._held, ""
        return self._release(text, 0, len(text))

    def _pattern(self) -> re.Pattern[str]:
        return _PATTERNS[self._state] if self._tools else _WITHOUT_TOOLS

    def _release(self, text: str, start: int, end: int) -> list[tuple[Channel, str]]:
        self._emit(self._channel(), text[start:end])
        self._held = text[end:]
        out, self._out = self._out, []
        return out

    def _channel(self) -> Channel:
        if self._state == "done":
            return "hidden"
        return self._state if self._state in ("reasoning", "content") else "tool"

    def _emit(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if channel == "reasoning":
            self._reasoning_end = text[-1]
        elif channel == "content":
            self._answered = self._answered or bool(text.strip(_BLANKS))
        if self._out and self._out[-1][0] == channel:
            text = self._out.pop()[1] + text
        self._out.append((channel, text))

    def _safe_end(self, text: str, start: int) -> int:
        """Return where the tail begins that is not yet decided."""
        if self._state == "done":
            return len(text)
        markers = _MARKERS[self._state] if self._tools else _PLAIN
        end = text.rfind("<", start)
        if end < 0 or not any(marker.startswith(text[end:]) for marker in markers):
            end = len(text)
        return self._separator(text, start, end)

    def _separator(self, text: str, start: int, end: int) -> int:
        """Return where the up to two newlines that end at `end` begin."""
        if self._tools and self._state in ("reasoning", "content"):
            for _ in range(2):
                end -= end > start and text[end - 1] == "\n"
        return end

    def _take(self, text: str, start: int, at: int, marker: str) -> int | None:
        """Handle the marker found at `at`; return where to go on, None when more text is needed."""
        end = at + len(marker)
        if self._state not in ("reasoning", "content"):
            self._inside(text, start, at, marker)
            return end
        if marker in _OPENERS or marker == _INVOKE:
            kind = self._opens(text, start, at, marker)
            if kind is None:
                return None
            if kind:
                separator = self._separator(text, start, at)
                self._emit(self._channel(), text[start:separator])
                self._emit("hidden", text[separator:at])
                self._emit("tool", marker)
                self._state = "invoke" if marker == _INVOKE else "block"
                return end
        self._emit(self._channel(), text[start:at])
        self._in_text(marker)
        return end

    def _in_text(self, marker: str) -> None:
        """Handle a marker within reasoning or content that opens no block."""
        state = self._state
        literal = marker in _OPENERS
        if marker == EOS:
            self._state = "done"
        elif marker == THINK_CLOSE:
            self._state = "content"
        elif marker == THINK_OPEN and state == "content":
            # a model asked not to think may do so first thing
            literal = self._answered or bool(self._reasoning_end)
            self._state = "content" if literal else "reasoning"
        self._emit(state if literal and state in ("reasoning", "content") else "hidden", marker)

    def _opens(self, text: str, start: int, at: int, marker: str) -> bool | None:
        """Tell whether `marker` opens a block; None when the text so far does not."""
        if marker == _INVOKE:
            return True
        if self._state == "reasoning":
            before = text[at - 1] if at > start else self._reasoning_end
            if before not in ("", "\n"):
                return False
        sequel = text[at + len(marker) :].lstrip(_BLANKS)
        expected = (_INVOKE, *_CLOSERS)
        if sequel.startswith(expected):
            return True
        return None if any(e.startswith(sequel) for e in expected) else False

    def _inside(self, text: str, start: int, at: int, marker: str) -> None:
        """Handle a marker within a block."""
        self._emit("tool", text[start:at])
        self._emit("hidden" if marker == EOS else "tool", marker)
        if marker == EOS or marker in _CLOSERS:
            self._state = "done"
            self._block_closed = marker != EOS
        elif marker == _PARAMETER:
            self._state = "parameter"
        elif marker == _INVOKE_CLOSE:
            self._state = "block"
        else:  # an invocation begins, or goes on after a value
            self._state = "invoke"
