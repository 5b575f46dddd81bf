"""Token ids → text as they arrive, in whole characters (encoding.md section 2)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """Whatever knows the bytes of a token."""

    def token_bytes(self, token: int, /) -> bytes:
        """Return what `token` stands for; part of a character is fine."""


class Detokenizer:
    """Turns ids into text, one reply per object.

    A character may span tokens: its first bytes wait for the rest, at most three of them, so the work per
    token does not grow with the reply. The joined text equals the bytes decoded at once, however the ids are
    dealt out; bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, source: TokenBytes) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the characters they complete."""
        return self._decoder.decode(b"".join(map(self._source.token_bytes, ids)))

    def flush(self) -> str:
        """End of the reply; return U+FFFD for a character that was begun and not finished."""
        return self._decoder.decode(b"", final=True)
