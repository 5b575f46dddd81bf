"""Characters that span tokens, dealt out in every way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.detokenize import Detokenizer
from dsv4nb.encoding.tokens import ChatTokenizer

TEXT = "héllo 👩🏽‍💻 世界 a b"
BYTES = TEXT.encode()


class Toy:
    """Token i stands for the i-th piece."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *at, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def partitions() -> Iterator[list[bytes]]:
    for at in range(len(BYTES) + 1):
        yield cut(BYTES, [at])
    for width in range(1, 6):
        yield cut(BYTES, range(width, len(BYTES), width))
    rng = random.Random(7)
    for _ in range(500):
        yield cut(BYTES, sorted(rng.sample(range(1, len(BYTES)), rng.randrange(1, len(BYTES)))))


@pytest.mark.parametrize("per_step", range(1, 7))
def test_every_cut_gives_the_text_once(per_step: int) -> None:
    for pieces in partitions():
        detokenizer = Detokenizer(Toy(pieces))
        ids = range(len(pieces))
        shown = ""
        for start in range(0, len(pieces), per_step):
            delta = detokenizer.feed(ids[start : start + per_step])
            assert "\ufffd" not in delta, pieces
            shown += delta
            assert TEXT.startswith(shown), pieces
        assert detokenizer.flush() == "", pieces
        assert shown == TEXT, pieces


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    a, b = "世".encode(), "界".encode()
    detokenizer = Detokenizer(Toy([a[:2], a[2:] + b[:1], b[1:]]))
    assert [detokenizer.feed([i]) for i in range(3)] == ["", "世", "界"]


def test_a_space_does_not_flush_what_is_pending() -> None:
    detokenizer = Detokenizer(Toy(["é".encode()[:1], "é".encode()[1:], b" x"]))
    assert [detokenizer.feed([i]) for i in range(3)] == ["", "é", " x"]


def test_an_unfinished_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(Toy([b"a\xf0\x9f"]))
    assert detokenizer.feed([0]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@settings(deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=4), max_size=12), st.integers(1, 4))
def test_bytes_that_are_no_text_decode_as_at_once(pieces: list[bytes], per_step: int) -> None:
    detokenizer = Detokenizer(Toy(pieces))
    ids = range(len(pieces))
    shown = "".join(detokenizer.feed(ids[i : i + per_step]) for i in range(0, len(pieces), per_step))
    assert shown + detokenizer.flush() == b"".join(pieces).decode(errors="replace")


def test_real_streams_yield_the_recorded_pieces(stream_vector: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([step[0]]) for step in stream_vector["steps"]] == [s[1] for s in stream_vector["steps"]]
    assert detokenizer.flush() == ""
