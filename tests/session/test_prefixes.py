from __future__ import annotations

import pytest

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
