"""One request from its prompt to its last event."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dsv4nb.engine.protocol import Cancelled, Engine
from dsv4nb.engine.speculate import Speculator
from dsv4nb.events import Done, PromptProgress, PromptUsage, Reuse, SpecUsage, Timings, TokenSnapshot
from dsv4nb.session.choosing import Chooser
from dsv4nb.session.continuing import before_end
from dsv4nb.session.emission import Emission
from dsv4nb.session.journal import Journal
from dsv4nb.session.live import Live
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.request import ChatTokens
from dsv4nb.session.reuse import Decision
from dsv4nb.session.speaking import Speaking
from dsv4nb.session.timings import ENDED, PREFILLED, STARTED


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


def run(
    engine: Engine,
    tokens: ChatTokens,
    journal: Journal,
    place: Place,
    prefixes: Prefixes,
    speculator: Speculator | None = None,
) -> Timings:
    """Run the request of `journal`, write its events, the last ones included, and return its timings.

    Cancelling takes effect before the next forward; what was said by then is kept. What the run computed can be gone
    on from once it has said something: after a run that failed, or was cancelled before, everything is as it was.

    Args:
        place: kept up to date.
        prefixes: of earlier runs; a request of a chat starts from them and adds to them.
        speculator: what earlier runs know of the drafter; a new one when None.
    """
    request, marks = journal.request, journal.marks
    marks.mark(STARTED)
    given = before_end(request)
    prompt = (*request.prompt, *given)
    live = Live(engine, prompt, prefixes if journal.may_reuse else None, journal.ledger)
    try:
        reuse = _reuse(live.decision)
        usage = PromptUsage(n_prompt=len(prompt), n_cached=reuse.length, reuse=reuse, n_given=len(given))
        journal.append(usage)
        emission = Emission(request, tokens, journal.append)
        chooser = Chooser(request, tokens, engine.vocab_size)
        emission.accept(request.given, request.given_logprobs or None)
        for token in given:
            chooser.push(token)
        speaking = Speaking(live, chooser, emission, journal, tokens, speculator or Speculator(engine))
        _speak(speaking, live, emission, journal, place)
        emission.finish()
        if len(emission.ids) > len(given) or emission.stop_reason != "cancelled":
            live.keep()
    finally:
        live.close()
    marks.mark(ENDED)
    journal.problems = emission.problems
    timings = marks.timings()
    assert emission.stop_reason is not None
    done = Done(
        stop_reason=emission.stop_reason,
        n_tokens=max(0, len(emission.ids) - len(given)),
        n_prompt=len(prompt),
        n_cached=reuse.length,
        queue_s=timings.queue_s,
        elapsed_s=timings.prepare_s + time.monotonic() - journal.started_at,
        config=request.config,
        route=speaking.route,
        timings=timings,
        spec=SpecUsage.of(speaking.rounds),
        spec_config=request.spec if speaking.rounds else None,
        spec_note=speaking.note,
        reuse=reuse,
    )
    journal.finish(TokenSnapshot(ids=tuple(emission.ids)), done)
    return timings


def _speak(speaking: Speaking, live: Live, emission: Emission, journal: Journal, place: Place) -> None:
    """Read the prompt and make tokens until the reply ends or is cancelled."""
    total = live.n_prompt

    def moved(done: int) -> None:
        place.move(done)
        if done < total:
            journal.append(PromptProgress(done=done, total=total))

    try:
        row = live.begin(keep_at=journal.keep_at, should_stop=lambda: journal.is_cancelled, on_progress=moved)
        journal.marks.mark(PREFILLED)
        place.phase = "decode"
        if emission.stop_reason is None and not journal.is_cancelled:
            place.move(live.pos)
            speaking.first(row)
            journal.settle()
        while emission.stop_reason is None and not journal.is_cancelled:
            place.move(live.pos)
            speaking.go_on()
            journal.settle()
    except Cancelled:
        emission.stop_reason = "cancelled"  # also when what was given ends the reply: it was not read
    if emission.stop_reason is None:
        emission.stop_reason = "cancelled"


def _reuse(decision: Decision) -> Reuse:
    away = decision.diverges_at
    return Reuse(
        kind=decision.kind,
        length=decision.length,
        computed=decision.computed,
        reason=decision.reason,
        diverges_at=None if away is None else away.position,
    )
