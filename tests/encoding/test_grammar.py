"""Masks against brute force, along drafts, around control tokens and the reasoning."""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("llguidance")

import dsv4nb
from dsv4nb.encoding.constants import DSML, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.grammar import Matcher, compile_constraint, constraint_of
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import EngineError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", None]},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
    },
    "required": ["name", "scores"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
CALL = (
    f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>'
)


class TinyTokens:
    """A few byte strings after the control tokens."""

    def __init__(self, *texts: bytes) -> None:
        self._controls = [EOS, THINK_CLOSE, DSML]
        self.texts = [*(control.encode() for control in self._controls), *texts]
        self.eos_id = 0

    @property
    def vocab_size(self) -> int:
        return len(self.texts)

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset(range(3))

    def id_of(self, control: str, /) -> int:
        return self._controls.index(control)

    def token_bytes(self, token: int, /) -> bytes:
        return self.texts[token]


@pytest.fixture(scope="module")
def toy() -> ChatTokenizer:
    """The bundled model's tokenizer: 1,280 ids."""
    return ChatTokenizer.from_file(Path(dsv4nb.__file__).parent / "toy" / "model" / "tokenizer.json")


def matcher_of(tokens: Any, width: int | None = None, **given: Any) -> Matcher:
    nothing: dict[str, Any] = {"response_format": None, "tool_choice": None, "tools": None}
    given.setdefault("tools_enabled", bool(given.get("tools")))
    constraint = constraint_of(**{**nothing, "thinking": False, **given})
    assert constraint is not None
    return compile_constraint(constraint, tokens).matcher(width or tokens.vocab_size)


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema}


CHARACTERS = ["a", "b", "é"]
TINY = TinyTokens(b"a", b"b", b"aa", b"ab", b"ba", b"aba", b"bb", b"\xc3", b"\xa9", "é".encode(), b"\xa9b", b"a\xc3")
STRINGS = ["".join(t) for n in range(11) for t in itertools.product(CHARACTERS, repeat=n)]


@pytest.mark.parametrize(
    "regex", ["a+b", "(ab|ba)*", "a{2,3}b?", "(a|ab)(b|ba)", "[^a]b*", "(aa)*b(aa)*", "é?a.", "(?:é|a)+b", "^ab|b$"]
)
def test_a_token_is_allowed_iff_some_completion_exists(regex: str) -> None:
    language = {s.encode() for s in STRINGS if re.fullmatch(regex, s)}
    # the words have up to 10 characters: enough to complete what three tokens can begin
    prefixes = {whole[:n] for whole in language for n in range(len(whole) + 1)}
    texts = {token: TINY.token_bytes(token) for token in range(3, TINY.vocab_size)}
    seen = 0

    def check(matcher: Matcher, text: bytes, depth: int) -> None:
        nonlocal seen
        mask = matcher.mask()
        assert mask[TINY.eos_id] == (text in language), text
        assert not mask[1:3].any()
        for token, piece in texts.items():
            assert mask[token] == (text + piece in prefixes), (text, piece)
            if depth and mask[token]:
                further = matcher.fork()
                further.advance(token)
                check(further, text + piece, depth - 1)
        seen += 1

    check(matcher_of(TINY, regex=regex), b"", 2)
    assert seen > 1


def test_a_json_value_is_spelt_one_way_or_not_at_all() -> None:
    values = [12, 1.5, "a", "é", True, None, "12"]
    language = {json.dumps(value, ensure_ascii=False).encode() for value in values}
    tokens = TinyTokens(*(bytes([b]) for b in range(256)), b"12", b'"a', b'a"', b"tru", b'"1', b'\xa9"')
    matchers = [(matcher_of(tokens, response_format=schema_of({"enum": values})), b"")]
    while matchers:
        matcher, text = matchers.pop()
        mask = matcher.mask()
        assert mask[tokens.eos_id] == (text in language)
        for token in range(3, tokens.vocab_size):
            longer = text + tokens.token_bytes(token)
            assert mask[token] == any(whole.startswith(longer) for whole in language), longer
            if mask[token]:
                matchers.append((matcher.fork(), longer))
                matchers[-1][0].advance(token)


