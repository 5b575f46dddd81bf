from __future__ import annotations

import random
import sys
import threading
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from dsv4nb.errors import RequestError
from dsv4nb.session.host_cache import MIB, HostCache, HostPrefix, HostStats

EMPTY: dict[str, int] = {"empty": 0, "short": 0, "whole": 0, "differs": 0}


def ids(n: int, first: int = 0) -> list[int]:
    return [first, *range(1, n)]


def payload(mib: float = 1) -> dict[str, np.ndarray]:
    return {"window": np.zeros(int(mib * MIB) - 4, np.uint8), "entries": np.zeros(1, np.float32)}


def found(cache: HostCache, prompt: Sequence[int]) -> int | str:
    """The length of what is found, or the reason."""
    prefix = cache.find(prompt)
    return prefix.length if isinstance(prefix, HostPrefix) else prefix


def stored(cache: HostCache) -> list[int]:
    """The ids of the entries, the most recently used first."""
    return [entry.id for entry in cache.entries()]


def use(cache: HostCache, prompt: Sequence[int]) -> None:
    cache.count(cache.find(prompt))


def test_a09_the_numbers_add_up() -> None:
    cache = HostCache(3)
    use(cache, ids(300))
    first = cache.insert(ids(200), payload())
    second = cache.insert(ids(260), payload(1.5))
    assert (first, second) == (1, 2)
    for prompt in (ids(300), ids(300), ids(260), ids(259), ids(200), ids(128), ids(300, first=9)):
        use(cache, prompt)
    assert cache.stats() == HostStats(
        entries=2,
        tokens=460,
        bytes=int(2.5 * MIB),
        budget_bytes=3 * MIB,
        hits=4,
        misses={"empty": 1, "short": 1, "whole": 1, "differs": 1},
        evictions=0,
    )
    rows = {entry.id: (entry.tokens, entry.mib, entry.hits, entry.is_pinned) for entry in cache.entries()}
    assert rows == {1: (200, 1.0, 2, False), 2: (260, 1.5, 2, False)}
    assert stored(cache) == [1, 2]
    idle = [entry.idle_s for entry in cache.entries()]
    assert 0 <= idle[0] <= idle[1] < 60


def test_a09_the_least_recently_used_goes_first() -> None:
    cache = HostCache(3)
    for i in range(3):
        cache.insert(ids(200, first=i), payload())
    use(cache, ids(201, first=0))
    assert stored(cache) == [1, 3, 2]
    cache.find(ids(201, first=1))  # looked at and not used
    assert cache.insert(ids(200, first=7), payload()) == 4
    assert stored(cache) == [4, 1, 3]
    assert cache.insert(ids(200, first=8), payload(1.5)) == 5
    assert stored(cache) == [5, 4] and cache.stats().evictions == 3


def test_a09_clear_forgets_the_entries_and_not_the_counts() -> None:
    cache = HostCache(2)
    cache.insert(ids(200), payload())
    cache.pin(1)
    use(cache, ids(201))
    cache.clear()
    stats = cache.stats()
    assert (stats.entries, stats.tokens, stats.bytes, stats.hits, stats.evictions) == (0, 0, 0, 1, 0)
    assert found(cache, ids(201)) == "empty"
    assert cache.insert(ids(200), payload()) == 2, "a number names one entry for ever"


def test_a10_the_longest_strict_prefix_of_at_least_128_tokens_is_found() -> None:
    cache = HostCache(9)
    for n in (128, 200, 160):
        cache.insert(ids(n), payload())
    assert cache.insert(ids(127), payload()) is None
    assert [found(cache, ids(n)) for n in (300, 201, 200, 161, 160, 129, 128)] == [
        200,
        200,
        160,
        160,
        128,
        128,
        "short",
    ]
    assert found(cache, [*ids(150), 0, *ids(150)]) == 128
    assert found(cache, ids(300, first=5)) == "differs"
    whole = HostCache(9)
    whole.insert(ids(200), payload())
    assert found(whole, ids(200)) == "whole" and found(whole, ids(199)) == "differs"


