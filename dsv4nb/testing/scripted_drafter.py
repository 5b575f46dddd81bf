"""A drafter that is right as often as it is told to be, for tests and pictures of speculation on any model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dsv4nb.config import SpecConfig
from dsv4nb.engine.protocol import ChooseDraft, DecodeState, Engine, Proposal
from dsv4nb.errors import RequestError
from dsv4nb.model import Model, Parts, load
from dsv4nb.session.server import Server

_numbers = itertools.count()


class ScriptedDrafter:
    """Drafts what the model itself is going to say, each draft right with probability `p`.

    It finds out by running the model ahead, so it is slow, and right at any temperature: a right draft is the very
    draw that the model makes.

    Args:
        p: of every draft, or one per slot; 1 is an oracle, 0 is always wrong.
        confidences: what it says of its drafts, each in (0, 1), one per slot; it says nothing when None.
        block_size: drafts of a round.
        seed: of the chance to be wrong.

    Raises:
        RequestError: a probability is outside [0, 1], a confidence outside (0, 1), or there are not as many as slots.
    """

    def __init__(
        self,
        p: float | Sequence[float] = 1.0,
        confidences: Sequence[float] | None = None,
        *,
        block_size: int = 5,
        seed: int = 0,
    ) -> None:
        self.p = [float(p)] * block_size if isinstance(p, int | float) else [float(one) for one in p]
        self.block_size = block_size
        self._rng = random.Random(seed)
        for name, given in (("p", self.p), ("confidences", confidences)):
            if given is not None and len(given) != block_size:
                raise RequestError(f"{name} has {len(given)} values for {block_size} slots", param=name)
        for one in self.p:
            if not 0 <= one <= 1:
                raise RequestError(f"p has {one}; it must be in [0, 1]", param="p")
        for one in confidences or ():
            if not 0 < one < 1:
                raise RequestError(f"confidences has {one}; it must be in (0, 1)", param="confidences")
        self._conf_logits = tuple(math.log(one / (1 - one)) for one in confidences or ())

    def draft(self, engine: Engine, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft behind `pending`, on a copy of `state`; see `Engine.draft`."""
        snapshot = engine.capture(state)
        ahead = engine.restore(snapshot)
        snapshot.release()
        ids: list[int] = []
        rows, token = [], pending
        try:
            for slot in range(self.block_size):
                if ahead.pos >= engine.max_seq:
                    break
                row = engine.forward_rows(ahead, (token,))[0]
                engine.commit(ahead, 1)
                right = choose(row, slot, ids)
                token = right if self._rng.random() < self.p[slot] else (right + 1) % engine.vocab_size
                ids.append(token)
                rows.append(row)
        finally:
            engine.release(ahead)
        return Proposal(ids=tuple(ids), conf_logits=self._conf_logits[: len(ids)], rows=tuple(rows))


class DraftedEngine:
    """An engine with another drafter than its own; everything else is the engine's."""

    def __init__(self, engine: Engine, drafter: ScriptedDrafter) -> None:
        self._engine, self._drafter = engine, drafter

    def __getattr__(self, name: str) -> Any:
        if name == "draft_and_draw":
            raise AttributeError(name)  # it would draft by the engine's own
        return getattr(self._engine, name)

    @property
    def block_size(self) -> int:
        return self._drafter.block_size

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft as the drafter does."""
        return self._drafter.draft(self._engine, state, pending, choose)


def drafted_model(path: str | Path, drafter: ScriptedDrafter, **options: Any) -> Model:
    """Load a model of its own that speculates with `drafter` in place of the checkpoint's.

    Args:
        options: of `load`, without those of speculation.
    """
    name = f"drafted-{next(_numbers)}"  # an engine that no other handle shares
    model = load(path, name=name, drafter=False, **options)
    parts = model._parts
    engine = cast(Engine, DraftedEngine(parts.engine, drafter))
    server = Server(engine, parts.tokens, name)

    def release() -> None:
        server.close()
        model.close()

    own = Parts(
        engine=engine,
        tokens=parts.tokens,
        server=server,
        limits=replace(parts.limits, spec=SpecConfig(), no_drafter="", block_size=drafter.block_size),
        info=replace(parts.info, drafter=f"scripted, {drafter.block_size} drafts a round"),
        caps=parts.caps,
    )
    return Model(own, release)
