"""The tags of a reply: which of them count in which state of the parser (encoding.md section 9.1)."""

from __future__ import annotations

import re
from typing import Literal

from dsv4nb.encoding.constants import CALLS_CLOSE, CALLS_OPEN, DSML, EOS, THINK_CLOSE, THINK_OPEN

BLANKS = " \t\r\n"

# models were seen to write the other two names
OPENERS = (CALLS_OPEN, f"<{DSML}toolcalls>", f"<{DSML}function_calls>")
CLOSERS = (CALLS_CLOSE, f"</{DSML}toolcalls>", f"</{DSML}function_calls>")
INVOKE, INVOKE_CLOSE = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_CLOSE = f"<{DSML}parameter", f"</{DSML}parameter>"
TAG, CLOSING_TAG = f"<{DSML}", f"</{DSML}"
FLAG_TRUE, FLAG_FALSE = '" string="true">', '" string="false">'

BlockState = Literal["block", "invoke", "call", "parameter", "value", "json"]


class Markers:
    """Texts that mean something, and how much of a text's end could become one.

    No marker may begin another or stand within another, so what is found does not depend on how the text is cut.
    """

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._reach = max(map(len, texts)) - 1
        self._whole = re.compile("|".join(map(re.escape, texts)))
        beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        longest_first = sorted(beginnings, key=lambda text: (-len(text), text))
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, longest_first))})\\Z")

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first marker at or after `start`."""
        return self._whole.search(text, start)

    def decided(self, text: str, start: int) -> int:
        """Return where the longest tail begins, at or after `start`, that could become a marker."""
        begun = self._begun.search(text, max(start, len(text) - self._reach))
        return len(text) if begun is None else begun.start()


_PLAIN = (THINK_OPEN, THINK_CLOSE, EOS)

WITHOUT_TOOLS = Markers(*_PLAIN)

OUTSIDE: dict[str, Markers] = {
    "reasoning": Markers(*_PLAIN, *OPENERS),
    "content": Markers(*_PLAIN, *OPENERS, INVOKE, *CLOSERS, INVOKE_CLOSE, PARAMETER_CLOSE),
    "after": Markers(EOS),
}
INSIDE: dict[BlockState, Markers] = {
    "block": Markers(EOS, *CLOSERS, INVOKE),
    # the header ends with its line, or where the next tag begins
    "invoke": Markers(EOS, "\n", TAG, CLOSING_TAG),
    "call": Markers(EOS, *CLOSERS, INVOKE, INVOKE_CLOSE, PARAMETER),
    # the flag ends a header as the format has it; a tag shows that there is none
    "parameter": Markers(EOS, PARAMETER_CLOSE, TAG, FLAG_TRUE, FLAG_FALSE),
    # a value may quote any tag but its own closer
    "value": Markers(EOS, PARAMETER_CLOSE),
    "json": Markers(EOS, *CLOSERS, INVOKE_CLOSE),
}