def test_a10_a_lookup_copies_no_payload() -> None:
    cache = HostCache(64)
    arrays = payload(32)
    cache.insert(ids(2000), arrays)
    prompt = ids(2100)
    tracemalloc.start()
    try:
        prefix = cache.find(prompt)
        cache.count(prefix)
        assert tracemalloc.get_traced_memory()[1] < 100_000
        np.zeros(MIB)  # what a copy would look like
        assert tracemalloc.get_traced_memory()[1] > MIB
    finally:
        tracemalloc.stop()
    assert isinstance(prefix, HostPrefix)
    assert all(prefix.arrays[name] is arrays[name] for name in arrays)


def test_a05_an_equal_hash_is_a_miss() -> None:
    here, there = (*range(200), -1), (*range(200), -2)
    assert hash(here) == hash(there)
    cache = HostCache(4)
    cache.insert(here, payload())
    assert found(cache, (*there, 3)) == "differs" and found(cache, (*here, 3)) == 201
    assert cache.wants(there) and not cache.wants(here)


def test_a12_what_is_stored_is_not_stored_again() -> None:
    cache = HostCache(4)
    assert cache.wants(ids(200))
    arrays = payload()
    cache.insert(ids(200), arrays)
    assert not cache.wants(ids(200)) and cache.insert(ids(200), payload()) is None
    prefix = cache.find(ids(201))
    assert isinstance(prefix, HostPrefix) and prefix.arrays["window"] is arrays["window"]
    assert not cache.wants(ids(127)) and cache.wants(ids(128))
    assert cache.stats().entries == 1


def test_a_pinned_entry_stays_until_it_is_deleted() -> None:
    cache = HostCache(2)
    cache.insert(ids(200), payload())
    cache.pin(1)
    for i in range(1, 4):
        cache.insert(ids(200, first=i), payload())
    assert stored(cache) == [4, 1] and [entry.is_pinned for entry in cache.entries()] == [False, True]
    assert cache.insert(ids(200, first=9), payload(1.5)) is None, "larger than what is not pinned leaves"
    assert stored(cache) == [4, 1], "and nothing was evicted for it"
    cache.pin(1, False)
    cache.insert(ids(200, first=9), payload(1.5))
    assert stored(cache) == [5]
    cache.pin(5)
    cache.delete(5)
    assert stored(cache) == [] and cache.stats().evictions == 4


def test_what_is_larger_than_the_budget_evicts_nothing() -> None:
    cache = HostCache(2)
    cache.insert(ids(200), payload())
    assert cache.insert(ids(300), payload(2.01)) is None
    assert stored(cache) == [1]
    assert cache.insert(ids(300), payload(2)) == 2 and stored(cache) == [2]


def test_a_prefix_that_was_found_outlives_its_entry() -> None:
    cache = HostCache(1)
    arrays = payload()
    cache.insert(ids(200), arrays)
    prefix = cache.find(ids(300))
    cache.delete(1)
    assert isinstance(prefix, HostPrefix) and prefix.arrays["window"] is arrays["window"] and prefix.length == 200
    cache.count(prefix)
    assert cache.stats().hits == 1 and stored(cache) == []


def test_a_budget_of_nothing_switches_the_cache_off() -> None:
    cache = HostCache(0)
    assert not cache.wants(ids(500)) and cache.insert(ids(500), {}) is None
    assert found(cache, ids(500)) == "empty"


def test_an_entry_that_is_not_there_is_refused_by_name() -> None:
    cache = HostCache(4)
    with pytest.raises(RequestError, match=r"^the host cache has no entry 7; stored are: none$"):
        cache.delete(7)
    cache.insert(ids(200), payload())
    cache.insert(ids(201), payload())
    for act in (cache.pin, cache.delete):
        with pytest.raises(RequestError, match=r"^the host cache has no entry 7; stored are: 1, 2$"):
            act(7)


