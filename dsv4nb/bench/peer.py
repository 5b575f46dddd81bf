"""This engine beside `transformers` on the same GPUs and the same random numbers, in one process, the arms in turn.

A token is a row that is given, from the call to the best id behind it on the host. The prefix of this engine is random
cache rows, that of the other one random tokens that it has read. A few layers of every kind are enough: what a token
takes besides its layers is then a larger part of it, which is to the advantage of whoever takes longer for a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb.bench import devices as named
from dsv4nb.bench import gpu
from dsv4nb.bench.asked import Asked, Ran
from dsv4nb.bench.peer_model import FORMS, Loaded, Stored, loaded, require_transformers
from dsv4nb.bench.rig import Rig, positions, rig
from dsv4nb.bench.spread import Times

OURS = "dsv4nb"
TURNS = 6  # of all arms
AT_ONCE = 8  # tokens of an arm in a turn, and those before the first turn
COMPARED = 32  # rows whose logits are compared
HEAD = f"{'context':>8}  {'one row after the other':<28}{'n':>5}{'ms':>10}{'p95':>10}{'ms/layer':>10}{'by ours':>8}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Tokens of one engine at one context.

    Attributes:
        name: "dsv4nb", or how `transformers` multiplies its experts.
        ms: of each token.
        ms_per_layer: of the median, embedding and head in it.
        by_ours: the median by ours at this context.
        fault: why it has no times; "" where it has.
    """

    context: int
    name: str
    ms: Times | None
    ms_per_layer: float | None
    by_ours: float | None
    fault: str = ""

    def __str__(self) -> str:
        head = f"{self.context:>8}  {self.name:<28}"
        if self.ms is None or self.ms_per_layer is None or self.by_ours is None:
            return f"{head}failed: {self.fault}"
        return (
            f"{head}{self.ms.samples:>5}{self.ms.median:10.3f}{self.ms.p95:10.3f}{self.ms_per_layer:10.4f}"
            f"{self.by_ours:8.2f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Logits of the same tokens from the first position on.

    Attributes:
        rows: of logits.
        correlation: of all logits.
        median_gap: of the absolute differences, by the standard deviation of ours.
        same_best: rows in which both have the same best id.
    """

    rows: int
    correlation: float
    median_gap: float
    same_best: int

    def __str__(self) -> str:
        return (
            f"correlation {self.correlation:.4f}, half of them within {self.median_gap:.4f} of their spread, the same"
            f" best in {self.same_best} of {self.rows} rows"
        )

    @classmethod
    def of(cls, ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> Agreement:
        """Compare logits [T, V]."""
        return cls(
            rows=len(ours),
            correlation=float(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]),
            median_gap=float(np.median(np.abs(ours - theirs)) / ours.std()),
            same_best=int((ours.argmax(1) == theirs.argmax(1)).sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        compiled: its hyper connections.
        stored: how `transformers` holds the weights; `why`: its kernels of FP8 and FP4 do not load.
        their_bytes: of its weights, on all GPUs together.
        least: what the fastest form of `transformers` takes by what this engine takes, by context.
        agreement: of the first form that runs; None where none does.
    """

    ran: Ran
    version: str
    compiled: bool
    stored: Stored
    why: str
    their_bytes: int
    their_load_s: float
    arms: tuple[Arm, ...]
    least: dict[int, float]
    agreement: Agreement | None
    clocks: tuple[gpu.Clocks, ...]

    def __str__(self) -> str:
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows()]
        lines += [f"{'clocks':<12}{one}" for one in self.clocks] or [f"{'clocks':<12}unknown"]
        held = "FP8 and FP4 codes" if not self.why else f"bfloat16, the exact values: no kernels for FP8, {self.why}"
        lines += [
            f"{'peer':<12}transformers {self.version}, {held}; {self.their_bytes / 1e9:.2f} GB, made in"
            f" {self.their_load_s:.1f} s; its own attention and caches"
            f"{', its hyper connections compiled' if self.compiled else ''}",
            f"{'logits':<12}{self.agreement or 'not compared: it does not run'}",
            "",
            HEAD,
            *map(str, self.arms),
            "",
        ]
        return "\n".join(lines + [f"at {context:<9}{ratio:.1f} x this engine" for context, ratio in self.least.items()])


