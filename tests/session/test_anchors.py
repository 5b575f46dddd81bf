from __future__ import annotations

import gc
import random
import traceback
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from dsv4nb.errors import EngineError, RequestError
from dsv4nb.session.anchors import Anchor, Anchors


class Kept:
    """A snapshot that counts how often it was released."""

    def __init__(self, pos: int, nbytes: int = 10, fault: Exception | None = None) -> None:
        self.pos, self.nbytes, self.fault = pos, nbytes, fault
        self.released = 0

    def release(self) -> None:
        self.released += 1
        if self.fault is not None:
            raise self.fault


def anchor(*ids: int, nbytes: int = 10, snapshot: Kept | None = None) -> Anchor:
    return Anchor(ids=ids, snapshot=snapshot or Kept(len(ids), nbytes))


def released(*anchors: Anchor) -> list[int]:
    """How often the snapshot of each was released."""
    return [a.snapshot.released for a in anchors if isinstance(a.snapshot, Kept)]


def committed(anchors: Anchors, *new: Anchor) -> tuple[Anchor, ...]:
    """Commit each of `new` in a turn of its own."""
    for one in new:
        anchors.add(one)
        anchors.commit()
    return anchors.committed


def test_h23_an_anchor_counts_once_its_turn_has_succeeded() -> None:
    anchors = Anchors(100)
    first, second = anchor(1, 2), anchor(1, 2, 3, 4)
    committed(anchors, first)
    anchors.add(second)
    assert anchors.longest([1, 2, 3, 4, 5]) is first
    assert anchors.pending == (second,)
    anchors.commit()
    assert anchors.longest([1, 2, 3, 4, 5]) is second
    assert not anchors.pending and released(first, second) == [0, 0]


def test_h23_a_turn_that_was_stopped_leaves_the_anchors_as_they_were() -> None:
    anchors = Anchors(100)
    first, second, third = anchor(1, 2), anchor(1, 2, 3), anchor(1, 2)
    committed(anchors, first)
    anchors.add(second)
    anchors.add(third)  # of the same ids as a committed one
    anchors.drop_pending()
    assert [*anchors.committed] == [first] and not anchors.pending
    assert released(first, second, third) == [0, 1, 1]
    anchors.commit()  # nothing is pending
    assert anchors.committed == (first,) and anchors.longest([1, 2, 3]) is first


def test_h23_a_turn_that_takes_more_than_the_budget_and_is_stopped_costs_others_but_not_the_newest() -> None:
    anchors = Anchors(30)
    old, newest, pending = anchor(1), anchor(1, 2), anchor(1, 2, 3, nbytes=25)
    committed(anchors, old, newest)
    anchors.add(pending)
    assert released(old, newest) == [1, 0]
    anchors.drop_pending()
    assert anchors.committed == (newest,) and anchors.longest([1, 2, 3, 4]) is newest


def test_a11_a_snapshot_of_another_position_is_no_anchor() -> None:
    with pytest.raises(EngineError, match="a snapshot at position 250 is no anchor of 200 tokens"):
        Anchor(ids=tuple(range(200)), snapshot=Kept(250))


def test_a07_an_anchor_keeps_its_logits() -> None:
    row = np.zeros(4, np.float32)
    anchors = Anchors(100)
    (kept,) = committed(anchors, Anchor(ids=(1, 2), snapshot=Kept(2), logits=row))
    assert kept.logits is row


def test_the_longest_strict_prefix_is_found() -> None:
    anchors = Anchors(1000)
    one, two, four, other = anchor(1), anchor(1, 2), anchor(1, 2, 3, 4), anchor(1, 2, 9)
    committed(anchors, four, one, other, two)
    assert anchors.longest([1, 2, 3, 4, 5]) is four
    assert anchors.longest([1, 2, 3, 4]) is two, "as long as the prompt"
    assert anchors.longest([1, 2, 9, 9]) is other
    assert anchors.longest([1, 7]) is one
    assert anchors.longest([1]) is None and anchors.longest([]) is None and anchors.longest([2, 1]) is None


def test_a05_an_equal_hash_is_not_enough() -> None:
    here, there = (*range(300), -1), (*range(300), -2)
    assert hash(here) == hash(there)
    anchors = Anchors(1000)
    committed(anchors, anchor(*here))
    assert anchors.longest([*there, 5]) is None
    assert anchors.longest([*here, 5]) is not None
    committed(anchors, anchor(*there))  # and it replaces nothing
    assert len(anchors.committed) == 2


