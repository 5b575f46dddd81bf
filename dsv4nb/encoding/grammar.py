"""JSON schema, regex or tool choice → the tokens that a reply may go on with (dspark.md 5.3).

The library is llguidance: it has no dependencies (8 MB, imported in 0.02 s), where xgrammar needs transformers
(116 MB, 1.4 s), and it refuses by name the schema keywords that it cannot enforce, which xgrammar ignores. The
model's 129,280 ids are read once in half a second; then a schema compiles in 1 to 3 ms, and a mask takes 20 to 70 us
at the median.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dsv4nb.encoding._grammar_lark import lark_of
from dsv4nb.encoding._grammar_request import Constraint, constraint_of
from dsv4nb.encoding.constants import DSML, EOS, THINK_CLOSE
from dsv4nb.errors import EngineError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from dsv4nb.encoding._grammar_vocabulary import Tokens, Vocabulary

__all__ = ["Constraint", "Grammar", "Matcher", "compile_constraint", "constraint_of"]

Mask = npt.NDArray[np.bool_]


def compile_constraint(constraint: Constraint, tokens: Tokens) -> Grammar:
    """Compile a constraint, once for each constraint and tokenizer.

    Raises:
        RequestError: llguidance is not installed, or cannot enforce something that `param` names.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise RequestError(
            "a grammar needs llguidance, which is not installed; pip install 'dsv4nb[constrained]'",
            param=_param(constraint),
        ) from error
    return _compiled(constraint, tokens)


