from __future__ import annotations

from collections import Counter

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.reuse import Policy
from dsv4nb.testing.fake_engine import FakeEngine
from dsv4nb.testing.fake_model import fake_model

EAGER = Policy(suffix_limit=0, prefix_floor=1, host_floor=4, anchors=False)


def test_a_prefix_that_is_deleted_after_the_choice_is_still_gone_on_from() -> None:
    """Another thread may delete an entry of host memory at any time."""
    engine, prompt = FakeEngine(), list(range(300, 320))
    prefixes = Prefixes(host_mib=8)
    prefixes.policy = EAGER  # host memory goes by its floor from now on
    state = engine.new_state()
    engine.prefill(state, prompt[:10])
    prefixes.mark(engine, state, prompt[:10], None)
    prefixes.commit(engine, prompt, prefixes.decide(prompt, ()))
    start = prefixes.decide(prompt, ())
    assert (start.decision.kind, start.decision.length) == ("host", 10)
    prefixes.delete(prefixes.host[0].id)
    resumed, ids, row = prefixes.resume(engine, start)
    assert (resumed.pos, list(ids), row) == (10, prompt[:10], None)
    prefixes.commit(engine, prompt, start)  # counting a hit of what is gone is no error


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("no room")], ids=["memory", "error"])
@pytest.mark.parametrize("name", ["capture", "dump"])
def test_a11_a_snapshot_that_cannot_be_had_fails_no_reply(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Exception
) -> None:
    def broken(*_: object) -> None:
        raise fault

    with fake_model(["one", "two", "three"]) as model:
        model.cache.policy = Policy(host_floor=8)
        model._parts.server.prefixes._host.budget_bytes = 1 << 20
        chat = model.chat()
        with monkeypatch.context() as patch:
            patch.setattr(model.engine, name, broken)
            assert chat.send("word " * 40).text == "one"
        assert model.cache.host == [] and bool(model.cache.stats().anchors) == (name == "dump")
        reply = chat.send("more")
        assert reply.text == "two" and reply.done.reuse is not None
        assert reply.done.reuse.kind == ("live" if name == "dump" else "reset")
        assert chat.send("again").done.reuse.kind == "live"  # type: ignore[union-attr]


def test_decisions_are_logged_with_their_divergence_newest_first() -> None:
    with fake_model(["one", "two", "three"]) as model:
        chat = model.chat()
        chat.send("What is this?")
        chat.edit(-1, "What is that?")
        model.generate("alone")  # takes nothing of earlier runs
        newest, first = model.cache.log
        assert (first.number, first.decision.kind) == (1, "reset") and newest.number == 2
        away = newest.decision.diverges_at
        assert away is not None and newest.n_prompt == newest.decision.length + newest.decision.computed
        assert away.met == chat.ids(0)[away.position] != away.expected
        assert Counter(one.decision.kind for one in model.cache.log) == model.cache.stats().decisions


def test_anchors_are_pinned_deleted_and_moved_to_host_memory_and_back() -> None:
    with fake_model(["one", "two"]) as model:
        model.cache.policy = Policy(host_floor=8)
        model._parts.server.prefixes._host.budget_bytes = 1 << 20
        chat = model.chat()
        chat.send("word " * 40)
        cache = model.cache
        ids = [anchor.id for anchor in cache.anchors]
        cache.pin_anchor(ids[0])
        assert [one.is_pinned for one in cache.stats().anchors if one.id == ids[0]] == [True]
        (held,) = cache.host
        on_host = cache.host_ids(held.id)
        (anchor,) = (one for one in cache.anchors if one.ids == on_host)
        with pytest.raises(RequestError, match="in host memory already"):
            cache.store(anchor.id)
        with pytest.raises(RequestError, match="on the device already"):
            cache.restore(held.id)
        cache.delete_anchor(anchor.id)
        assert cache.of(on_host) is None
        back = cache.restore(held.id)
        assert [one.ids for one in cache.anchors if one.id == back] == [on_host]
        cache.delete(held.id)
        stored = cache.store(back)
        assert [entry.id for entry in cache.host] == [stored] and cache.host_ids(stored) == on_host
        reply = chat.send("again")
        assert reply.done.reuse is not None and reply.done.reuse.kind in ("live", "anchor")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": 0}, "host memory keeps nothing; load the model with host_cache_mib="),
        ({"floor": 1000}, "host memory takes prefixes of 1000 and more"),
        ({"budget": 64}, "host memory has 0.0 MiB"),
    ],
    ids=["off", "short", "large"],
)
def test_what_host_memory_does_not_take_is_refused(change: dict[str, int], said: str) -> None:
    with fake_model("one") as model:
        prefixes = model._parts.server.prefixes
        prefixes.policy = Policy(host_floor=change.get("floor", 8), host=False)
        prefixes._host.budget_bytes = change.get("budget", 1 << 20)
        model.chat().send("word " * 40)
        with pytest.raises(RequestError, match=said) as caught:
            model.cache.store(model.cache.anchors[0].id)
        assert caught.value.param == "id" and model.cache.host == []
        for act in (model.cache.store, model.cache.pin_anchor, model.cache.delete_anchor):
            with pytest.raises(RequestError, match="no anchor 0"):
                act(0)
        with pytest.raises(RequestError, match="no entry 99"):
            model.cache.restore(99)
