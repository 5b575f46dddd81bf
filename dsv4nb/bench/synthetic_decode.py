"""Decode on random weights: what a forward takes by width and context, and where its time goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dsv4nb.bench import gpu, kernels
from dsv4nb.bench.asked import Asked, Ran
from dsv4nb.bench.rig import Rig, rig
from dsv4nb.bench.steps import HEAD, Arm, measured, ratio

PROFILED = 5  # forwards of each width


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        plain_tok_s: by context: tokens per second of one row after the other, of the median on the host's clock; the
            choice of the token is not in it.
        widest_by_one: by context: what the widest forward takes by what one row takes.
        clocks: of each GPU while it computed.
        kernels: of the first GPU, of one row and of the widest forward, at the first context.
    """

    ran: Ran
    arms: tuple[Arm, ...]
    plain_tok_s: dict[int, float]
    widest: int
    widest_by_one: dict[int, float]
    read_bytes_per_token: dict[int, int]
    clocks: tuple[gpu.Clocks, ...]
    kernels: tuple[kernels.Table, ...]

    def __str__(self) -> str:
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows()]
        lines += [f"{'clocks':<12}{one}" for one in self.clocks] or [f"{'clocks':<12}unknown"]
        lines += ["", HEAD, *(arm.row() for arm in self.arms), ""]
        for context, rate in self.plain_tok_s.items():
            read = self.read_bytes_per_token[context]
            text = f"{rate:.1f} tok/s plain, {read:,} bytes of weights a token"
            if context in self.widest_by_one:
                text += f", T({self.widest})/T(1) {self.widest_by_one[context]:.3f}"
            lines.append(f"at {context:<9}{text}")
        return "\n".join([*lines, *(f"\n{table}" for table in self.kernels)])


def synthetic_decode(asked: Asked) -> Report:
    """Measure forwards on random weights.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig`.
    """
    with rig(asked) as made:
        arms = measured(made)
        widest = max(asked.widths)
        ratios = {context: ratio(arms, context, widest) for context in asked.contexts}
        ones = [arm for arm in arms if arm.width == 1]
        return Report(
            ran=made.facts,
            arms=arms,
            plain_tok_s={arm.context: 1e3 / arm.wall_ms.median for arm in ones},
            widest=widest,
            widest_by_one={context: found for context, found in ratios.items() if found is not None},
            read_bytes_per_token={arm.context: arm.read_bytes for arm in ones},
            clocks=gpu.clocks(made.devices, made.work),
            kernels=tables(made, sorted({min(asked.widths), widest})),
        )


def tables(made: Rig, widths: list[int]) -> tuple[kernels.Table, ...]:
    """Profile forwards of these widths at the first context."""
    context = made.asked.contexts[0]
    found = [
        kernels.profiled(
            made.devices[0], partial(made.forward, context, width), context=context, width=width, runs=PROFILED
        )
        for width in widths
    ]
    return tuple(table for table in found if table is not None)