def test_control_tokens_never_stand_in_the_content(toy: ChatTokenizer) -> None:
    json_matcher = matcher_of(toy, response_format={"type": "json_object"}, tools=TOOLS)
    call_matcher = matcher_of(toy, tools=TOOLS, tool_choice="required")
    for token in toy.encode_plain('{"a": "b'):
        json_matcher.advance(token)
    for token in toy.encode_trusted(CALL[: CALL.index("slo")]):
        call_matcher.advance(token)
    controls = sorted(toy.control_ids)
    assert not json_matcher.mask()[controls].any()
    assert not call_matcher.mask()[controls].any()


def spell(tokens: ChatTokenizer, text: str) -> list[int]:
    """Ids that spell a marker in plain tokens."""
    ids = tokens.encode_plain(text)
    assert not tokens.control_ids & set(ids) and len(ids) > 1
    return ids


@pytest.mark.parametrize("marker", [THINK_CLOSE, EOS, DSML])
def test_a_marker_is_not_spelt_in_plain_tokens(marker: str, toy: ChatTokenizer, tokenizer: ChatTokenizer) -> None:
    for tokens in (toy, tokenizer):
        matchers = {
            '{"a": "': matcher_of(tokens, response_format={"type": "json_object"}, tools=TOOLS),
            "so ": matcher_of(tokens, tools=TOOLS),
            "I think ": matcher_of(tokens, response_format={"type": "json_object"}, tools=TOOLS, thinking=True),
        }
        for before, matcher in matchers.items():
            for token in tokens.encode_plain(before):
                matcher.advance(token)
            *head, last = spell(tokens, marker)
            for token in head:
                matcher.advance(token)
            mask = matcher.mask()
            assert not mask[last]
            rest = tokens.token_bytes(last)
            for token in np.flatnonzero(mask):
                assert not tokens.token_bytes(int(token)).startswith(rest) or int(token) in tokens.control_ids
            assert mask.sum() > 1  # anything else goes on


def test_without_tools_a_tag_of_calls_is_text(toy: ChatTokenizer) -> None:
    text = json.dumps({"a": f"<{DSML}"}, ensure_ascii=False)
    matcher = matcher_of(toy, response_format={"type": "json_object"})
    for token in (*toy.encode_plain(text), toy.eos_id):
        matcher.advance(token)


def test_a_token_that_holds_a_whole_marker_is_left_out() -> None:
    tokens = TinyTokens(b"a", b"</think>", b"<", b"/think>", b"a</thi", b"nk>a")
    matcher = matcher_of(tokens, regex=".*")
    assert matcher.mask().tolist() == [True, False, False, True, False, True, True, True, True]
    matcher.advance(7)
    assert matcher.mask().tolist() == [True, False, False, True, False, True, True, True, False]


def test_a_grammar_that_demands_a_marker_leaves_no_token() -> None:
    tokens = TinyTokens(*(bytes([b]) for b in range(256)))
    matcher = matcher_of(tokens, regex=THINK_CLOSE)
    for b in THINK_CLOSE.encode()[:-1]:
        matcher.advance(3 + b)
    with pytest.raises(EngineError, match="no token to go on with"):
        matcher.mask()


@pytest.mark.parametrize("has_tools", [False, True])
def test_the_grammar_begins_after_the_reasoning(has_tools: bool, toy: ChatTokenizer) -> None:
    matcher = matcher_of(
        toy, response_format={"type": "json_object"}, tools=TOOLS if has_tools else None, thinking=True
    )
    thought = [*toy.encode_plain("So {it} is:\n\n"), toy.id_of(THINK_OPEN)]
    content = toy.encode_plain('{"a": 1}')
    masks = matcher.masks_along([*thought, toy.id_of(THINK_CLOSE), *content])
    assert len(masks) == len(thought) + len(content) + 2
    ends = {toy.eos_id, *([toy.id_of(DSML)] if has_tools else [])}
    for mask in masks[: len(thought) + 1]:
        assert {i for i in range(toy.vocab_size) if not mask[i]} == ends
    for i, mask in enumerate(masks[len(thought) + 1 :]):
        plain = matcher_of(toy, response_format={"type": "json_object"}, tools=TOOLS if has_tools else None)
        for token in content[:i]:
            plain.advance(token)
        assert (mask == plain.mask()).all()
    assert not matcher.is_finished and matcher.mask()[thought[0]]


