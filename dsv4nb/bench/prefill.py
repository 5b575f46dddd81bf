"""Prompts on random weights: what some hundred tokens take behind each context."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from dsv4nb.bench import gpu
from dsv4nb.bench.asked import Asked, Ran
from dsv4nb.bench.rig import rig
from dsv4nb.bench.spread import Times
from dsv4nb.engine.prefill import PrefillForm

TURNS_MIN = 2
TURNS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`rows` tokens of a prompt behind one context.

    Attributes:
        wall_ms: from the call to the logits of the last one on the host.
        tok_s: of the median.
    """

    context: int
    rows: int
    wall_ms: Times
    tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured; the time of a whole prompt is not made up from it.

    Attributes:
        form: how prompts are read, "fast" or "exact"; fault: why that is not what was asked for.
        chunk_rows: of one fast chunk at most.
    """

    ran: Ran
    form: PrefillForm
    fault: str
    chunk_rows: int
    arms: tuple[Arm, ...]
    clocks: tuple[gpu.Clocks, ...]

    def __str__(self) -> str:
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows()]
        told = f"fast, in chunks of {self.chunk_rows} rows" if self.form == "fast" else "exact, eight rows at a time"
        lines.append(f"{'prompts':<12}{told}{f': {self.fault}' if self.fault else ''}")
        lines += [f"{'clocks':<12}{one}" for one in self.clocks] or [f"{'clocks':<12}unknown"]
        lines += ["", f"{'behind':>8}{'tokens':>8}{'n':>5}{'wall ms':>12}{'p95':>12}{'tok/s':>10}"]
        for arm in self.arms:
            times = arm.wall_ms
            lines.append(
                f"{arm.context:>8}{arm.rows:>8}{times.samples:>5}{times.median:12.3f}{times.p95:12.3f}{arm.tok_s:10.1f}"
            )
        return "\n".join(lines)


def prefill(asked: Asked, *, rows: int) -> Report:
    """Measure `rows` tokens of a prompt behind every context, in turn.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig`.
    """
    with rig(replace(asked, widths=(1,)), rows=rows, counts=False) as made:
        walls: dict[int, list[float]] = {context: [] for context in asked.contexts}

        def sample(context: int) -> float:
            tokens = made.tokens(context, rows)
            made.stand(context)
            started = time.perf_counter()
            made.engine.prefill(made.state, tokens)
            return 1e3 * (time.perf_counter() - started)

        for context in asked.contexts:
            sample(context)
        end, turn = time.monotonic() + asked.seconds, 0
        while turn < TURNS_MIN or (turn < TURNS_MAX and time.monotonic() < end):
            for context in asked.contexts if turn % 2 == 0 else reversed(asked.contexts):
                walls[context].append(sample(context))
            turn += 1
        times = {context: Times.of(values) for context, values in walls.items()}
        return Report(
            ran=made.facts,
            form=made.engine.prefill_form,
            fault=made.engine.prefill_fault,
            chunk_rows=asked.chunk_rows,
            arms=tuple(
                Arm(context=context, rows=rows, wall_ms=each, tok_s=1e3 * rows / each.median)
                for context, each in times.items()
            ),
            clocks=gpu.clocks(made.devices, made.work),
        )
