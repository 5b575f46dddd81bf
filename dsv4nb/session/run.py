"""One request from its prompt to its last event."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dsv4nb.engine.protocol import Cancelled, Engine
from dsv4nb.events import Done, PromptUsage, Timings, TokenSnapshot
from dsv4nb.session.choosing import Chooser
from dsv4nb.session.emission import Emission
from dsv4nb.session.journal import Journal
from dsv4nb.session.request import ChatTokens
from dsv4nb.session.timings import ENDED, FIRST_TOKEN, PREFILLED, STARTED


@dataclass(slots=True)
class Place:
    """Where a run is, for the message of an error."""

    phase: str = "prefill"
    position: int = 0

    def move(self, position: int) -> None:
        """Note how far the run has come."""
        self.position = position

    def __str__(self) -> str:
        return f"{self.phase} at position {self.position}"


def run(engine: Engine, tokens: ChatTokens, journal: Journal, place: Place) -> Timings:
    """Run the request of `journal` on a fresh state, write its events, the last ones included, and return its timings.

    Cancelling takes effect before the next forward; what was said by then is kept.

    Args:
        place: kept up to date.
    """
    request, marks = journal.request, journal.marks
    marks.mark(STARTED)
    journal.append(PromptUsage(n_prompt=len(request.prompt), n_cached=0))
    emission = Emission(request, tokens, journal.append)
    try:
        chooser = Chooser(request, tokens, engine.vocab_size)
        state = engine.new_state()
        row = engine.prefill(
            state, request.prompt, should_stop=lambda: journal.is_cancelled, on_progress=lambda n, _: place.move(n)
        ).logits
        marks.mark(PREFILLED)
        place.phase = "decode"
        while not journal.is_cancelled:
            place.move(state.pos)
            pending, logprob = chooser.choose(row, state.pos)
            marks.mark(FIRST_TOKEN)
            emission.accept((pending,), None if logprob is None else (logprob,))
            journal.settle()
            if emission.stop_reason is not None or journal.is_cancelled:
                break
            row = engine.forward_rows(state, (pending,))[0]
            engine.commit(state, 1)
    except Cancelled:
        pass
    if emission.stop_reason is None:
        emission.stop_reason = "cancelled"
    emission.finish()
    marks.mark(ENDED)
    journal.problems = emission.problems
    timings = marks.timings()
    done = Done(
        stop_reason=emission.stop_reason,
        n_tokens=len(emission.ids),
        n_prompt=len(request.prompt),
        n_cached=0,
        queue_s=timings.queue_s,
        elapsed_s=timings.prepare_s + time.monotonic() - journal.started_at,
        config=request.config,
        route=request.route,
        timings=timings,
    )
    journal.finish(TokenSnapshot(ids=tuple(emission.ids)), done)
    return timings
