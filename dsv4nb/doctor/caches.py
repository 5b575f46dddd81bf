"""A prompt that goes on from something cached is the prompt computed from its beginning.

It goes through `Live` and `Prefixes` as the turns of a chat do, with prefixes of its own, so the model's stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dsv4nb.doctor import differences
from dsv4nb.doctor.differences import Arrays
from dsv4nb.doctor.plan import Compared, Comparison, Plan, Skip, on_engine
from dsv4nb.doctor.sequences import text_ids
from dsv4nb.engine.protocol import Engine, Row
from dsv4nb.handle import Model
from dsv4nb.session.live import Ledger, Live
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.reuse import Kind, Policy

_REPLY = 5  # tokens that each run goes on with
_NEW = 11  # tokens of a prompt behind what is cached
_LENGTHS = (131, 62)  # of the first prompt
_HOST_MIB = 1024.0

_OPEN = Policy(prefix_floor=0, host_floor=1)  # any prefix is long enough
_POLICIES: dict[Kind, Policy] = {  # the ways to start, each with the others switched off
    "live": replace(_OPEN, anchors=False, host=False),
    "anchor": replace(_OPEN, live=False, host=False),
    "exact": replace(_OPEN, anchors=False, host=False),
    "host": replace(_OPEN, live=False, anchors=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a run was: how it started, its rows from the prompt's last on, and the caches it left."""

    kind: Kind
    cached: int
    rows: tuple[Row, ...]
    caches: Arrays


def _run(
    engine: Engine,
    go_on: Callable[[], None],
    prefixes: Prefixes,
    ledger: Ledger,
    prompt: Sequence[int],
    reply: Sequence[int],
    policy: Policy = _OPEN,
) -> _Run:
    """Read `prompt`, say `reply`, and keep what later runs go on from.

    Args:
        policy: of the start.
    """
    prefixes.policy = policy
    live = Live(engine, prompt, prefixes, ledger)
    prefixes.policy = _OPEN  # what is kept is not its matter
    try:
        rows = [live.begin(should_stop=lambda: False, on_progress=lambda done: go_on())]
        for token in reply:
            go_on()
            rows.append(live.step(token).rows[0])
        live.keep()
        end = prefixes.of(live.ids)
        if end is None:
            raise MemoryError(f"there is no room for a snapshot of {len(live.ids)} tokens")
        caches = engine.dump(end.snapshot)
    finally:
        live.close()
    return _Run(kind=live.decision.kind, cached=live.decision.length, rows=tuple(rows), caches=caches)


def _cached_against_cold(
    ids: Sequence[int], kind: Kind, length: int, engine: Engine, go_on: Callable[[], None]
) -> Compared:
    warm = Prefixes(host_mib=_HOST_MIB if kind == "host" else 0.0)
    cold = Prefixes()
    ledger, end = Ledger(), length + _REPLY
    edited = [*ids[: length - 2], *ids[end : end + _NEW]]
    prompt = {"live": ids[: end + _NEW], "exact": ids[:end], "anchor": edited, "host": edited}[kind]
    reply = ids[end + _NEW : end + _NEW + _REPLY]
    try:
        _run(engine, go_on, warm, ledger, ids[:length], ids[length:end])
        found = _run(engine, go_on, warm, ledger, prompt, reply, _POLICIES[kind])
        expected = _run(engine, go_on, cold, Ledger(), prompt, reply)
    finally:
        warm.forget()
        cold.forget()
    counts = {f"{other} start": int(other == kind) for other in _POLICIES}
    counts |= {"cached token": found.cached, "row": len(found.rows)}
    return Compared(counts=counts, difference=_difference(found, expected, kind, len(prompt)))


def _difference(found: _Run, expected: _Run, kind: Kind, n_prompt: int) -> str:
    if found.kind != kind:
        return f"a prompt of {n_prompt} tokens with a beginning that is known started by {found.kind!r}, not {kind!r}"
    where = f"{kind}, {found.cached} of {n_prompt} prompt tokens cached"
    for i, (row, other) in enumerate(zip(found.rows, expected.rows, strict=True)):
        if difference := differences.of_rows(row, other):
            return f"{where}, row behind position {n_prompt - 1 + i}: {difference}"
    if difference := differences.of_caches(found.caches, expected.caches):
        return f"{where}, caches at position {n_prompt + len(found.rows) - 1}: {difference}"
    return ""


def _comparisons(model: Model) -> list[Comparison]:
    if model.limits.prefill == "fast":
        raise Skip("prefill='fast' adds in an order that depends on where the cached beginning ends; load with 'exact'")
    behind = 2 * _REPLY + _NEW
    lengths = [length for length in _LENGTHS if length + behind <= model.engine.max_seq]
    if not lengths:
        raise Skip(f"max_seq {model.engine.max_seq} has no room for a prompt of {min(_LENGTHS)} tokens and two replies")
    ids = text_ids(model, max(lengths) + behind)
    return [
        partial(on_engine, model, partial(_cached_against_cold, ids, kind, length))
        for length in lengths
        for kind in _POLICIES
    ]


PLAN = Plan(
    name="cached prompts",
    told="prompts with a cached beginning against the same computed anew, every bit of caches and logits",
    weight=3,
    comparisons=_comparisons,
)
