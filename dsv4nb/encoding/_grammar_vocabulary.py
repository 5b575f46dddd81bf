"""A tokenizer as the grammar library and its masks need it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from dsv4nb.encoding.constants import DSML, THINK_CLOSE

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]


class Tokens(Protocol):
    """The part of a tokenizer that a grammar needs; the bytes of an id are what counts."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def control_ids(self) -> frozenset[int]: ...
    def __hash__(self) -> int: ...
    def id_of(self, control: str, /) -> int: ...
    def token_bytes(self, token: int, /) -> bytes: ...


class Vocabulary:
    """The ids of a tokenizer, by what they spell.

    Attributes:
        size: ids that have bytes are below it.
        texts: bytes of each id, b"" for one that is not used.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._controls = tokens.control_ids
        self.size = max(tokens.vocab_size, max(self._controls) + 1)
        self.eos_id, self.dsml_id, self.think_close_id = tokens.eos_id, tokens.id_of(DSML), tokens.id_of(THINK_CLOSE)
        self.texts = [tokens.token_bytes(token) for token in range(self.size)]
        plain = ((text, token) for token, text in enumerate(self.texts) if text and token not in self._controls)
        self._sorted = sorted(plain)
        self._spelling: dict[bytes, Ids] = {}
        self._completing: dict[tuple[bytes, int], Ids] = {}

    @cached_property
    def library(self) -> LLTokenizer:
        """The same, for llguidance; control ids are none of their bytes there."""
        return LLTokenizer(TokenizerWrapper(_Source(self.texts, self.eos_id, sorted(self._controls))))

    def is_control(self, token: int) -> bool:
        """Whether an id stands for something that text cannot say."""
        return token in self._controls

    @cached_property
    def used(self) -> Mask:
        """[size], True for ids that have bytes; not to be changed."""
        return np.array([bool(text) for text in self.texts])

    def spelling(self, marker: bytes) -> Ids:
        """Return the plain ids that hold the whole of `marker`."""
        if marker not in self._spelling:
            long = (entry for entry in self._sorted if len(entry[0]) >= len(marker))
            self._spelling[marker] = _ids(entry for entry in long if marker in entry[0])
        return self._spelling[marker]

    def completing(self, marker: bytes, present: int) -> Ids:
        """Return the plain ids that complete `marker` when its first `present` bytes, 1 or more, stand before."""
        key = marker, present
        if key not in self._completing:
            rest = marker[present:]
            begin = bisect_left(self._sorted, rest, key=lambda entry: entry[0])
            end = bisect_right(self._sorted, rest, key=lambda entry: entry[0][: len(rest)])
            self._completing[key] = _ids(self._sorted[begin:end])
        return self._completing[key]


def _ids(entries: Iterable[tuple[bytes, int]]) -> Ids:
    return np.array([token for _, token in entries], np.int64)


class _Source:
    """What llguidance reads a vocabulary from."""

    bos_token_id = None

    def __init__(self, texts: list[bytes], eos_id: int, control_ids: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = texts, eos_id, control_ids

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("nothing is forced, so nothing is ever encoded")
