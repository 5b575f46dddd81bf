"""The cache panel's Python half: what it tells equals the caches, and every answer is of the ids it was asked of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dsv4nb.errors import RequestError
from dsv4nb.model import Model, load
from dsv4nb.session.chat import Chat
from dsv4nb.session.inspection import Inspection
from dsv4nb.stream.frames import Pump
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.cache import CachePanel

HOSTILE = "<script>alert(1)</script>"


class Page:
    """What a browser does: gives commands, and waits for answers."""

    def __init__(self, panel: CachePanel) -> None:
        self.panel, self.buffers, self._n = panel, dict[str, list[bytes]](), 0
        send = panel.send

        def keeping(content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
            if buffers is not None:
                self.buffers[content["id"]] = buffers
            send(content, buffers)

        panel.send = keeping  # type: ignore[method-assign]
        panel._orders._send = keeping

    def ask(self, kind: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any] | None, list[bytes]]:
        """Give a command; return its ack, and the answer that came before it."""
        self._n += 1
        id = f"page-{self._n}"
        comm: Any = self.panel.comm
        comm.from_page({"kind": kind, "id": id, **fields})
        ack = until(lambda: next((one for one in comm.messages("ack") if one["id"] == id), None))
        answer = next((one for one in comm.messages() if one.get("id") == id and one["kind"] != "ack"), None)
        return ack, answer, self.buffers.get(id, [])

    @property
    def key(self) -> str:
        return str(self.panel.state["ledger"]["key"])


def until(look: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy", name="panel", host_cache_mib=16) as model:
        yield model


@pytest.fixture
def chat(model: Model) -> Chat:
    model.cache.clear()
    chat = model.chat(temperature=0)
    chat.send("Remember: the code word is silver otter. " + "Tom went from Oslo to Lima. " * 24)
    chat.send("What is the capital of France?")
    chat.edit(-1, "What is the code word?")
    return chat


@pytest.fixture
def page(model: Model, chat: Chat) -> Iterator[Page]:
    panel = CachePanel(model, chat, pump=Pump())
    yield Page(panel)
    panel.close()


def test_j21_the_ledger_is_the_chats(page: Page, chat: Chat, model: Model) -> None:
    told, ledger = page.panel.state["ledger"], chat.ledger
    last = chat.turns[-1].runs[-1]
    assert told["n"] == len(ledger.ids) and ledger.ids == chat.ids()[: told["n"]]
    assert (told["reused"], told["prompt"]) == (last.n_cached, last.n_prompt)
    assert told["window"] == model.engine.config.sliding_window  # type: ignore[attr-defined]
    assert told["anchors"] == sorted(
        len(anchor.ids) for anchor in model.cache.anchors if ledger.ids[: len(anchor.ids)] == anchor.ids
    )
    ack, answer, _ = page.ask("text", key=page.key, first=0, last=told["n"])
    assert ack["ok"] and answer is not None
    assert "".join(answer["pieces"]) == model.decode(ledger.ids) and len(answer["pieces"]) == told["n"]


def test_j21_bytes_equal_the_allocator_and_the_stats(page: Page, model: Model) -> None:
    (device,) = page.panel.state["devices"]
    (counted,) = model.engine.cache_bytes()  # type: ignore[attr-defined]
    assert device["classes"] == [[name, part.used, part.reserved] for name, part in counted.classes.items()]
    assert device["used"] == sum(used for _, used, _ in device["classes"])
    stats = model.cache.stats()
    assert page.panel.state["budgets"] == [
        ["anchors", stats.anchor_bytes, stats.budget_bytes],
        ["host memory", stats.host.bytes, stats.host.budget_bytes],
    ]
    blocks = {name: used for name, used, _ in device["classes"]}
    pools = [
        (name, pool)
        for layer in model.engine._pools.layers
        for name in ("compressor", "indexer")
        if (pool := getattr(layer, name))
    ]  # type: ignore[attr-defined]
    for wanted in ("compressor", "indexer"):
        assert blocks[wanted] == sum(pool.in_use * 128 * pool.width * 4 for name, pool in pools if name == wanted)
    # between runs only snapshots are alive: their rings are what they say less their last, partly filled blocks
    own = sum(anchor.nbytes for anchor in stats.anchors)
    assert sum(blocks[name] for name in ("window", "source", "drafter")) < own <= stats.anchor_bytes


def test_j21_decisions_come_newest_first_with_reason_and_divergence(page: Page, model: Model) -> None:
    newest, *_, first = page.panel.state["log"]
    assert (newest["kind"], first["kind"]) == ("anchor", "reset")
    decided = model.cache.log[0].decision
    assert (newest["reason"], newest["length"], newest["computed"]) == (
        decided.reason,
        decided.length,
        decided.computed,
    )
    assert newest["away"] == [decided.diverges_at.position, " capital", " code"]  # type: ignore[union-attr]
    assert first["away"] is None


def test_j21_what_a_token_read_is_what_inspect_tells(page: Page, chat: Chat, model: Model) -> None:
    seen: Inspection = model.inspect(chat.ledger.ids)
    for token, layer in ((seen.tokens[-1], 2), (200, 4), (130, 3), (3, 2), (0, 0)):
        ack, answer, buffers = page.ask("reads", key=page.key, token=int(token), layer=layer)
        assert ack["ok"] and answer is not None and answer["key"] == page.key
        reads, told = seen.reads(int(token), layer), answer["told"]
        rows, entries = reads.of("row"), reads.of("entry")
        masses, numbers, mass, scores = (
            np.frombuffer(one, dtype) for one, dtype in zip(buffers, ("<f4", "<i4", "<f4", "<f4"), strict=True)
        )
        assert (told["first"], told["rows"], told["entries"]) == (rows[0].number, len(rows), len(entries))
        assert numbers.tolist() == [entry.number for entry in entries]
        np.testing.assert_allclose(masses, [row.mass for row in rows], atol=1e-6)
        np.testing.assert_allclose(mass, [entry.mass for entry in entries], atol=1e-6)
        assert told["sink"] == pytest.approx(reads.of("sink")[0].mass, abs=1e-6)
        if layer in (2, 4):
            np.testing.assert_allclose(scores, [entry.score for entry in entries], atol=1e-6)
            assert all(entry.pools_from == max(entry.last - told["reach"], 0) for entry in entries)
        else:
            assert not scores.size


def test_j21_experts_are_counted_for_the_tokens_that_were_asked_for(page: Page, chat: Chat, model: Model) -> None:
    routing = model.inspect(chat.ledger.ids, attention=False, logits=False).routing
    n = len(chat.ledger.ids)
    for first, last in ((0, n), (n - 9, n), (5, 6)):
        ack, answer, (buffer,) = page.ask("experts", key=page.key, first=first, last=last)
        assert (
            ack["ok"] and answer is not None and answer["told"] == {"layers": 6, "experts": 8, "tokens": last - first}
        )
        counts = np.frombuffer(buffer, "<i4").reshape(6, 8)
        assert (counts == routing.counts(range(first, last))).all() and counts.sum() == 12 * (last - first)


def test_j21_snapshots_are_pinned_deleted_moved_and_shown(page: Page, model: Model) -> None:
    state = page.panel.state
    entry, n = state["anchors"][-1]["id"], len(state["anchors"])
    assert page.ask("pin", store="anchor", entry=entry, value=True)[0]["ok"]
    assert [one["pinned"] for one in page.panel.state["anchors"] if one["id"] == entry] == [True]
    assert page.ask("choose", key=f"anchor {entry}")[0]["ok"]
    assert page.panel.state["ledger"]["label"] == f"anchor {entry}"
    assert page.ask("delete", store="anchor", entry=entry)[0]["ok"]
    assert len(page.panel.state["anchors"]) == n - 1 and page.panel.state["ledger"]["label"] == "this chat"

    held = page.panel.state["host"][0]["id"]
    assert page.ask("move", store="host", entry=held)[0]["ok"]
    assert len(page.panel.state["anchors"]) == n
    assert page.ask("delete", store="host", entry=held)[0]["ok"] and page.panel.state["host"] == []
    assert page.ask("move", store="anchor", entry=page.panel.state["anchors"][0]["id"])[0]["ok"]
    assert len(page.panel.state["host"]) == 1
    assert page.ask("pin", store="host", entry=page.panel.state["host"][0]["id"], value=True)[0]["ok"]
    assert page.panel.state["host"][0]["pinned"] and model.cache.host[0].is_pinned


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("reads", {"token": 9999, "layer": 2}, "9999"),
        ("reads", {"token": 3, "layer": 6}, "layer 6 was not watched"),
        ("experts", {"first": 5, "last": 5}, "are not among"),
        ("text", {"first": 0, "last": 9999}, "cannot be had"),
        ("pin", {"store": "anchor", "entry": 0, "value": True}, "no anchor 0"),
        ("delete", {"store": "host", "entry": 0}, "no entry 0"),
        ("move", {"store": "anchor", "entry": 0}, "no anchor 0"),
    ],
)
def test_refusals_are_told_in_the_engines_words(page: Page, kind: str, fields: dict[str, Any], said: str) -> None:
    if kind in ("reads", "experts", "text"):
        fields = {"key": page.key, **fields}
    ack, answer, _ = page.ask(kind, **fields)
    assert not ack["ok"] and said in ack["error"] and answer is None


def test_ids_that_have_gone_are_not_answered_for(page: Page, chat: Chat) -> None:
    old = page.key
    chat.send("Thanks.")
    until(lambda: page.key != old)
    ack, answer, _ = page.ask("reads", key=old, token=0, layer=0)
    assert "no longer in the caches" in ack["error"] and answer is None


def test_what_comes_twice_is_done_once(page: Page) -> None:
    comm: Any = page.panel.comm
    entry = page.panel.state["anchors"][0]["id"]
    for _ in range(3):
        comm.from_page({"kind": "delete", "id": "same", "store": "anchor", "entry": entry})
    until(lambda: [one for one in comm.messages("ack") if one["id"] == "same"])
    time.sleep(0.1)
    assert all(one["ok"] for one in comm.messages("ack"))
    comm.from_page({"kind": "delete", "id": "other", "store": "tape", "entry": "x"})
    assert not [one for one in comm.messages("ack") if one["id"] == "other"]


def test_a_panel_follows_its_model_and_stays_readable(model: Model, chat: Chat) -> None:
    panel = CachePanel(model, chat, pump=Pump())
    before = panel.state["ledger"]["n"]
    chat.send(HOSTILE)
    until(lambda: panel.state["ledger"]["n"] != before)
    saved = panel.saved().bundle()
    assert HOSTILE not in saved["text/html"]
    for text in saved.values():
        assert "reused" in text and "CPU window" in text
        for one in panel.state["anchors"]:
            assert f"anchor {one['id']}" in text
        assert f"#{panel.state['log'][0]['number']}" in text
        assert panel.state["log"][0]["reason"] in text.replace("&#x27;", "'")
    panel.close()


def test_without_a_chat_anchors_are_shown_and_without_anything_nothing_is(model: Model, chat: Chat) -> None:
    alone = CachePanel(model, pump=Pump())
    assert [label for _, label, _ in alone.state["strips"]] == [
        f"anchor {anchor.id}" for anchor in reversed(model.cache.anchors)
    ]
    assert alone.state["ledger"]["prompt"] == 0
    with fake_model("one") as scripted:
        panel = CachePanel(scripted, scripted.chat(), pump=Pump())
        assert panel.state["devices"] == [] == panel.state["layers"] and panel.state["ledger"]["n"] == 0
        page = Page(panel)
        scripted_chat: Any = panel._chat
        scripted_chat.send("Hi")
        until(lambda: panel.state["ledger"]["n"])
        ack, _, _ = page.ask("experts", key=page.key, first=0, last=1)
        assert "no places to watch" in ack["error"]
    until(lambda: not panel._errands._n_open)
    ack, _, _ = page.ask("experts", key=page.key, first=0, last=1)
    assert "is closed" in ack["error"]


def test_a_question_waits_for_the_engine_and_holds_up_no_other(page: Page, model: Model) -> None:
    ticket = model.submit("Tell me a story.", max_new=150)
    comm: Any = page.panel.comm
    comm.from_page({"kind": "experts", "id": "late", "key": page.key, "first": 0, "last": 9})
    ack, answer, _ = page.ask("text", key=page.key, first=0, last=3)
    assert ack["ok"] and answer is not None and ticket.state in ("queued", "running")
    ticket.result()
    until(lambda: [one for one in comm.messages("ack") if one["id"] == "late"])


def test_what_is_no_model_is_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="model is a str") as caught:
        CachePanel("toy")  # type: ignore[arg-type]
    assert caught.value.param == "model"
    with pytest.raises(RequestError, match="chat is a int"):
        CachePanel(model, 3)  # type: ignore[arg-type]
