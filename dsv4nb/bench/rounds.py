"""Rounds on random weights: what drafting and a verify forward of each width take, the walk along its rows included.

Random weights accept next to nothing, so what is told is what a round takes and how many tokens it must give to be
worth it. Whoever multiplies by an acceptance says where that is from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from dsv4nb.bench import gpu
from dsv4nb.bench.asked import Asked, Ran
from dsv4nb.bench.rig import Rig, positions, rig
from dsv4nb.bench.spread import Times
from dsv4nb.bench.steps import HEAD, Arm, measured
from dsv4nb.engine.accept import rows_kept
from dsv4nb.engine.plain_choice import GREEDY

DRAFTS_SAMPLES = 32
DRAFTED = "made and timed each round; what is verified is from a list, since random weights accept nothing"
GIVEN = "from a list: the engine drafts nothing here ({why}), and what drafting takes is in no number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        drafts: where the drafts are from.
        draft_ms: by context, of a whole block, on the host's clock; empty without a drafter.
        arms: `wall_ms` is a verify forward's, with the choice in each row and the commit.
        rounds_s: by context, then by width: rounds per second, of both medians together.
        breaks_even: likewise: tokens that a round must give to be as fast as one row after the other.
    """

    ran: Ran
    drafts: str
    draft_ms: dict[int, Times]
    arms: tuple[Arm, ...]
    rounds_s: dict[int, dict[int, float]]
    breaks_even: dict[int, dict[int, float]]
    clocks: tuple[gpu.Clocks, ...]

    def __str__(self) -> str:
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows()]
        lines.append(f"{'drafts':<12}{self.drafts}")
        lines += [f"{'clocks':<12}{one}" for one in self.clocks] or [f"{'clocks':<12}unknown"]
        lines += ["", HEAD, *(arm.row() for arm in self.arms), ""]
        for context, times in self.draft_ms.items():
            lines.append(f"at {context:<9}a block of drafts {times.median:.3f} ms, p95 {times.p95:.3f}")
        for context, by_width in self.rounds_s.items():
            for width, rate in by_width.items():
                even = self.breaks_even[context].get(width)
                pays = "" if even is None else f", worth it from {even:.3f} tokens a round on"
                lines.append(f"at {context:<9}T {width}: {rate:.1f} rounds/s{pays}")
        return "\n".join(lines)


def rounds(asked: Asked) -> Report:
    """Measure rounds on random weights.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig`.
    """
    with rig(replace(asked, drafter=True)) as made:
        has_drafter = made.engine.block_size > 0
        arms = measured(made, wall=lambda pos, width: _verify_ms(made, pos, width))
        drafts = {context: draft_times(made, context) for context in asked.contexts} if has_drafter else {}
        rounds_ms = {
            context: {
                arm.width: arm.wall_ms.median + (drafts[context].median if has_drafter else 0.0)
                for arm in arms
                if arm.context == context
            }
            for context in asked.contexts
        }
        plain_ms = {arm.context: arm.wall_ms.median for arm in arms if arm.width == 1}
        return Report(
            ran=made.facts,
            drafts=DRAFTED if has_drafter else GIVEN.format(why=made.engine.draft_fault or "the shape has no drafter"),
            draft_ms=drafts,
            arms=arms,
            rounds_s={context: {width: 1e3 / ms for width, ms in each.items()} for context, each in rounds_ms.items()},
            breaks_even={
                context: {width: ms / plain_ms[context] for width, ms in each.items() if context in plain_ms}
                for context, each in rounds_ms.items()
            },
            clocks=gpu.clocks(made.devices, made.work),
        )


def draft_times(made: Rig, context: int) -> Times:
    """Time blocks of drafts behind a context."""
    places = positions(max(context, 1), 1)[:DRAFTS_SAMPLES]
    for _ in range(3):  # compiles, captures, replays
        made.draft(places[0])
    taken = []
    for pos in places:
        started = time.perf_counter()
        made.draft(pos)
        taken.append(1e3 * (time.perf_counter() - started))
    return Times.of(taken)


def _verify_ms(made: Rig, pos: int, width: int) -> float:
    """Time the rest of a round: the rows, the best token of each, and the commit of those that agree."""
    tokens = made.tokens(pos, width)
    made.stand(pos)
    started = time.perf_counter()
    chosen = made.engine.draw_rows(made.state, tokens, GREEDY).ids
    made.engine.commit(made.state, rows_kept(tokens[1:], chosen))
    return 1e3 * (time.perf_counter() - started)