@pytest.mark.parametrize("budget", [-1, float("nan"), float("inf"), True, "9", None])
def test_a_bad_budget_is_refused_by_name(budget: object) -> None:
    with pytest.raises(RequestError, match=r"^budget_mib is .*; it must be a number of MiB, 0 "):
        HostCache(budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("floor", [0, -1, 1.5, True])
def test_a_bad_floor_is_refused_by_name(floor: object) -> None:
    with pytest.raises(RequestError, match=r"^floor is .*; it must be an integer, 1 or more"):
        HostCache(1, floor=floor)  # type: ignore[arg-type]


def test_random_use_agrees_with_a_list(seed: int = 3) -> None:
    draw = random.Random(seed)
    cache = HostCache(10, floor=3)
    entries: list[tuple[int, tuple[int, ...], int]] = []  # id, ids, MiB; least recently used first
    pinned: set[int] = set()
    hits, evictions, misses = 0, 0, dict(EMPTY)
    base = [draw.randrange(2) for _ in range(14)]
    for _ in range(3000):
        prompt = tuple([*base[: draw.randint(0, 14)], *([7] if draw.random() < 0.2 else [])])
        act = draw.choices(("use", "insert", "pin", "delete", "clear"), (8, 6, 1, 1, 0.05))[0]
        if act == "use":
            use(cache, prompt)
            fits = [e for e in entries if len(prompt) > 3 and e[1] == prompt[: len(e[1])]]
            strict = [e for e in fits if len(e[1]) < len(prompt)]
            if strict:
                best = max(strict, key=lambda e: len(e[1]))
                entries.remove(best)
                entries.append(best)
                hits += 1
            else:
                misses["empty" if not entries else "short" if len(prompt) <= 3 else "whole" if fits else "differs"] += 1
        elif act == "insert":
            mib = draw.randint(1, 6)
            id = cache.insert(prompt, payload(mib))
            room = 10 - sum(e[2] for e in entries if e[0] in pinned)
            if len(prompt) < 3 or any(e[1] == prompt for e in entries) or mib > room:
                assert id is None
                continue
            assert id is not None
            while sum(e[2] for e in entries) + mib > 10:
                entries.remove(next(e for e in entries if e[0] not in pinned))
                evictions += 1
            entries.append((id, prompt, mib))
        elif act == "pin" and entries:
            id = draw.choice(entries)[0]
            cache.pin(id, id not in pinned)
            pinned ^= {id}
        elif act == "delete" and entries:
            gone = draw.choice(entries)
            cache.delete(gone[0])
            entries.remove(gone)
        elif act == "clear":
            cache.clear()
            entries = []
        assert stored(cache) == [e[0] for e in reversed(entries)]
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.evictions) == (hits, misses, evictions)
        assert stats.bytes == sum(e[2] for e in entries) * MIB <= 10 * MIB
        assert stats.tokens == sum(len(e[1]) for e in entries)
    assert hits > 100 and evictions > 100 and min(misses.values()) > 10


def test_threads_neither_break_it_nor_lose_a_count() -> None:
    cache = HostCache(2, floor=2)
    problems: list[BaseException] = []
    each = 400

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(each):
                prompt = [draw.randrange(2) for _ in range(6)]
                use(cache, prompt)
                cache.insert(prompt[:4], payload(0.5))
                for entry in cache.entries()[-1:]:
                    try:
                        cache.pin(entry.id, draw.random() < 0.1)
                        cache.delete(entry.id)
                    except RequestError as e:  # another thread was first
                        assert "has no entry" in str(e)
                assert cache.stats().bytes <= 2 * MIB
        except BaseException as problem:
            problems.append(problem)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not problems and not any(thread.is_alive() for thread in threads)
    stats = cache.stats()
    assert stats.hits + sum(stats.misses.values()) == 4 * each
    assert stats.bytes == sum(round(entry.mib * MIB) for entry in cache.entries())
