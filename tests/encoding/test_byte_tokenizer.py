"""The tokenizer of the 256 bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv4nb.encoding.byte_tokenizer import byte_tokenizer
from dsv4nb.encoding.constants import BOS, EOS, USER
from dsv4nb.encoding.tokens import ChatTokenizer

TOKENS = ChatTokenizer(byte_tokenizer())


@given(st.text())
def test_a_text_is_its_bytes(text: str) -> None:
    ids = TOKENS.encode_plain(text)
    assert len(ids) == len(text.encode()) and all(7 <= i < 263 for i in ids)
    assert TOKENS.decode(ids) == text


def test_control_tokens_come_first_and_begin_and_end_are_those_of_configs() -> None:
    assert (TOKENS.bos_id, TOKENS.eos_id, TOKENS.vocab_size) == (0, 1, 263)
    assert TOKENS.encode_trusted(f"{BOS}{USER}a{EOS}")[:2] == [0, 2]
    assert TOKENS.control_ids == frozenset(range(7))
