"""Where a request starts: what of its prompt was computed before, and whether that is worth taking. Pure.

Nothing is assumed about the prompt: the encoder rewrites the tail of a history (encoding.md section 10), so ids are
compared, every time. What is at hand is asked for before anything is given up: a reset is what is left when neither
the live cache nor a snapshot will do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dsv4nb.errors import PromptEmpty, RequestError

Kind = Literal["exact", "live", "anchor", "host", "reset"]

BLOCK = 4096  # ids compared at once: 0.8 ms for 100,000; from 32,768 on copies are mapped memory, 1.6 ms
TAIL = 64  # ids of a prefix looked at first: a prompt that was edited before them seldom agrees there


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a prefix is worth taking; each way of skipping work has a switch.

    A prefix is left alone when more than `suffix_limit` rows would follow it and it has fewer than `prefix_floor`
    tokens: then all rows together, in whole chunks, are quicker.

    Attributes:
        suffix_limit: rows, 0 or more.
        prefix_floor: tokens, 0 or more.
        tail: how far before the end of a prompt its anchor is taken, in tokens, 1 or more.
        host_floor: tokens of the shortest prefix that is taken from host memory, 1 or more.
        live, anchors, host: whether the live cache is continued, anchors are taken and restored, host memory is used.
        exact: whether logits that were kept stand in for computing a prompt again.

    Raises:
        RequestError: a value is outside its range; `param` names it.
    """

    suffix_limit: int = 32
    prefix_floor: int = 128
    tail: int = 8
    host_floor: int = 128
    live: bool = True
    anchors: bool = True
    host: bool = True
    exact: bool = True

    def __post_init__(self) -> None:
        for name, least in (("suffix_limit", 0), ("prefix_floor", 0), ("tail", 1), ("host_floor", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RequestError(f"{name} is {value!r}; it must be an integer, {least} or more", param=name)
        for name in ("live", "anchors", "host", "exact"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise RequestError(f"{name} is {value!r}; it must be True or False", param=name)

    def is_worth(self, length: int, n_prompt: int) -> bool:
        """Tell whether a prefix of `length` tokens spares a prompt more than it costs."""
        return n_prompt - length <= self.suffix_limit or length >= self.prefix_floor


DEFAULT = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is at hand for a request.

    Attributes:
        ledger: ids committed in the live cache; lists and tuples are compared fastest.
        has_logits: whether the logits behind the last id of `ledger` were kept.
        is_healthy: whether the live cache can be used; a failure in the middle of a turn makes it unusable.
        anchors: the ids of each snapshot that can be restored.
        anchors_with_logits: which of `anchors`, by index, kept the logits behind their last id.
        host: lengths of the prefixes in host memory that begin this prompt; their ids were compared.
    """

    ledger: Sequence[int] = ()
    has_logits: bool = False
    is_healthy: bool = True
    anchors: Sequence[Sequence[int]] = ()
    anchors_with_logits: Collection[int] = ()
    host: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a prompt leaves the live cache.

    Attributes:
        position: the first that differs.
        expected: the id in the cache.
        met: the id in the prompt, None when the prompt ends there.
    """

    position: int
    expected: int
    met: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request starts, and why.

    Attributes:
        kind: "exact": nothing is computed, the kept logits are the answer; "live": the cache is continued; "anchor",
            "host": a snapshot is restored and continued; "reset": everything is computed.
        length: tokens of the prompt that are not computed again.
        computed: rows to run. 0 for "exact", and for an "anchor" that ends with the prompt and kept its logits.
        reason: a sentence for people.
        diverges_at: where the prompt leaves the live cache, None when it does not or nothing is cached.
        index: which of `Known.anchors`, None for the other kinds.
    """

    kind: Kind
    length: int
    computed: int
    reason: str
    diverges_at: Divergence | None = None
    index: int | None = None


def anchor_length(n_prompt: int, policy: Policy = DEFAULT) -> int | None:
    """Return where the anchor of a prompt is taken, None for one that is too short to have one.

    It lies before the end because the encoder rewrites the end of a prompt once a reply follows it.
    """
    length = n_prompt - policy.tail
    return length if policy.anchors and length > 0 else None


def decide(prompt: Sequence[int], known: Known, policy: Policy = DEFAULT) -> Decision:
    """Choose the longest prefix of `prompt` that can be had and is worth having.

    Of equally long ones the live cache comes first, then anchors, then host memory.

    Args:
        prompt: ids of the request, at least one.

    Raises:
        PromptEmpty: there are none.
    """
    n_prompt, n_ledger = len(prompt), len(known.ledger)
    if not n_prompt:
        raise PromptEmpty("prompt")
    shared = common_prefix(prompt, known.ledger)
    away = None
    if shared < n_ledger:
        away = Divergence(
            position=shared, expected=known.ledger[shared], met=prompt[shared] if shared < n_prompt else None
        )
    continues = known.is_healthy and 0 < n_ledger == shared
    if continues and n_prompt == n_ledger and known.has_logits and policy.exact:
        reason = f"The prompt is exactly what is cached, and the logits behind it were kept: {_rows(0)}."
        return Decision(kind="exact", length=n_prompt, computed=0, reason=reason)
    too_short = 0
    for length, kind, index in _prefixes(prompt, known, policy, shared, continues=continues):
        if policy.is_worth(length, n_prompt):
            computed = n_prompt - length
            reason = f"{_taken(kind, length, prompt, known, away, policy)}: {_rows(computed)}."
            return Decision(kind=kind, length=length, computed=computed, reason=reason, diverges_at=away, index=index)
        too_short = too_short or length
    reason = f"{_why_reset(too_short, prompt, known, away, policy)}: {_rows(n_prompt)}."
    return Decision(kind="reset", length=0, computed=n_prompt, reason=reason, diverges_at=away)


def _prefixes(
    prompt: Sequence[int], known: Known, policy: Policy, shared: int, *, continues: bool
) -> Iterator[tuple[int, Kind, int | None]]:
    """Yield what begins the prompt, best first; ids are compared only when it is their turn.

    Args:
        shared: ids that the prompt and the ledger begin with in common.
        continues: whether the prompt begins with the whole ledger, and the cache can be used.
    """
    n_prompt = len(prompt)
    offers: list[tuple[int, Kind, int | None]] = []
    if policy.live and continues and len(known.ledger) < n_prompt:
        offers.append((len(known.ledger), "live", None))
    if policy.anchors:
        for i, ids in enumerate(known.anchors):
            is_whole = len(ids) == n_prompt and i in known.anchors_with_logits and policy.exact
            if 0 < len(ids) < n_prompt or is_whole:
                offers.append((len(ids), "anchor", i))
    if policy.host:
        offers += [(length, "host", None) for length in known.host if policy.host_floor <= length < n_prompt]
    for length, kind, index in sorted(offers, key=lambda offer: -offer[0]):  # stable: equals stay in the order above
        # ids of the ledger and of an anchor are mostly the same objects, which makes them quick to compare
        ids = known.ledger if length <= shared else prompt
        if index is None or starts_with(ids, known.anchors[index]):
            yield length, kind, index


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids `a` and `b` begin with in common."""
    n = min(len(a), len(b))
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        # the comparison of two tuples is one loop in C
        left, right = tuple(a[start:end]), tuple(b[start:end])
        if left != right:
            return start + next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
    return n


def starts_with(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    """Tell whether `ids` begins with all of `prefix`."""
    n = len(prefix)
    tail = slice(max(0, n - TAIL), n)
    return n <= len(ids) and tuple(ids[tail]) == tuple(prefix[tail]) and common_prefix(ids, prefix) == n


def _rows(n: int) -> str:
    return f"{n or 'no'} row{'s' * (n != 1)} to compute"


def _taken(
    kind: Kind, length: int, prompt: Sequence[int], known: Known, away: Divergence | None, policy: Policy
) -> str:
    if kind == "live":
        return f"The prompt continues the {length} cached tokens"
    source = "the anchor" if kind == "anchor" else "the prefix in host memory"
    return f"{_why_not_live(prompt, known, away, policy)}; {source} of {length} tokens begins the prompt"


def _why_reset(too_short: int, prompt: Sequence[int], known: Known, away: Divergence | None, policy: Policy) -> str:
    if too_short:
        behind = len(prompt) - too_short
        return (
            f"The longest prefix at hand has {too_short} of the {len(prompt)} tokens; one below {policy.prefix_floor} "
            f"is not worth it with more than {policy.suffix_limit} behind it, here {behind}"
        )
    off = [name for name, is_on in (("anchors", policy.anchors), ("host memory", policy.host)) if not is_on]
    other = f"{' and '.join(off)} switched off" if off else "nothing else begins the prompt"
    return f"{_why_not_live(prompt, known, away, policy)}; {other}"


def _why_not_live(prompt: Sequence[int], known: Known, away: Divergence | None, policy: Policy) -> str:
    n_prompt, n_ledger = len(prompt), len(known.ledger)
    if not n_ledger:
        return "Nothing of this chat is cached"
    if not known.is_healthy:
        return "The cache is unusable after a failure"
    if away is not None and away.met is None:
        return f"The prompt ends at token {n_prompt}, within the {n_ledger} cached ones"
    if away is not None:
        return f"The prompt leaves the cache at token {away.position}, with id {away.met} instead of {away.expected}"
    if n_prompt == n_ledger:
        why = "the logits behind it were not kept" if policy.exact else "exact hits are switched off"
        return f"The prompt is exactly what is cached, but {why}"
    return f"The cache holds {n_ledger} tokens" if policy.live else "Continuing the cache is switched off"
