"""How likely the model finds tokens that are already there: read through the engine, nothing is chosen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from dsv4nb.engine.logprobs import MAX_LOGPROBS, logprob_of
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled, Engine
from dsv4nb.errors import PromptEmpty, RequestError
from dsv4nb.events import TokenLogprob
from dsv4nb.session.live import Live
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.request import Limits


def checked(
    prompt_ids: Sequence[int], ids: Sequence[int], n: int, limits: Limits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a prompt and the ids behind it.

    Raises:
        RequestError: an id is outside the vocabulary, there is no prompt, or they do not fit.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= MAX_LOGPROBS:
        raise RequestError(f"n is {n!r}; 0 to {MAX_LOGPROBS} alternatives are reported", param="n")
    prompt, reply = _checked("prompt_ids", prompt_ids, limits), _checked("ids", ids, limits)
    if not prompt:
        raise PromptEmpty("prompt_ids")
    if len(prompt) + len(reply) > limits.max_seq:
        raise RequestError(
            f"prompt_ids and ids have {len(prompt) + len(reply)} tokens; {limits.max_seq} fit", param="ids"
        )
    return prompt, reply


def _checked(name: str, given: Sequence[int], limits: Limits) -> tuple[int, ...]:
    try:
        ids = tuple(operator.index(token) for token in given)
    except TypeError:
        raise RequestError(f"{name} must be a sequence of integers", param=name) from None
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(f"{name} has {token}; ids are 0 to {limits.vocab_size - 1}", param=name)
    return ids


def score(
    engine: Engine,
    prefixes: Prefixes,
    prompt: Sequence[int],
    ids: Sequence[int],
    n: int,
    should_stop: Callable[[], bool],
) -> tuple[TokenLogprob, ...]:
    """Return one entry per id, with `n` alternatives each; on the serving thread.

    They are what a run that reports them would have reported, bit for bit: a row has the same bits in any batch. What
    of the prompt is cached is not computed again, and nothing is left behind.

    Args:
        should_stop: asked between two forwards; True ends it with the entries so far.

    Raises:
        EngineError: a row is broken.
    """
    live = Live(engine, prompt, prefixes)
    told: list[TokenLogprob] = []
    try:
        row = live.begin(should_stop=should_stop, on_progress=lambda done: None)
        for first in range(0, len(ids), MAX_ROWS):
            if should_stop():
                break
            some = ids[first : first + MAX_ROWS]
            rows = live.verify(some).rows
            for token, before in zip(some, (row, *rows[:-1]), strict=True):
                told.append(logprob_of(before, token, n))
            row = rows[-1]
            live.commit(some, rows)
    except Cancelled:
        pass
    finally:
        live.close()
    return tuple(told)
