"""Going on from the middle of a reply: its beginning is given, the rest is made.

The given ids stand behind the prompt as if the model had chosen them: they are read with it, from the caches where
those hold them, are told as tokens before the first new one, and count as said for penalties and stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.events import TokenLogprob
from dsv4nb.session.limits import budget
from dsv4nb.session.request import Request
from dsv4nb.session.tree import Turn

_OF_THE_PROMPT = ("thinking", "effort", "system", "tools", "tool_choice", "response_format", "regex", "trust_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The beginning of a reply.

    Attributes:
        logprobs: one per id, () when they are not known.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


def beginning(turn: Turn, token: int, alternative: int | None, scores: Sequence[TokenLogprob] = ()) -> Given:
    """Return the ids of a reply before one of its tokens, and another id in its place.

    Args:
        token: which, counted from 0; as many as there are stands behind the last one.
        alternative: None gives nothing in its place: the model chooses again.
        scores: of the reply's ids, in place of those that the turn was asked for.

    Raises:
        RequestError: there is no such token, or the turn has none, or it failed, or it made calls.
    """
    if turn.error is not None:
        raise RequestError("this turn failed and has no reply to go on from", param="turn")
    if turn.calls:
        raise RequestError("this turn made calls; go back to a turn, not to a token", param="turn")
    if not turn.ids:
        raise RequestError("the token ids of this turn are not known: it came as text", param="turn")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= len(turn.ids):
        raise RequestError(
            f"token is {token!r}; the reply has tokens 0 to {len(turn.ids) - 1}, and {len(turn.ids)} is its end",
            param="token",
        )
    if alternative is not None and (
        isinstance(alternative, bool) or not isinstance(alternative, int) or alternative < 0
    ):
        raise RequestError(f"alternative is {alternative!r}; it must be a token id", param="alternative")
    known = tuple(scores) or turn.logprobs
    told = list(known[:token])
    if alternative is None:
        return Given(ids=turn.ids[:token], logprobs=tuple(told) if len(told) == token else ())
    found = _of_alternative(known[token], alternative) if token < len(known) else None
    told += [found] if found else []
    return Given(ids=(*turn.ids[:token], alternative), logprobs=tuple(told) if len(told) == token + 1 else ())


def continued(request: Request, given: Given) -> Request:
    """Return the request with the beginning of its reply.

    Raises:
        RequestError: it is constrained, an id is outside the vocabulary, or no room is left behind it.
    """
    if request.constraint is not None:
        raise RequestError(
            "a reply that is continued cannot be constrained: its beginning is not part of the grammar; "
            "continue a turn without response_format, regex and tool_choice",
            param="regex",
        )
    assert request.limits is not None
    size, n_given = request.limits.vocab_size, len(given.ids)
    for token in given.ids:
        if not 0 <= token < size:
            raise RequestError(f"alternative is {token}; ids are 0 to {size - 1}", param="alternative")
    left = budget(len(request.prompt) + n_given, request.max_new, request.limits.max_seq)
    return replace(request, given=given.ids, given_logprobs=given.logprobs, max_new=n_given + left)


def before_end(request: Request) -> tuple[int, ...]:
    """Return the given ids that are read: those before the first that ends the reply."""
    end = next((i for i, token in enumerate(request.given) if token in request.eos), len(request.given))
    return request.given[:end]


def refuse_another_prompt(options: Mapping[str, Any]) -> None:
    """Refuse options that would change what the reply answers.

    Raises:
        RequestError: one of them is given.
    """
    for name in _OF_THE_PROMPT:
        if name in options:
            raise RequestError(
                f"{name} cannot be changed in the middle of a reply; it goes on behind the prompt that it answered",
                param=name,
            )


def _of_alternative(met: TokenLogprob, alternative: int) -> TokenLogprob | None:
    """What is known of another token in the place of `met`; None when it is not among those that were told."""
    if alternative == met.id:
        return met
    ids = [token for token, _ in met.top]
    if alternative not in ids:
        return None
    place = ids.index(alternative)
    return replace(met, id=alternative, logprob=met.top[place][1], rank=place + 1)
