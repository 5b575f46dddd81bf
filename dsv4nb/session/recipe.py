"""What is needed to replay a reply, and the check that a replay is one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dsv4nb import __version__
from dsv4nb.config import SpecConfig
from dsv4nb.encoding.grammar import Constraint
from dsv4nb.errors import ReplayMismatch
from dsv4nb.events import Recipe
from dsv4nb.session.request import Limits, Request

_FAST = ", or the prompt was read in other chunks behind what was cached of it (prefill='exact' has none)"


def recipe_of(request: Request, ids: Sequence[int]) -> Recipe:
    """Return the recipe of the reply `ids` to `request`."""
    limits = request.limits
    return Recipe(
        version=__version__,
        model=limits.model if limits else "",
        weights=limits.weights if limits else "",
        arithmetic=limits.arithmetic if limits else "",
        encoding=limits.revision if limits else "",
        prompt=request.prompt,
        max_new=request.max_new,
        config=request.config,
        spec=request.spec,
        is_thinking=request.is_thinking,
        has_tools=request.has_tools,
        stops=request.stops,
        eos=tuple(sorted(request.eos)),
        constraint=None if request.constraint is None else request.constraint.to_json(),
        ids_sha256=digest(ids),
        given=request.given,
        prefill=limits.prefill if limits else "exact",
    )


def request_of(recipe: Recipe, limits: Limits) -> Request:
    """Return the request that a recipe stands for.

    Raises:
        ReplayMismatch: the recipe is of another model.
    """
    for name, told, loaded in (
        ("weights", recipe.weights, limits.weights),
        ("arithmetic", recipe.arithmetic, limits.arithmetic),
        ("encoding", recipe.encoding, limits.revision),
    ):
        if told != loaded:
            raise ReplayMismatch(
                f"the recipe is of {recipe.model!r} with {name} {told!r}; this model has {loaded!r}. "
                "Load the checkpoint that the recipe names.",
                param=name,
            )
    if recipe.prefill != limits.prefill:
        raise ReplayMismatch(
            f"the recipe's prompt was read with prefill={recipe.prefill!r}; this model reads with {limits.prefill!r}. "
            f"Load it with prefill={recipe.prefill!r}.",
            param="prefill",
        )
    return Request(
        prompt=recipe.prompt,
        max_new=recipe.max_new,
        config=recipe.config,
        spec=_spec(recipe, limits),
        is_thinking=recipe.is_thinking,
        has_tools=recipe.has_tools,
        stops=recipe.stops,
        eos=frozenset(recipe.eos),
        constraint=None if recipe.constraint is None else Constraint.from_json(recipe.constraint),
        given=recipe.given,
        limits=limits,
    )


def _spec(recipe: Recipe, limits: Limits) -> SpecConfig | None:
    """How to speculate: as told where there is a drafter; without one, plainly, if the ids are the same."""
    if recipe.spec is None or limits.spec is not None:
        return recipe.spec
    if recipe.spec.mode == "exact" or recipe.config.is_greedy:
        return None
    raise ReplayMismatch(
        f"the recipe was sampled with spec_mode='rejection', whose ids depend on the drafter: {limits.no_drafter}",
        param="spec",
    )


def check(recipe: Recipe, ids: Sequence[int]) -> None:
    """Compare a replay with its recipe.

    Raises:
        ReplayMismatch: the ids differ.
    """
    found, other = digest(ids), _FAST if recipe.prefill == "fast" else ""
    if found != recipe.ids_sha256:
        raise ReplayMismatch(
            f"the replay has {len(ids)} ids with SHA-256 {found[:12]}…; the recipe says {recipe.ids_sha256[:12]}…: "
            f"the recipe was changed{other}, or this machine computes other numbers."
        )


def digest(ids: Sequence[int]) -> str:
    """Return the SHA-256 of ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
