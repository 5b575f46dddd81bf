"""All that the speed of a model on GPUs is told by, from one load: forwards, rounds, prompts and contexts.

Making the weights of a large model takes longer than measuring it. Every line is told as soon as it is measured, so a
run that is cut short has told those before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dsv4nb.bench import gpu
from dsv4nb.bench.asked import SPAN, Asked, Ran
from dsv4nb.bench.rig import Rig, positions, replayed, rig
from dsv4nb.bench.rounds import draft_times
from dsv4nb.bench.spread import Times
from dsv4nb.bench.synthetic_gil import rate
from dsv4nb.engine.accept import rows_kept
from dsv4nb.engine.plain_choice import GREEDY

WARM = 3  # compile, capture, replay; of a chain, steps before one finds its own begun
SAMPLES = 128  # forwards of a width
CHAINED = 256  # tokens, each chosen from the row of the one before
ROUNDS = 2000
PROMPTS = (8192, 256)  # tokens
PROMPT_TURNS = 3
ARMS = ((True, ""), (False, ", none begun ahead"))  # `run_ahead`

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement.

    Attributes:
        ms: of each, on the host's clock, tokens chosen and brought to the host.
        value: what it comes to, in `unit`.
    """

    name: str
    value: float
    unit: str
    ms: Times | None = None

    def __str__(self) -> str:
        times = "" if self.ms is None else f"  {self.ms.median:9.3f} ms, p95 {self.ms.tail:.3f}, n {self.ms.samples}"
        return f"{self.name:<58}{self.value:10.3f} {self.unit:<9}{times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured."""

    ran: Ran
    lines: tuple[Line, ...]
    clocks: tuple[gpu.Clocks, ...]

    def __str__(self) -> str:
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows()]
        lines += [f"{'clocks':<12}{one}" for one in self.clocks] or [f"{'clocks':<12}unknown"]
        return "\n".join([*lines, "", *map(str, self.lines)])


def whole(asked: Asked, tell: Tell = lambda line: None) -> Report:
    """Measure everything at the first context, and one row at each.

    Args:
        asked: its routes and its form are left: free and measured routes are run, and prompts in chunks.
        tell: is given each line.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig`.
    """
    asked = replace(asked, routes="free", form="fast", drafter=True)
    lines: list[Line] = []
    with rig(asked, rows=max(*PROMPTS, WARM + CHAINED + SPAN), counts=False) as made:
        for label, text in made.facts.rows():
            tell(f"{label:<12}{text}")
        for line in _lines(made):
            tell(str(line))
            lines.append(line)
        return Report(ran=made.facts, lines=tuple(lines), clocks=gpu.clocks(made.devices, made.work))


def _lines(made: Rig) -> Iterator[Line]:
    context, widest = made.asked.contexts[0], max(made.asked.widths)
    plain = _forwards(made, context, 1)
    yield _rate(f"plain at {context}, tokens given", plain, "tok/s")
    for run_ahead, how in ARMS:
        chained = _chain(made, context, run_ahead=run_ahead)
        yield _rate(f"plain at {context}, each of the one before{how}", chained, "tok/s")
    for width in made.asked.widths:
        if width > 1:
            yield _rate(f"rows of {width}, free routes", _forwards(made, context, width), "forw./s")
    for far in made.asked.contexts[1:]:
        there = _forwards(made, far, 1)
        yield _rate(f"plain at {far}, tokens given", there, "tok/s")
        yield Line(name=f"T({far}) / T({context}), one row", value=there.median / plain.median, unit="")
    drafts = draft_times(made, context) if made.engine.block_size else None
    if drafts is not None:
        yield _rate("a block of drafts", drafts, "blocks/s")
        for run_ahead, how in ARMS:
            rounds = _rounds(made, context, run_ahead=run_ahead)
            yield _rate(f"rounds, free routes, drafts included{how}", rounds, "rounds/s")
    with replayed(made) as other:
        ones, many = _forwards(other, context, 1), _forwards(other, context, widest)
        yield _rate(f"rows of {widest}, routes of a text", many, "forw./s")
        yield Line(name=f"T({widest}) / T(1), routes of a text", value=many.median / ones.median, unit="")
        if drafts is not None:
            both = many.median + drafts.median
            yield Line(name="rounds, routes of a text, drafts included", value=1e3 / both, unit="rounds/s")
    rate(made, 1, WARM)  # its sampler is another one: its kernels are compiled and captured
    idle, busy = rate(made, 1, CHAINED)[0], rate(made, 1, CHAINED, busy=True)[0]
    yield Line(name="plain beside a busy cell, of what it is alone", value=busy / idle, unit="")
    for prompt in PROMPTS:
        times = _prompts(made, prompt)
        yield Line(name=f"prompt of {prompt}", value=1e3 * prompt / times.median, unit="tok/s", ms=times)


def _rate(name: str, ms: Times, unit: str) -> Line:
    return Line(name=name, value=1e3 / ms.median, unit=unit, ms=ms)


def _forwards(made: Rig, context: int, width: int) -> Times:
    places = positions(context, width)
    for _ in range(WARM):
        made.wall_ms(places[0], width)
    return Times.of([made.wall_ms(places[i % len(places)], width) for i in range(SAMPLES)])


def _chain(made: Rig, context: int, *, run_ahead: bool) -> Times:
    """One token after the other, as a chat says them."""
    made.engine.run_ahead = run_ahead
    made.stand(context)
    token, taken = made.tokens(context, 1)[0], []
    for _ in range(WARM + CHAINED):
        started = time.perf_counter()
        token = made.engine.draw_rows(made.state, [token], GREEDY).ids[0]
        made.engine.commit(made.state, 1)
        taken.append(1e3 * (time.perf_counter() - started))
    made.engine.run_ahead = True
    return Times.of(taken[WARM:])


def _rounds(made: Rig, context: int, *, run_ahead: bool) -> Times:
    """Whole rounds of the longest block, each behind the one before, with the walk along what the model chose."""
    engine, rows, first, taken = made.engine, made.engine.block_size + 1, max(context, 1), []
    engine.run_ahead = run_ahead
    for turn in range(WARM + ROUNDS):
        if turn == 0 or made.state.pos >= first + SPAN:
            made.stand(first)
            pending = made.tokens(first, 1)[0]
        started = time.perf_counter()
        proposal, verified = engine.draft_and_draw(made.state, pending, rows, drafts_by=GREEDY, config=GREEDY)
        kept = rows_kept(proposal.ids, verified.ids)
        engine.commit(made.state, kept)
        pending = verified.ids[kept - 1]
        taken.append(1e3 * (time.perf_counter() - started))
    engine.run_ahead = True
    return Times.of(taken[WARM:])


def _prompts(made: Rig, length: int) -> Times:
    """From the call to the logits of the last token, of an empty sequence."""
    taken = []
    for turn in range(PROMPT_TURNS + 1):
        tokens = made.tokens(0, length)
        made.stand(0)
        started = time.perf_counter()
        made.engine.prefill(made.state, tokens)
        if turn:  # the first compiles
            taken.append(1e3 * (time.perf_counter() - started))
    return Times.of(taken)