def test_h14_room_is_made_before_a_snapshot_is_taken() -> None:
    anchors = Anchors(40)
    a, b, c, d = (anchor(*range(n)) for n in (1, 2, 3, 4))
    committed(anchors, a, b, c, d)
    assert anchors.nbytes == 40
    anchors.make_room(10)
    assert (anchors.nbytes, released(a, b, c, d)) == (30, [1, 0, 0, 0])
    anchors.make_room(10)
    assert anchors.nbytes == 30, "there was room"
    anchors.make_room(1000)
    assert anchors.committed == (d,), "the newest is what a stopped turn falls back to"
    assert released(a, b, c, d) == [1, 1, 1, 0]


def test_the_least_recently_used_goes_first_and_the_newest_never() -> None:
    anchors = Anchors(30)
    a, b, c = anchor(1), anchor(2), anchor(3)
    committed(anchors, a, b, c)
    anchors.touch(a)
    assert anchors.committed == (b, c, a)
    committed(anchors, d := anchor(4))
    assert anchors.committed == (c, a, d) and released(a, b, c, d) == [0, 1, 0, 0]
    for used in (c, a):
        anchors.touch(used)
    anchors.add(anchor(5, nbytes=20))
    assert [*anchors.committed] == [d], "the newest is kept although it was used least recently"
    anchors.touch(b)  # it is gone; nothing happens
    assert [*anchors.committed] == [d]


def test_the_newest_is_kept_whatever_it_takes() -> None:
    anchors = Anchors(30)
    big = anchor(1, 2, nbytes=500)
    committed(anchors, anchor(1), big)
    assert anchors.committed == (big,) and anchors.nbytes == 500
    committed(anchors, small := anchor(3))
    assert anchors.committed == (small,) and released(big) == [1]


def test_of_several_in_one_turn_the_last_is_the_newest() -> None:
    anchors = Anchors(25)
    a, b, c = anchor(1), anchor(2), anchor(3)
    for one in (a, b, c):
        anchors.add(one)
    assert anchors.pending == (b, c) and released(a, b, c) == [1, 0, 0]
    anchors.commit()
    anchors.touch(b)
    anchors.make_room(10)
    assert anchors.committed == (c,)


def test_an_anchor_of_the_same_ids_replaces_the_one_before() -> None:
    anchors = Anchors(100)
    first, again, other = anchor(1, 2), anchor(1, 2), anchor(1)
    committed(anchors, first, other)
    anchors.add(again)
    assert released(first) == [0], "the turn may still fail"
    anchors.commit()
    assert anchors.committed == (other, again) and released(first, again) == [1, 0]
    anchors.add(x := anchor(7))
    anchors.add(y := anchor(7))
    assert anchors.pending == (y,) and released(x, y) == [1, 0]


def test_a_snapshot_is_released_once_no_anchor_has_it() -> None:
    anchors = Anchors(100)
    snapshot = Kept(2)
    first, again = anchor(1, 2, snapshot=snapshot), anchor(1, 2, snapshot=snapshot)
    committed(anchors, first, again, again)
    assert anchors.committed == (again,) and anchors.nbytes == 10 and snapshot.released == 0
    anchors.clear()
    assert snapshot.released == 1


def test_h19_clear_releases_all() -> None:
    anchors = Anchors(100)
    a, b, c = anchor(1), anchor(2), anchor(3)
    committed(anchors, a, b)
    anchors.add(c)
    anchors.clear()
    assert (anchors.committed, anchors.pending, anchors.nbytes) == ((), (), 0)
    assert released(a, b, c) == [1, 1, 1] and anchors.longest([1, 2]) is None
    anchors.clear()
    assert released(a, b, c) == [1, 1, 1]


def test_one_that_cannot_be_released_holds_up_no_other() -> None:
    anchors = Anchors(100)
    a, c = anchor(1), anchor(3)
    b = anchor(2, snapshot=Kept(1, fault=EngineError("the device is gone")))
    committed(anchors, a, b, c)
    with pytest.raises(EngineError, match="the device is gone"):
        anchors.clear()
    assert released(a, b, c) == [1, 1, 1] and anchors.committed == ()


