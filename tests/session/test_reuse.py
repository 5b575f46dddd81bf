from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from dsv4nb.errors import PromptEmpty, RequestError
from dsv4nb.session.reuse import (
    BLOCK,
    Decision,
    Divergence,
    Known,
    Policy,
    anchor_length,
    common_prefix,
    decide,
    starts_with,
)


def ids(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def kept(decision: Decision) -> tuple[str, int, int, int | None]:
    return decision.kind, decision.length, decision.computed, decision.index


# (tokens of the prompt, of the live cache, of the anchor; 0 = there is none) -> (kind, length)
THRESHOLDS = [
    (306, 0, 1, "reset", 0),
    (516, 16, 0, "reset", 0),
    (48, 37, 0, "live", 37),
    (180, 0, 140, "anchor", 140),
    # 32 or 33 rows behind a short prefix
    (132, 100, 0, "live", 100),
    (133, 100, 0, "reset", 0),
    (132, 0, 100, "anchor", 100),
    (133, 0, 100, "reset", 0),
    # 127 or 128 tokens before a long suffix
    (1000, 127, 0, "reset", 0),
    (1000, 128, 0, "live", 128),
    (1000, 0, 127, "reset", 0),
    (1000, 0, 128, "anchor", 128),
    (159, 127, 0, "live", 127),
    (160, 127, 0, "reset", 0),
    (2, 1, 0, "live", 1),
]


@pytest.mark.parametrize(("n", "live", "anchor", "kind", "length"), THRESHOLDS)
def test_h13_a_short_prefix_before_many_rows_is_left_alone(
    n: int, live: int, anchor: int, kind: str, length: int
) -> None:
    known = Known(ledger=ids(live), anchors=[ids(anchor)] if anchor else [])
    index = 0 if kind == "anchor" else None
    assert kept(decide(ids(n), known)) == (kind, length, n - length, index)


def test_h13_the_thresholds_can_be_set() -> None:
    known = Known(ledger=ids(16))
    assert decide(ids(516), known, Policy(prefix_floor=16)).kind == "live"
    assert decide(ids(516), known, Policy(suffix_limit=500)).kind == "live"
    assert decide(ids(516), known, Policy(suffix_limit=499, prefix_floor=17)).kind == "reset"


def test_h10_a_prompt_that_continues_the_cache_computes_only_what_follows() -> None:
    decision = decide(ids(250), Known(ledger=ids(200), anchors=[ids(192)], host=[150]))
    assert kept(decision) == ("live", 200, 50, None)
    assert decision.diverges_at is None
    assert decision.reason == "The prompt continues the 200 cached tokens: 50 rows to compute."


def test_h11_a_rewritten_tail_falls_back_to_the_anchor() -> None:
    # a thinking turn: the reply follows its prompt of 200, then the encoder drops the reasoning
    ledger = ids(200) + ids(60, 1000)
    prompt = ids(199) + ids(40, 5000)
    decision = decide(prompt, Known(ledger=ledger, has_logits=True, anchors=[ids(192)]))
    assert kept(decision) == ("anchor", 192, 47, 0)
    assert decision.diverges_at == Divergence(position=199, expected=199, met=5000)
    assert decision.reason == (
        "The prompt leaves the cache at token 199, with id 5000 instead of 199; "
        "the anchor of 192 tokens begins the prompt: 47 rows to compute."
    )


def test_h11_an_anchor_as_long_as_the_prompt_is_none_without_its_logits() -> None:
    known = Known(anchors=[ids(200), ids(192)])
    assert kept(decide(ids(200), known)) == ("anchor", 192, 8, 1)


def test_a07_an_anchor_that_kept_its_logits_leaves_nothing_to_compute() -> None:
    known = Known(anchors=[ids(200), ids(192)], anchors_with_logits={0})
    decision = decide(ids(200), known)
    assert kept(decision) == ("anchor", 200, 0, 0)
    assert decision.reason == (
        "Nothing of this chat is cached; the anchor of 200 tokens begins the prompt: no rows to compute."
    )
    assert kept(decide(ids(200), known, Policy(exact=False))) == ("anchor", 192, 8, 1)
    assert kept(decide(ids(201), known)) == ("anchor", 200, 1, 0)


def test_h12_a_prompt_that_nothing_begins_starts_over_and_says_where_it_left() -> None:
    prompt = [*ids(300), 7, *ids(40, 900)]
    decision = decide(prompt, Known(ledger=ids(400), has_logits=True, anchors=[ids(392)], host=[]))
    assert kept(decision) == ("reset", 0, 341, None)
    assert decision.diverges_at == Divergence(position=300, expected=300, met=7)
    assert decision.reason == (
        "The prompt leaves the cache at token 300, with id 7 instead of 300; nothing else begins the prompt: "
        "341 rows to compute."
    )


def test_h12_a_prompt_that_ends_within_the_cache_leaves_it_there() -> None:
    decision = decide(ids(100), Known(ledger=ids(400), has_logits=True))
    assert decision.kind == "reset"
    assert decision.diverges_at == Divergence(position=100, expected=100, met=None)
    assert decision.reason.startswith("The prompt ends at token 100, within the 400 cached ones; ")


def test_h17_a_prompt_that_is_the_cache_computes_nothing() -> None:
    decision = decide(ids(200), Known(ledger=ids(200), has_logits=True, anchors=[ids(192)]))
    assert kept(decision) == ("exact", 200, 0, None)
    assert kept(decide(ids(1), Known(ledger=ids(1), has_logits=True))) == ("exact", 1, 0, None)


def test_h17_without_logits_an_exact_hit_is_none_and_says_so() -> None:
    known = Known(ledger=ids(200), anchors=[ids(192)])
    decision = decide(ids(200), known)
    assert kept(decision) == ("anchor", 192, 8, 0)
    assert decision.reason.startswith("The prompt is exactly what is cached, but the logits behind it were not kept; ")
    assert kept(decide(ids(200), Known(ledger=ids(200)))) == ("reset", 0, 200, None)
    switched_off = decide(ids(200), Known(ledger=ids(200), has_logits=True, anchors=[ids(192)]), Policy(exact=False))
    assert kept(switched_off) == ("anchor", 192, 8, 0)
    assert "exact hits are switched off" in switched_off.reason


def test_h18_logits_of_the_cache_are_not_those_of_an_anchor() -> None:
    # 192 tokens were restored and nothing was run since: the caller has no logits, whatever the anchor's length
    assert decide(ids(192), Known(ledger=ids(192), has_logits=False, anchors=[ids(192)])).kind == "reset"


def test_h20_a_cache_that_a_failure_left_unusable_is_neither_continued_nor_exact() -> None:
    for n in (200, 210):
        known = Known(ledger=ids(200), has_logits=True, is_healthy=False, anchors=[ids(192)])
        decision = decide(ids(n), known)
        assert kept(decision) == ("anchor", 192, n - 192, 0)
        assert decision.reason.startswith("The cache is unusable after a failure; ")


def test_the_longest_prefix_wins() -> None:
    anchors = [ids(150), ids(170), ids(160)]
    assert kept(decide(ids(300), Known(ledger=ids(140), anchors=anchors, host=[165]))) == ("anchor", 170, 130, 1)
    assert kept(decide(ids(300), Known(ledger=ids(171), anchors=anchors, host=[165]))) == ("live", 171, 129, None)
    assert kept(decide(ids(300), Known(ledger=ids(140), anchors=anchors, host=[180, 171]))) == ("host", 180, 120, None)


def test_of_equally_long_ones_live_comes_before_an_anchor_before_host_memory() -> None:
    everything = Known(ledger=ids(200), anchors=[ids(200), ids(200)], host=[200])
    for switched_off, kind in ((), "live"), (("live",), "anchor"), (("live", "anchors"), "host"):
        assert decide(ids(300), everything, Policy(**dict.fromkeys(switched_off, False))).kind == kind
    nothing = decide(ids(300), everything, Policy(live=False, anchors=False, host=False))
    assert kept(nothing) == ("reset", 0, 300, None)
    assert nothing.reason == (
        "Continuing the cache is switched off; anchors and host memory switched off: 300 rows to compute."
    )


def test_a_prefix_in_host_memory_has_a_floor_of_its_own_and_is_strict() -> None:
    assert decide(ids(140), Known(host=[127])).kind == "reset"
    assert decide(ids(140), Known(host=[128])).kind == "host"
    assert decide(ids(140), Known(host=[140])).kind == "reset"
    assert decide(ids(140), Known(host=[127]), Policy(host_floor=127)).kind == "host"


def test_a_reset_for_want_of_length_says_the_numbers() -> None:
    assert decide(ids(516), Known(ledger=ids(16))).reason == (
        "The longest prefix at hand has 16 of the 516 tokens; one below 128 is not worth it with more than 32 behind "
        "it, here 500: 516 rows to compute."
    )


def test_a05_an_anchor_with_another_id_anywhere_is_none() -> None:
    for at in (0, 1, 100, 130, 191):
        anchor = ids(192)
        anchor[at] = -1
        assert decide(ids(300), Known(anchors=[anchor])).kind == "reset", at
    # equal hashes: hash(-1) == hash(-2) in CPython
    prompt, anchor_ids = (*ids(200), -1, *ids(40)), (*ids(200), -2)
    assert hash(prompt[:201]) == hash(anchor_ids)
    assert decide(prompt, Known(anchors=[anchor_ids])).kind == "reset"


class Watched(list[int]):
    """Ids that tell when they are read."""

    def __init__(self, name: str, values: Sequence[int], log: list[str]) -> None:
        super().__init__(values)
        self.name, self.log = name, log

    def __getitem__(self, index: Any) -> Any:
        self.log.append(self.name)
        return super().__getitem__(index)


def test_a04_what_is_at_hand_is_asked_before_a_reset_and_the_live_cache_first() -> None:
    log: list[str] = []
    ledger, anchor = Watched("live", ids(200), log), Watched("anchor", ids(150), log)
    prompt = [5, *ids(250)]
    assert decide(prompt, Known(ledger=ledger, anchors=[anchor])).kind == "reset"
    assert list(dict.fromkeys(log)) == ["live", "anchor"]
    log.clear()
    assert decide(ids(250), Known(ledger=ledger, anchors=[anchor])).kind == "live"
    assert set(log) == {"live"}, "a shorter anchor was compared for nothing"


@pytest.mark.parametrize(("n", "length"), [(200, 192), (40, 32), (9, 1), (8, None), (7, None), (1, None), (0, None)])
def test_h14_h15_h16_an_anchor_lies_8_tokens_before_the_end_or_is_none(n: int, length: int | None) -> None:
    assert anchor_length(n) == length


def test_h14_the_tail_can_be_set_and_anchors_switched_off() -> None:
    assert anchor_length(200, Policy(tail=50)) == 150
    assert anchor_length(200, Policy(anchors=False)) is None


def plainly(prompt: Sequence[int], known: Known, policy: Policy) -> tuple[str, int]:
    """The rules, one candidate at a time, with slices and no cleverness."""
    n = len(prompt)

    def begins(other: Sequence[int]) -> bool:
        return list(prompt[: len(other)]) == list(other)

    candidates = []
    if known.is_healthy and len(known.ledger) and begins(known.ledger):
        if len(known.ledger) == n and known.has_logits and policy.exact:
            return "exact", n
        if len(known.ledger) < n and policy.live:
            candidates.append((len(known.ledger), 3, "live"))
    for i, anchor in enumerate(known.anchors):
        whole = len(anchor) == n and policy.exact and i in known.anchors_with_logits
        if policy.anchors and (1 <= len(anchor) < n or whole) and begins(anchor):
            candidates.append((len(anchor), 2, "anchor"))
    candidates += [(h, 1, "host") for h in known.host if policy.host and policy.host_floor <= h < n]
    candidates = [c for c in candidates if not (n - c[0] > policy.suffix_limit and c[0] < policy.prefix_floor)]
    length, _, kind = max(candidates, default=(0, 0, "reset"))
    return kind, length


def test_random_cases_agree_with_the_rules_read_aloud() -> None:
    draw = random.Random(11)
    met: set[str] = set()
    for _ in range(4000):
        base = [draw.randrange(3) for _ in range(40)]

        def near(base: list[int] = base) -> list[int]:
            """A beginning of `base`, one time in three with a changed id."""
            found = base[: draw.randint(0, len(base))]
            if found and draw.random() < 1 / 3:
                found[draw.randrange(len(found))] = 3
            return found

        prompt = near() or [0]
        known = Known(
            ledger=draw.choice([near(), prompt]),
            has_logits=draw.random() < 0.5,
            is_healthy=draw.random() < 0.8,
            anchors=[near() for _ in range(draw.randint(0, 3))],
            anchors_with_logits={i for i in range(3) if draw.random() < 0.3},
            host=[draw.randint(1, 40) for _ in range(draw.randint(0, 2))],
        )
        policy = Policy(
            suffix_limit=draw.randint(0, 20),
            prefix_floor=draw.randint(0, 30),
            host_floor=draw.randint(1, 20),
            **{name: draw.random() < 0.85 for name in ("live", "anchors", "host", "exact")},
        )
        decision = decide(prompt, known, policy)
        assert (decision.kind, decision.length) == plainly(prompt, known, policy), (prompt, known, policy)
        assert decision.computed == len(prompt) - decision.length
        if decision.index is not None:
            assert prompt[: decision.length] == list(known.anchors[decision.index])
        if (away := decision.diverges_at) is not None:
            assert prompt[: away.position] == list(known.ledger[: away.position])
            assert known.ledger[away.position] == away.expected != away.met
            assert prompt[away.position : away.position + 1] == ([] if away.met is None else [away.met])
        met.add(decision.kind)
    assert met == {"exact", "live", "anchor", "host", "reset"}


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_the_common_prefix_is_found_wherever_it_ends(n: int) -> None:
    left, right = tuple(ids(n)), ids(n)
    assert common_prefix(left, right) == n
    assert starts_with(left, right)
    assert common_prefix((*left, 1), (*right, 2)) == n
    assert not starts_with(left, [*right, 2])
    for at in {0, n // 2, n - 1} - {-1} if n else ():
        changed = [*right[:at], -1, *right[at + 1 :]]
        assert common_prefix(left, changed) == at
        assert not starts_with(left, changed)


def test_a_decision_about_100_000_tokens_takes_less_than_2_ms() -> None:
    draw = random.Random(5)
    ledger = [draw.randrange(129_280) for _ in range(100_000)]
    prompt = tuple(int(str(i)) for i in ledger[:-20]) + (1,) * 60  # other objects: nothing is equal by identity
    edited = [[*ledger[:50], 0, *ledger[50 : 99_000 + i]] for i in range(8)]
    known = Known(ledger=ledger, has_logits=True, anchors=[*edited, ledger[:99_900]])
    durations = []
    for _ in range(15):
        start = time.thread_time()
        decision = decide(prompt, known)
        durations.append(time.thread_time() - start)
    assert kept(decision) == ("anchor", 99_900, 140, 8)
    assert min(durations) < 0.002, durations


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptEmpty):
        decide([], Known(ledger=ids(3)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix_limit", -1),
        ("prefix_floor", -1),
        ("tail", 0),
        ("host_floor", 0),
        ("suffix_limit", 1.5),
        ("tail", True),
        ("live", 1),
        ("anchors", None),
        ("host", "no"),
        ("exact", 0),
    ],
)
def test_a_policy_refuses_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} is {value!r}; it must be ") as caught:
        Policy(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