def peer(asked: Asked, *, compiles: bool = False) -> Report:
    """Measure tokens at every context.

    Args:
        compiles: as of `loaded`.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `rig` and `loaded`.
    """
    named.devices_of(asked.devices, asked.placement)
    require_transformers()  # before the weights are made
    with rig(asked, rows=(TURNS + 1) * AT_ONCE, counts=False) as made:
        started = time.perf_counter()
        other = loaded(asked, made.devices, compiles=compiles)
        their_load_s = time.perf_counter() - started
        arms = [arm for context in asked.contexts for arm in _arms(made, other, context)]
        running = [form for form in FORMS if any(arm.name == _told(form) and arm.ms is not None for arm in arms)]
        ours = {arm.context: arm.ms.median for arm in arms if arm.name == OURS and arm.ms is not None}
        return Report(
            ran=made.facts,
            version=other.version,
            compiled=compiles,
            stored=other.stored,
            why=other.why,
            their_bytes=other.nbytes,
            their_load_s=their_load_s,
            arms=tuple(arms),
            least={
                context: min(ratios)
                for context in ours
                if (
                    ratios := [
                        arm.by_ours for arm in arms if arm.context == context and arm.name != OURS and arm.by_ours
                    ]
                )
            },
            agreement=_agreement(made, other, running[0]) if running else None,
            clocks=gpu.clocks(made.devices, made.work),
        )


class _Walk:
    """A sequence of `transformers`: one form of its experts, and the cache that it has filled."""

    def __init__(self, other: Loaded, form: str, made: Rig, context: int) -> None:
        self._model, self._form, self._made, self._cache = other.model, form, made, None
        self._device = made.devices[0]
        self._model.set_experts_implementation(form)
        self.logits(made.tokens(0, 1))  # whether it runs
        self._cache = None
        if context:
            self.logits(made.tokens(0, context))

    def logits(self, tokens: Sequence[int]) -> Any:
        """Read tokens behind the others; return the logits of the last one, [V] on its device."""
        ids = torch.tensor([tokens], device=self._device)
        with torch.inference_mode():
            out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        return out.logits[0, -1]

    def ms(self, pos: int) -> float:
        """Time one token, from the call to the best id behind it."""
        token = self._made.tokens(pos, 1)
        started = time.perf_counter()
        self.logits(token).argmax().item()
        return 1e3 * (time.perf_counter() - started)

    def enter(self) -> None:
        """Let the model multiply its experts so."""
        self._model.set_experts_implementation(self._form)


def _arms(made: Rig, other: Loaded, context: int) -> Iterator[Arm]:
    """Measure this engine and every form of the other one at a context, forwards and backwards in turn."""
    walks: dict[str, _Walk] = {}
    faults: dict[str, str] = {}
    for form in other.forms():
        try:
            walks[form] = _Walk(other, form, made, context)
        except Exception as error:  # a form that does not run on this GPU must not cost the other ones their run
            faults[form] = f"{type(error).__name__}: {error}".partition("\n")[0]
    takes: dict[str, Callable[[int], float]] = {OURS: lambda pos: made.wall_ms(pos, 1)}
    takes |= {form: walk.ms for form, walk in walks.items()}
    taken: dict[str, list[float]] = {name: [] for name in takes}
    places = positions(context, 1)
    for turn in range(TURNS + 1):
        for name in takes if turn % 2 else reversed(takes):
            if name in walks:
                walks[name].enter()
            taken[name] += [takes[name](pos) for pos in places[turn * AT_ONCE : (turn + 1) * AT_ONCE]]
    layers, ours = made.facts.layers, 0.0
    for name, all_ms in taken.items():
        ms = Times.of(all_ms[AT_ONCE:])  # the first turn compiles and captures
        ours = ours or ms.median
        told = name if name == OURS else _told(name)
        yield Arm(context=context, name=told, ms=ms, ms_per_layer=ms.median / layers, by_ours=ms.median / ours)
    for form, fault in faults.items():
        yield Arm(context=context, name=_told(form), ms=None, ms_per_layer=None, by_ours=None, fault=fault)


def _told(form: str) -> str:
    return f"transformers, {form}"


def _agreement(made: Rig, other: Loaded, form: str) -> Agreement:
    """Compare logits of the same tokens from the first position on, read one by one."""
    tokens = made.tokens(0, COMPARED)
    state, ours = made.engine.new_state(), []
    for token in tokens:
        ours.append(np.array(made.engine.forward_rows(state, [token])))
        made.engine.commit(state, 1)
    made.engine.release(state)
    walk = _Walk(other, form, made, 0)
    theirs = torch.stack([walk.logits([token]).float().cpu() for token in tokens])
    return Agreement.of(np.concatenate(ours), theirs.numpy())
