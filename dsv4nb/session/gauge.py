"""How much of the room a conversation takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4nb.session.limits import SLACK
from dsv4nb.session.request import ChatTokens, Limits, Options, conversation, segments_of

_NOTHING = {"role": "user", "content": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The positions of a sequence, as far as the next prompt takes them.

    Attributes:
        used: by the prompt.
        max_seq: of the longest sequence: prompt, reply and the reserved positions together.
        reserved: kept free behind a reply.
    """

    used: int
    max_seq: int
    reserved: int = SLACK

    @property
    def left(self) -> int:
        """Tokens that a reply can have."""
        return max(0, self.max_seq - self.reserved - self.used)

    def plus(self, n: int) -> Room:
        """Return the room when the prompt is longer by `n` tokens."""
        return replace(self, used=self.used + n)

    def __str__(self) -> str:
        told = f"{self.used:,} of {self.max_seq:,} positions used"
        if not self.left:
            return f"{told}; no reply fits any more: rewind, or start another chat"
        return f"{told}; a reply can have {self.left:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Counts tokens as the model's requests do."""

    tokens: ChatTokens
    limits: Limits

    def count(self, text: str) -> int:
        """Count the tokens of text that stands in a message."""
        return len(self.tokens.encode_plain(text))

    def room(self, messages: Sequence[Mapping[str, Any]], options: Options) -> Room:
        """Return what the next prompt takes before anything is asked: history, declarations, the marks around them.

        Args:
            messages: the history, without its system message.
        """
        rendered = conversation(None, [*messages, _NOTHING], options)
        segments = segments_of(rendered, options, self.limits.revision)
        used = len(self.tokens.encode_segments(segments, trust_text=options.trust_text))
        return Room(used=used, max_seq=self.limits.max_seq)