class Grammar:
    """A compiled constraint; any thread may take matchers from it."""

    def __init__(self, constraint: Constraint, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.thinking = constraint.thinking
        markers = [THINK_CLOSE, EOS, *([DSML] if constraint.has_tools else [])]
        self.markers = tuple(marker.encode() for marker in markers)
        self.reach = max(map(len, self.markers)) - 1  # bytes of a marker that can stand before its last token
        self.spelt = np.concatenate([vocabulary.spelling(marker) for marker in self.markers])
        self.reasoning_mask = vocabulary.used.copy()
        self.reasoning_mask[[vocabulary.eos_id, *([vocabulary.dsml_id] if constraint.has_tools else [])]] = False
        self._start = start

    def matcher(self, width: int) -> Matcher:
        """Return a matcher at the beginning of a reply.

        Args:
            width: V of the model's rows; ids that the tokenizer does not have are never allowed.

        Raises:
            EngineError: the tokenizer has more ids than that.
        """
        size = self.vocabulary.size
        if width < size:
            raise EngineError(f"a row has {width} logits and the tokenizer {size} ids; take the model's own tokenizer")
        return Matcher(self, self._start.deep_copy(), width)


class Matcher:
    """Follows one reply and tells what it may go on with.

    In the reasoning everything may but what would end the reply: the end token and, with tools, a block of calls.
    After `</think>` the grammar holds, and the end token is allowed where the content is complete. A control token
    is written as its id: spelling `</think>`, the end token or, with tools, a tag of calls in plain tokens is not
    allowed, because whoever reads the reply would take it for the real one.
    """

    def __init__(self, grammar: Grammar, library: LLMatcher, width: int) -> None:
        self._grammar, self._library, self._width = grammar, library, width
        self._in_reasoning = grammar.thinking
        self._tail = b""  # plain bytes just before, as many as a marker can begin with
        self._ended = False
        self._mask: Mask | None = None  # of this place, once it was asked for

    @property
    def is_finished(self) -> bool:
        """Whether only the end token can follow, or it has."""
        return self._ended or (not self._in_reasoning and self._library.is_stopped())

    def mask(self) -> Mask:
        """Return [V], True for the tokens that may come next; read-only, and valid for ever.

        Raises:
            EngineError: no token may, or the grammar outgrew the library's limits.
        """
        if self._mask is None:
            mask = np.zeros(self._width, np.bool_)
            mask[: self._grammar.vocabulary.size] = self._allowed()
            mask.flags.writeable = False
            self._mask = mask
        return self._mask

    def advance(self, token: int) -> None:
        """Go on by a token.

        Raises:
            EngineError: it is not allowed here; nothing was changed.
        """
        if not (0 <= token < self._width and self.mask()[token]):
            raise EngineError(f"the token {token} is not allowed by the grammar")
        self._step(token)

    def fork(self) -> Matcher:
        """Return an independent matcher at the same place."""
        other = Matcher(self._grammar, self._library.deep_copy(), self._width)
        other._in_reasoning, other._tail, other._ended = self._in_reasoning, self._tail, self._ended
        other._mask = self._mask
        return other

    def masks_along(self, drafts: Sequence[int]) -> list[Mask]:
        """Return the mask before each draft and after the last one, without moving.

        The list ends early at the first draft that is not allowed or ends the reply: the rows after it are never
        read, so only the `len(masks) - 1` drafts before it are worth verifying.

        Raises:
            EngineError: as `mask`, for the first one.
        """
        masks = [self.mask()]
        spare, place = self._library.deep_copy(), (self._in_reasoning, self._tail, self._ended, self._mask)
        taken = 0
        # on this very matcher, not on a fork: what its lexer learns on the way is kept
        for draft in drafts:
            if draft == self._grammar.vocabulary.eos_id or not (0 <= draft < self._width and masks[-1][draft]):
                break
            taken += not self._in_reasoning
            try:
                self._step(draft)
                masks.append(self.mask())
            except EngineError:  # raised again should this draft become a token of the reply
                break
        if not self._library.rollback(taken):
            self._library = spare
        self._in_reasoning, self._tail, self._ended, self._mask = place
        return masks

    def _step(self, token: int) -> None:
        """Go on by a token that is allowed."""
        vocabulary = self._grammar.vocabulary
        self._mask = None
        if token == vocabulary.eos_id:
            self._ended = True
        elif self._in_reasoning:
            self._in_reasoning = token != vocabulary.think_close_id
        elif not self._library.consume_token(token):
            raise EngineError(f"the grammar failed: {_reason(self._library)}")
        if vocabulary.is_control(token):
            self._tail = b""
        else:
            self._tail = (self._tail + vocabulary.texts[token])[-self._grammar.reach :]

    def _allowed(self) -> Mask:
        """Return what may come next, over the ids of the tokenizer."""
        grammar, vocabulary = self._grammar, self._grammar.vocabulary
        if self._ended:
            only_end: Mask = np.arange(vocabulary.size) == vocabulary.eos_id
            return only_end
        allowed = grammar.reasoning_mask.copy() if self._in_reasoning else self._content_mask()
        allowed[grammar.spelt] = False
        for marker in grammar.markers:
            for present in _overlaps(self._tail, marker):
                allowed[vocabulary.completing(marker, present)] = False
        if not allowed.any():
            raise EngineError("the grammar leaves no token to go on with: what it demands spells a control token")
        return allowed

    def _content_mask(self) -> Mask:
        bits = np.frombuffer(self._library.compute_bitmask(), np.uint8)
        if self._library.is_error():  # what it returned is no mask then
            raise EngineError(f"the grammar failed: {_reason(self._library)}")
        return np.unpackbits(bits, bitorder="little").view(np.bool_)[: self._grammar.vocabulary.size]


def _overlaps(tail: bytes, marker: bytes) -> list[int]:
    """How many first bytes of `marker`, not all, can be those that end `tail`."""
    if marker[0] not in tail:
        return []
    return [n for n in range(1, len(marker)) if tail.endswith(marker[:n])]


@lru_cache(maxsize=4)
def _vocabulary(tokens: Tokens) -> Vocabulary:
    from dsv4nb.encoding._grammar_vocabulary import Vocabulary

    return Vocabulary(tokens)


@lru_cache(maxsize=64)
def _compiled(constraint: Constraint, tokens: Tokens) -> Grammar:
    # whatever is wrong is found without the vocabulary, which takes longer than everything else
    lark = lark_of(constraint, tokens.id_of(DSML), _objection)
    vocabulary = _vocabulary(tokens)
    start = _matcher(lark, vocabulary.library)
    if start.is_error():
        raise RequestError(f"the grammar cannot be enforced: {_reason(start)}", param=_param(constraint))
    return Grammar(constraint, start, vocabulary)


def _objection(lark: str) -> str:
    """Return what is wrong with a grammar that has no control tokens, "" when nothing."""
    matcher = _matcher(lark, _bytes_alone())
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            return "nothing can match it"
    return _reason(matcher)


def _matcher(lark: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    # errors must not quote the reply
    return LLMatcher(tokenizer, lark, log_level=0, limits=LLParserLimits(verbose_errors=False))


@lru_cache(maxsize=1)
def _bytes_alone() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _reason(matcher: LLMatcher) -> str:
    """The library's message in one line, without its echo of the grammar."""
    message = re.split(r"\n\s*\d+ \| |\n<", matcher.get_error())[0]
    message = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", message)
    message = message.rpartition("error: ")[2].partition(" Enable ")[0]  # its options are not ours
    return " ".join(message.split())


def _param(constraint: Constraint) -> str:
    """The keyword that a constraint comes from."""
    return {"json": "response_format", "regex": "regex"}.get(constraint.answer, "tool_choice")
