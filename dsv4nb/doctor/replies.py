"""Replies through the handle: speculation changes none, and a recipe gives the same one again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dsv4nb.doctor.plan import Compared, Comparison, Plan, Skip, on_engine
from dsv4nb.doctor.sequences import held
from dsv4nb.engine.logprobs import margin_of
from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import EngineError, ReplayMismatch
from dsv4nb.events import Generation
from dsv4nb.handle import Model
from dsv4nb.session.reuse import common_prefix

_MAX_NEW = 24
_PROMPTS = (
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "What is 63 - 27?",
    "Why is the sky blue?",
)
_PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.2, "penalty_last_n": 64}
_GREEDY = {"temperature": 0.0, "seed": 0}
# the seed is always given, so that none is drawn
_ASKED: tuple[Mapping[str, Any], ...] = (
    _GREEDY,
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2},
    {**_GREEDY, **_PENALTIES},
    {"temperature": 1.0, "seed": 3},
)
_ROUNDS = 3  # over the prompts


def _ways(model: Model) -> Sequence[Mapping[str, Any]]:
    """Return ways to speculate, as many as there are replies: the model's own first, then drawn ones.

    The auto window is not among them: its first use measures the costs of this model for good, and no text depends on
    how many drafts it lets pass.
    """
    block = model.limits.block_size
    rng = random.Random(0)
    windows = ["off", ("slot", 0.5), ("slot", 0.8, min(1, block - 1)), ("slot", 0.3)]
    drawn = [
        {
            "spec_depth": rng.randint(min(2, block + 1), block + 1),
            "spec_window": rng.choice(windows),
            "spec_proposal": rng.choice(("coupled", "greedy")),
        }
        for _ in range(_ROUNDS * len(_PROMPTS) - 1)
    ]
    return [{"spec": True}, *drawn]


def _speculated(model: Model) -> list[Comparison]:
    if model.spec.config is None:
        raise Skip(f"no drafter: {model.spec.note}")
    if model.spec.note:
        raise EngineError(f"the drafter was given up: {model.spec.note}")
    return [
        partial(
            _spoken_against_plain,
            model,
            _PROMPTS[i % len(_PROMPTS)],
            {**_ASKED[(i + i // len(_PROMPTS)) % len(_ASKED)], "max_new": _MAX_NEW},
            way,
        )
        for i, way in enumerate(_ways(model))
    ]


def _spoken_against_plain(model: Model, prompt: str, asked: Mapping[str, Any], way: Mapping[str, Any]) -> Compared:
    expected = model.generate(prompt, **asked, spec=False)
    found = model.generate(prompt, **asked, **way)
    used = found.done.spec
    counts = {
        "reply": 1,
        "token": len(expected.ids),
        "verified draft": 0 if used is None else used.drafted,
        "accepted draft": 0 if used is None else used.accepted,
    }
    difference = _difference(model, found, expected)
    if used is None and len(found.ids) > 1:
        difference = difference or f"nothing was speculated: {found.done.spec_note or found.done.route}"
    where = f"{prompt!r}, {_told({**asked, **way})}"
    return Compared(counts=counts, difference=f"{where}: {difference}" if difference else "")


def _difference(model: Model, found: Generation, expected: Generation) -> str:
    """Compare two replies to one prompt; of different ids the first, with its place and the row it was chosen from."""
    at = common_prefix(found.ids, expected.ids)
    if at == len(found.ids) == len(expected.ids):
        if found.stop_reason == expected.stop_reason:
            return ""
        return f"the ids are the same; the stop reasons are {found.stop_reason!r} and {expected.stop_reason!r}"
    position = expected.done.n_prompt + at
    first, second = (_named(model, reply.ids, at) for reply in (found, expected))
    before = expected.all_ids[:position]
    margin = on_engine(model, lambda engine, go_on: _margin(engine, before))
    return (
        f"token {at + 1}, position {position}: {first} against {second}; in the model's row there "
        f"the best logit is {margin:.3g} above the second"
    )


def _margin(engine: Engine, ids: Sequence[int]) -> float:
    with held(engine) as made:
        return margin_of(made.row(ids))


def _named(model: Model, ids: Sequence[int], at: int) -> str:
    return f"id {ids[at]} {model.decode(ids[at : at + 1])!r}" if at < len(ids) else "the end"


def _told(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _replayed(model: Model) -> list[Comparison]:
    asked: list[Mapping[str, Any]] = [
        _GREEDY,
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.8, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, **_PENALTIES},
    ]
    if model.spec.config is not None:
        asked.append({"temperature": 1.0, "seed": 6, "spec_mode": "rejection"})
    return [partial(_replay, model, prompt, given) for prompt, given in zip(_PROMPTS, asked, strict=False)]


def _replay(model: Model, prompt: str, asked: Mapping[str, Any]) -> Compared:
    reply = model.generate(prompt, **asked, max_new=_MAX_NEW)
    counts = {"recipe": 1, "token": len(reply.ids)}
    try:
        model.replay(reply.recipe.to_json())
    except ReplayMismatch as mismatch:
        return Compared(counts=counts, difference=f"{prompt!r}, {_told(asked)}: {mismatch}")
    return Compared(counts=counts)


SPECULATION = Plan(
    name="speculation",
    told="ids and stop reasons of speculated replies, depths and windows drawn, against plain ones, greedy and "
    "seeds 1 to 3 at temperature 1",
    weight=6,
    comparisons=_speculated,
)
REPLAYS = Plan(
    name="replay", told="ids of replies against those that their recipes give again", weight=2, comparisons=_replayed
)