def test_an_error_of_a_release_keeps_no_snapshot() -> None:
    anchors, snapshot = Anchors(100), Kept(1, fault=EngineError("the device is gone"))
    held = weakref.ref(snapshot)
    committed(anchors, anchor(2, snapshot=snapshot))
    del snapshot
    with pytest.raises(EngineError) as caught:
        anchors.clear()
    traceback.clear_frames(caught.tb)  # as the serving thread does
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "9", None])
def test_a_budget_is_a_positive_integer(budget: object) -> None:
    with pytest.raises(RequestError, match=f"^budget_bytes is {budget!r}; it must be an integer, 1 or more$"):
        Anchors(budget)  # type: ignore[arg-type]


def longest_of(held: Sequence[Anchor], prompt: Sequence[int]) -> Anchor | None:
    """Slices, one anchor at a time."""
    fits = [a for a in held if len(a.ids) < len(prompt) and tuple(prompt[: len(a.ids)]) == a.ids]
    return max(fits, key=lambda a: len(a.ids), default=None)


@pytest.mark.parametrize("seed", range(8))
def test_random_turns_leak_no_snapshot_and_never_lose_the_newest(seed: int) -> None:
    draw = random.Random(seed)
    anchors = Anchors(60)
    made: list[Anchor] = []
    newest: Anchor | None = None
    base = [draw.randrange(2) for _ in range(12)]
    for _ in range(600):
        act = draw.choices(("add", "commit", "drop", "touch", "room", "clear"), (8, 4, 2, 3, 2, 0.2))[0]
        if act == "add":
            ids = base[: draw.randint(1, 12)]
            if draw.random() < 0.3:
                ids[-1] = 5
            made.append(anchor(*ids, nbytes=draw.randint(1, 30)))
            anchors.add(made[-1])
            assert anchors.pending[-1] is made[-1]
        elif act == "commit":
            newest = anchors.pending[-1] if anchors.pending else newest
            anchors.commit()
        elif act == "drop":
            before = anchors.committed
            anchors.drop_pending()
            assert anchors.committed == before and not anchors.pending
        elif act == "touch" and anchors.committed:
            anchors.touch(used := draw.choice(anchors.committed))
            assert anchors.committed[-1] is used
        elif act == "room":
            anchors.make_room(room := draw.randint(0, 60))
            spared = sum(a.snapshot.nbytes for a in {*anchors.pending[-1:], newest} if a is not None)
            assert anchors.nbytes <= max(60 - room, spared)
        elif act == "clear":
            anchors.clear()
            newest = None
        held = (*anchors.committed, *anchors.pending)
        assert released(*made) == [int(a not in held) for a in made]
        assert newest is None or newest in anchors.committed
        spared = sum(a.snapshot.nbytes for a in {*anchors.pending[-1:], newest} if a is not None)
        assert anchors.nbytes == sum(a.snapshot.nbytes for a in held) <= max(60, spared)
        assert len({a.ids for a in anchors.committed}) == len(anchors.committed)
        prompt = base[: draw.randint(0, 12)]
        assert anchors.longest(prompt) is longest_of(anchors.committed, prompt)


def test_a_pinned_anchor_stays_and_its_successor_is_pinned_too() -> None:
    anchors = Anchors(300)
    kept, *_ = committed(anchors, anchor(1, nbytes=100))
    anchors.pin(kept.id)
    for i in range(2, 6):
        committed(anchors, anchor(i, nbytes=100))
        assert kept in anchors.committed and len(anchors.committed) <= 3
    (again,) = (a for a in committed(anchors, anchor(1, nbytes=100)) if a.ids == kept.ids)
    assert again is not kept and anchors.is_pinned(again)
    anchors.pin(again.id, False)
    for i in range(6, 10):
        committed(anchors, anchor(i, nbytes=100))
    assert again not in anchors.committed


def test_pins_keep_to_the_budget_and_name_what_there_is() -> None:
    anchors = Anchors(250)
    first, second = anchor(1, nbytes=100), anchor(2, nbytes=100)
    committed(anchors, first)
    committed(anchors, second)
    large = anchor(3, nbytes=200)
    anchors.pin(first.id)
    committed(anchors, large)  # the newest is kept whatever it takes
    with pytest.raises(RequestError, match="unpin another") as caught:
        anchors.pin(large.id)
    assert caught.value.param == "id" and not anchors.is_pinned(large)
    with pytest.raises(RequestError, match=f"no anchor 0; those there are: {first.id}"):
        anchors.pin(0)
    anchors.delete(first.id)
    anchors.pin(large.id)
    anchors.delete(large.id)
    assert anchors.committed == () and anchors.nbytes == 0
    with pytest.raises(RequestError, match="those there are: none"):
        anchors.delete(large.id)
