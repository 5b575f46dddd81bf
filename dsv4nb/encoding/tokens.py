"""Segments ↔ token ids (encoding.md section 2).

Text of messages is encoded by a second tokenizer that knows no added token, so whatever a person types, it
never becomes a control id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, THINK_CLOSE, THINK_OPEN, USER
from dsv4nb.encoding.render import Segment
from dsv4nb.errors import EncodingError

_REQUIRED = (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML)


class ChatTokenizer:
    """A byte-level BPE tokenizer.json with the chat's control tokens."""

    def __init__(self, tokenizer_json: str, source: str = "tokenizer.json") -> None:
        """Build both tokenizers.

        Raises:
            EncodingError: the file cannot be read or lacks a control token.
        """
        try:
            raw = json.loads(tokenizer_json)
            whole = Tokenizer.from_str(tokenizer_json)
            plain = Tokenizer.from_str(json.dumps({**raw, "added_tokens": []}))
        except Exception as error:  # the Rust side raises bare Exception
            raise EncodingError(f"{source} is not a readable tokenizer: {error}") from error
        added: dict[str, int] = {t["content"]: t["id"] for t in raw.get("added_tokens") or ()}
        if missing := [t for t in _REQUIRED if t not in added]:
            raise EncodingError(f"{source} lacks the control tokens {', '.join(missing)}; take the model's own file")
        self._whole, self._plain, self._added = whole, plain, added
        longest_first = sorted(added, key=len, reverse=True)
        self._control = re.compile("|".join(re.escape(t) for t in longest_first))
        try:
            self._bytes = _byte_table(raw["model"]["vocab"], added)
        except KeyError as error:
            raise EncodingError(
                f"{source} is not a byte-level BPE tokenizer: it lacks or cannot map {error}"
            ) from error

    @classmethod
    def from_file(cls, path: str | Path) -> ChatTokenizer:
        """Read a tokenizer.json."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EncodingError(f"{path} cannot be read: {error}") from error
        return cls(text, str(path))

    @property
    def vocab_size(self) -> int:
        """Ids in use, control tokens included."""
        return len(self._bytes)

    @property
    def bos_id(self) -> int:
        return self._added[BOS]

    @property
    def eos_id(self) -> int:
        return self._added[EOS]

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of all added tokens."""
        return frozenset(self._added.values())

    def id_of(self, control: str) -> int:
        """Return the id of a control token.

        Raises:
            EncodingError: this tokenizer has no such token.
        """
        if control not in self._added:
            raise EncodingError(f"the tokenizer has no control token {control!r}")
        return self._added[control]

    def encode_segments(self, segments: Iterable[Segment], *, trust_text: bool = False) -> list[int]:
        """Return the prompt's ids; nothing is added around them.

        Args:
            trust_text: let text of messages become control tokens, as the official encoder's string would.
        """
        if trust_text:
            return self.encode_trusted("".join(segment.text for segment in segments))
        ids: list[int] = []
        run: list[str] = []  # neighbouring plain text of both kinds: the official string merges across the seam
        for segment in segments:
            if not segment.trusted:
                run.append(segment.text)
                continue
            start = 0
            for match in self._control.finditer(segment.text):
                run.append(segment.text[start : match.start()])
                ids += self.encode_plain("".join(run))
                ids.append(self._added[match[0]])
                run, start = [], match.end()
            run.append(segment.text[start:])
        return ids + self.encode_plain("".join(run))

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of text that is nothing but text."""
        return _encode(self._plain, text)

    def encode_trusted(self, text: str) -> list[int]:
        """Return the ids of a whole prompt string, control tokens matched."""
        return _encode(self._whole, text)

    def count(self, text: str) -> int:
        """Count the tokens of plain text."""
        return len(self.encode_plain(text))

    def token_bytes(self, token: int) -> bytes:
        """Return what an id stands for; b"" for ids of the model that the tokenizer does not use."""
        if token < 0:
            raise EncodingError(f"token id is {token}; ids are 0 or more")
        return self._bytes.get(token, b"")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included; broken characters become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    except TypeError as error:  # its only objection to a str
        raise EncodingError("the text holds half a surrogate pair, which is no character") from error
    return ids


def _byte_table(vocab: dict[str, int], added: dict[str, int]) -> dict[int, bytes]:
    """Map every id to its bytes, undoing the printable alphabet of byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    to_byte = {chr(b): b for b in printable}
    to_byte |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in set(printable))}
    table = {i: t.encode() for t, i in added.items()}
    for token, i in vocab.items():
        if i not in table:
            table[i] = bytes(to_byte[c] for c in token)
    return table