def advanced(matcher: Matcher, ids: Sequence[int]) -> Matcher:
    for token in ids:
        matcher.advance(token)
    return matcher


FOLLOWED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": schema_of(PERSON)}, '{"name": "Zoë {}", "age": 36,\n "role": null, "scores": [1.5, -2e3]}'),
    ({"response_format": {"type": "json_object"}, "thinking": True}, 'So:\n{"a"}</think>{"a": [true, {"b": "c"}]}'),
    ({"tools": TOOLS, "tool_choice": "required"}, CALL),
    ({"tools": TOOLS, "thinking": True}, f"Where?</think>I look.{CALL}"),
    ({"regex": "(ab*c|[0-9]{2,5}x)+"}, "abbbbbc12345xac99x"),
]


@pytest.mark.parametrize(("given", "text"), FOLLOWED, ids=lambda case: str(case)[:40])
def test_masks_along_drafts_are_those_of_each_prefix_and_change_nothing(
    given: dict[str, Any], text: str, toy: ChatTokenizer
) -> None:
    rng = random.Random(text)
    ids = [*toy.encode_trusted(text), toy.eos_id]
    matcher = matcher_of(toy, **given)
    for at, token in enumerate(ids):
        drafts = ids[at : at + 5]
        broken = rng.randrange(2 * len(drafts))  # half of the time some draft is a random id
        if broken < len(drafts):
            drafts[broken] = rng.randrange(toy.vocab_size)
        masks = matcher.masks_along(drafts)
        for i, mask in enumerate(masks):
            assert (mask == advanced(matcher_of(toy, **given), [*ids[:at], *drafts[:i]]).mask()).all()
        if len(masks) <= len(drafts):
            stopper = drafts[len(masks) - 1]
            assert stopper == toy.eos_id or not masks[-1][stopper]
        assert (matcher.mask() == masks[0]).all()
        matcher.advance(token)
    assert matcher.is_finished


@pytest.mark.parametrize("draft", [-1, 1280, 5000])
def test_a_draft_outside_the_rows_ends_the_walk(draft: int, toy: ChatTokenizer) -> None:
    assert len(matcher_of(toy, regex="a+").masks_along([draft])) == 1


def test_forks_are_independent(toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, response_format=schema_of({"enum": ["left", "right"]}))
    matcher.advance(toy.encode_plain('"')[0])
    left, right = matcher.fork(), matcher.fork()
    before = matcher.mask()
    advanced(left, toy.encode_plain('left"'))
    advanced(right, toy.encode_plain('right"'))
    assert left.is_finished and right.is_finished and not matcher.is_finished
    assert (matcher.mask() == before).all()


def test_a_token_that_is_not_allowed_changes_nothing(toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, response_format={"type": "json_object"})
    before = matcher.mask()
    for token in (toy.encode_plain("x")[0], toy.eos_id, toy.id_of(THINK_CLOSE), -1, toy.vocab_size):
        with pytest.raises(EngineError, match=f"the token {token} is not allowed"):
            matcher.advance(token)
    assert (matcher.mask() == before).all()


def test_only_the_end_token_follows_a_finished_reply(toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, regex="ab")
    for token in toy.encode_plain("ab"):
        assert not matcher.is_finished
        matcher.advance(token)
    for _ in range(2):
        assert matcher.is_finished
        assert np.flatnonzero(matcher.mask()).tolist() == [toy.eos_id]
        matcher.advance(toy.eos_id)


