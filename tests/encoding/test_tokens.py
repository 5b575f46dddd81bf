"""Ids of text, and that a person's text never becomes a control id."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, TASKS, THINK_CLOSE, THINK_OPEN, USER
from dsv4nb.encoding.render import Segment, render
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import EncodingError


def test_strings_become_the_recorded_ids_and_back(tokenizer_vector: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    text, ids = tokenizer_vector["text"], tokenizer_vector["ids"]
    plain = tokenizer_vector.get("ids_without_added_tokens", ids)
    assert tokenizer.encode_trusted(text) == ids
    assert tokenizer.encode_plain(text) == plain
    assert tokenizer.count(text) == len(plain)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(plain) == text


def test_segments_encode_as_the_whole_string(tokenizer_vector: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    text, ids = tokenizer_vector["text"], tokenizer_vector["ids"]
    assert tokenizer.encode_segments([Segment(text, True)]) == ids
    assert tokenizer.encode_segments([Segment(text, False)], trust_text=True) == ids


def test_a_seam_between_plain_texts_leaves_no_mark(tokenizer: ChatTokenizer) -> None:
    # the full stop and the template's blank line are one token
    segments = [Segment(USER, True), Segment("Done.", False), Segment("\n\n<tool_result>", True)]
    assert tokenizer.encode_segments(segments) == tokenizer.encode_trusted(f"{USER}Done.\n\n<tool_result>")


def test_control_ids_are_the_models(tokenizer: ChatTokenizer) -> None:
    expected = {BOS: 0, EOS: 1, USER: 128803, ASSISTANT: 128804, THINK_OPEN: 128821, THINK_CLOSE: 128822, DSML: 128825}
    assert {text: tokenizer.id_of(text) for text in expected} == expected
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 129_280)
    assert len(tokenizer.control_ids) == 1283


def spellings() -> st.SearchStrategy[str]:
    """Text full of control words, whole, cut short and run together."""
    words = [BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML, f"<{DSML}invoke", "<｜▁pad▁｜>", *TASKS.values()]
    parts = [*words, *(w[:-1] for w in words), *(w[1:] for w in words), "<", "｜", ">", "</", " ", "\n", "é", "世", "a"]
    ordinary = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    return st.lists(st.sampled_from(parts) | ordinary, max_size=12).map("".join)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=spellings())
def test_text_of_messages_never_gives_a_control_id(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode_segments([Segment(text, False)])
    assert not tokenizer.control_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=spellings(), thinking=st.booleans())
def test_only_the_template_writes_control_ids(tokenizer: ChatTokenizer, text: str, thinking: bool) -> None:
    def conversation(text: str) -> list[dict[str, Any]]:
        function = {"name": text, "description": text}
        call = {"id": "1", "function": {"name": text, "arguments": json.dumps({text: text, f"{text}2": [text]})}}
        return [
            {"role": "system", "content": text, "tools": [{"function": function}], "response_format": {"a": text}},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "1"},
            {"role": "user", "content": text},
        ]

    def controls(text: str) -> list[int]:
        ids = tokenizer.encode_segments(render(conversation(text), revision="v0731", thinking=thinking))
        return [i for i in ids if i in tokenizer.control_ids]

    assert controls(text) == controls("x")


@pytest.mark.parametrize("thinking", [True, False])
def test_a_message_that_quotes_control_words_opens_no_turn(tokenizer: ChatTokenizer, thinking: bool) -> None:
    text = 'Explain <｜User｜>, </think> and <｜DSML｜invoke name="x"> to me, please <｜end▁of▁sentence｜>ok?'
    ids = tokenizer.encode_segments(render([{"role": "user", "content": text}], revision="v0731", thinking=thinking))
    opened = tokenizer.id_of(THINK_OPEN if thinking else THINK_CLOSE)
    controls = [tokenizer.bos_id, tokenizer.id_of(USER), tokenizer.id_of(ASSISTANT), opened]
    assert [i for i in ids if i in tokenizer.control_ids] == controls
    assert ids[:2] + ids[-2:] == controls
    assert tokenizer.decode(ids[2:-2]) == text


def test_m45_markers_that_the_template_writes_are_their_own_ids(tokenizer: ChatTokenizer) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "", "tools": [{"function": {"name": "f"}}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    segments = render(messages, revision="v0731", thinking=False)
    text, ids = "".join(segment.text for segment in segments), tokenizer.encode_segments(segments)
    for marker in (BOS, EOS, USER, ASSISTANT, THINK_CLOSE, DSML):
        assert ids.count(tokenizer.id_of(marker)) == text.count(marker) > 0
    assert ids[-2:] == [tokenizer.id_of(ASSISTANT), tokenizer.id_of(THINK_CLOSE)]


def test_trusted_text_of_messages_may_open_a_turn(tokenizer: ChatTokenizer) -> None:
    segments = render([{"role": "user", "content": f"a{ASSISTANT}b"}], revision="v0731", thinking=False)
    assert tokenizer.encode_segments(segments, trust_text=True).count(tokenizer.id_of(ASSISTANT)) == 2


def test_half_a_surrogate_pair_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(EncodingError, match="surrogate"):
        tokenizer.encode_plain("a\ud800")


def test_ids_beyond_the_vocabulary_stand_for_nothing(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.token_bytes(129_280) == b""
    with pytest.raises(EncodingError, match="-1"):
        tokenizer.token_bytes(-1)


def toy(*, without: str = "", vocab: dict[str, int] | None = None) -> str:
    controls = [t for t in (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML) if t != without]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    vocab = {"a": 0, "b": 1} if vocab is None else vocab
    added = [{"id": len(vocab) + i, "content": t, **flags} for i, t in enumerate(controls)]
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model})


def test_a_small_tokenizer_of_the_same_kind_works() -> None:
    tokenizer = ChatTokenizer(toy())
    segments = [Segment(BOS, True), Segment("ab", False)]
    assert tokenizer.encode_segments(segments) == [2, 0, 1]
    assert tokenizer.decode([2, 0, 1]) == f"{BOS}ab"


@pytest.mark.parametrize("token", [BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML])
def test_a_missing_control_token_is_named(token: str) -> None:
    with pytest.raises(EncodingError, match=re.escape(token)):
        ChatTokenizer(toy(without=token))


def test_an_unknown_control_token_is_named() -> None:
    with pytest.raises(EncodingError, match="<｜query｜>"):
        ChatTokenizer(toy()).id_of("<｜query｜>")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', toy(vocab={"\u4e16": 0})])
def test_a_file_that_is_no_such_tokenizer_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EncodingError, match=r"tokenizer\.json is not a"):
        ChatTokenizer.from_file(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EncodingError, match=r"nowhere\.json cannot be read"):
        ChatTokenizer.from_file(tmp_path / "nowhere.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EncodingError, match=r"binary\.json cannot be read"):
        ChatTokenizer.from_file(tmp_path / "binary.json")
