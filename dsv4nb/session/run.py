"""One request from its prompt to its last event."""

from __future__ import annotations

import time

from dsv4nb.engine.protocol import Cancelled, Engine
from dsv4nb.engine.sampler import choose
from dsv4nb.events import Done, PromptUsage, TokenSnapshot
from dsv4nb.session.emission import Emission
from dsv4nb.session.journal import Journal
from dsv4nb.session.request import ChatTokens


def run(engine: Engine, tokens: ChatTokens, journal: Journal, queue_s: float) -> None:
    """Run the request of `journal` on a fresh state and write its events, the last ones included.

    Cancelling takes effect before the next forward; what was said by then is kept.
    """
    request, started = journal.request, time.monotonic()
    journal.append(PromptUsage(n_prompt=len(request.prompt), n_cached=0))
    emission = Emission(request, tokens, journal.append)
    try:
        state = engine.new_state()
        row = engine.prefill(state, request.prompt, should_stop=lambda: journal.is_cancelled).logits
        while not journal.is_cancelled:
            pending = choose(row, request.config, state.pos)
            emission.accept((pending,))
            if emission.stop_reason is not None or journal.is_cancelled:
                break
            row = engine.forward_rows(state, (pending,))[0]
            engine.commit(state, 1)
    except Cancelled:
        pass
    if emission.stop_reason is None:
        emission.stop_reason = "cancelled"
    emission.finish()
    done = Done(
        stop_reason=emission.stop_reason,
        n_tokens=len(emission.ids),
        n_prompt=len(request.prompt),
        n_cached=0,
        queue_s=queue_s,
        elapsed_s=request.prepare_s + time.monotonic() - started,
        config=request.config,
    )
    journal.finish(TokenSnapshot(ids=tuple(emission.ids)), done)