def test_ids_that_the_tokenizer_lacks_are_never_allowed(toy: ChatTokenizer) -> None:
    for thinking in (False, True):
        mask = matcher_of(toy, width=toy.vocab_size + 100, regex="(?s:.*)", thinking=thinking).mask()
        assert mask.shape == (toy.vocab_size + 100,)
        assert mask[: toy.vocab_size].any() and not mask[toy.vocab_size :].any()
    with pytest.raises(EngineError, match="1279 logits and the tokenizer 1280 ids"):
        matcher_of(toy, width=1279, regex="a")


def test_a_grammar_that_outgrows_the_library_fails_by_name(toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, regex=r"(\w+\s*)*(\p{L}{1,1000}|\d{1,1000}){1,1000}")
    rng = random.Random(0)
    letters = [i for i in range(toy.vocab_size) if toy.token_bytes(i).isalpha() and i not in toy.control_ids]
    with pytest.raises(EngineError, match=r"the grammar failed: .*too") as failure:
        for _ in range(1000):
            mask = matcher.mask()
            matcher.advance(rng.choice([i for i in letters if mask[i]]))
    assert "\n" not in str(failure.value)


class FailsAt:
    """The library's matcher, which fails for good once it took a token."""

    def __init__(self, library: Any, token: int) -> None:
        self._library, self._token, self._failed = library, token, False

    def consume_token(self, token: int) -> bool:
        self._failed = self._failed or token == self._token
        return bool(self._library.consume_token(token))

    def is_error(self) -> bool:
        return self._failed

    def get_error(self) -> str:
        return "too complex"

    def rollback(self, n: int) -> bool:
        return not self._failed and bool(self._library.rollback(n))

    def compute_bitmask(self) -> bytes:
        return bytes(self._library.compute_bitmask())

    def deep_copy(self) -> FailsAt:
        return FailsAt(self._library.deep_copy(), self._token)


def test_a_draft_on_which_the_library_fails_harms_no_other(toy: ChatTokenizer) -> None:
    constraint = constraint_of(
        response_format=None, tool_choice=None, tools=None, regex="[ab]+!", thinking=False, tools_enabled=False
    )
    assert constraint is not None
    from llguidance import LLMatcher

    a, b = toy.encode_plain("a")[0], toy.encode_plain("b")[0]
    grammar = compile_constraint(constraint, toy)
    matcher = Matcher(grammar, cast(LLMatcher, FailsAt(grammar.matcher(1280)._library, b)), 1280)
    assert len(matcher.masks_along([a, a, b, a])) == 3
    assert len(matcher.masks_along([a, a, a])) == 4
    matcher.advance(a)
    matcher.advance(b)
    with pytest.raises(EngineError, match="the grammar failed: too complex"):
        matcher.mask()


def test_a_compiled_grammar_serves_other_threads(toy: ChatTokenizer) -> None:
    matcher = matcher_of(toy, regex="ab")
    thread = threading.Thread(target=lambda: advanced(matcher, toy.encode_plain("ab")))
    thread.start()
    thread.join()
    assert matcher.is_finished


def test_a_constraint_is_compiled_once(toy: ChatTokenizer, tokenizer: ChatTokenizer) -> None:
    def compiled(tokens: ChatTokenizer) -> object:
        constraint = constraint_of(
            response_format=schema_of(PERSON), tool_choice=None, tools=None, thinking=False, tools_enabled=False
        )
        assert constraint is not None
        return compile_constraint(constraint, tokens)

    assert compiled(toy) is compiled(toy)
    assert compiled(toy) is not compiled(tokenizer)


def test_a_mask_of_the_real_vocabulary_takes_less_than_half_a_millisecond(tokenizer: ChatTokenizer) -> None:
    text = json.dumps({"name": "Ada Lovelace, countess of the quick brown fox", "age": 36, "scores": [1.5, 2]})
    matcher, wall_us = matcher_of(tokenizer, response_format=schema_of(PERSON)), []
    for token in tokenizer.encode_plain(text):
        start = time.perf_counter()
        mask = matcher.mask()
        wall_us.append((time.perf_counter() - start) * 1e6)
        assert mask[token]
        matcher.advance(token)
    assert statistics.median(wall_us) < 500
