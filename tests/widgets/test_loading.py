from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import LoadCancelled, RequestError
from dsv4nb.stream.loading import Loading
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.weights.progress import LoadStep
from dsv4nb.widgets.loading import LoadPanel


@pytest.fixture
def panel(open_panel: Callable[..., LoadPanel]) -> LoadPanel:
    return open_panel(LoadPanel)


def reading(done: int, total: int = 1000) -> LoadStep:
    return LoadStep(
        phase="weights",
        done_bytes=done,
        total_bytes=total,
        shard="model-00002-of-00046.safetensors",
        n_shard=2,
        n_shards=46,
        placed=(("cuda:0", 10), ("cuda:1", 20)),
    )


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_j19_a_load_is_told_while_its_thread_is_busy(panel: LoadPanel) -> None:
    assert panel.state["state"] == "waiting"
    loading = Loading("Flash", "/models/flash", panel.follow)
    loading.tell(LoadStep(phase="headers"))
    panel._pump.drain()
    assert (panel.state["state"], panel.state["phase"]) == ("loading", "reading headers")
    loading.tell(reading(250))
    until(lambda: panel.state["done"] == 250)
    told = panel.state
    assert (told["total"], told["n_shard"], told["n_shards"]) == (1000, 2, 46)
    assert told["placed"] == [["cuda:0", 10], ["cuda:1", 20]] and told["path"] == "/models/flash"
    assert told["interrupts"] is True, "it is the main thread that an interrupt reaches"
    with fake_model("hi") as model:
        loading.finish(model.info)
        panel._pump.drain()
        assert panel.state["state"] == "loaded" and panel.state["facts"] == [list(row) for row in model.info.rows()]
    until(lambda: not panel._pump._watches)


def test_ten_thousand_tensors_are_four_messages_a_second(panel: LoadPanel) -> None:
    loading = Loading("Flash", "", panel.follow)
    start = time.monotonic()
    n = 0
    while time.monotonic() - start < 1.1:
        n += 1
        loading.tell(reading(n, 10**9))
    assert n > 10_000 and len(panel.comm.traits("state")) <= 6
    loading.fail(ValueError("x"))


def test_j19_cancel_reaches_the_load_at_once_and_is_answered_once(panel: LoadPanel) -> None:
    loading = Loading("Flash", "", panel.follow)
    loading.tell(reading(10))
    panel._pump.drain()
    panel.comm.from_page({"kind": "cancel", "id": "a"})
    assert loading._cancelled.is_set(), "before the pump has a turn"
    panel.comm.from_page({"kind": "cancel", "id": "a"})
    panel._pump.drain()
    assert panel.state["state"] == "cancelling"
    with pytest.raises(LoadCancelled) as stopped:
        loading.tell(reading(20))
    loading.fail(stopped.value)
    panel._pump.drain()
    assert panel.state["state"] == "cancelled" and panel.state["error"] == str(stopped.value)
    assert [ack["ok"] for ack in panel.comm.messages("ack")] == [True, True]


def test_there_is_nothing_to_cancel_when_nothing_loads(panel: LoadPanel) -> None:
    panel.comm.from_page({"kind": "cancel", "id": "a"})
    panel._pump.drain()
    assert panel.comm.messages("ack")[0]["error"].startswith("nothing is being loaded")


def test_one_panel_shows_one_load_after_the_other(panel: LoadPanel) -> None:
    first = Loading("first", "", panel.follow)
    first.tell(reading(10))
    first.fail(ValueError("bad"))
    panel._pump.drain()
    assert (panel.state["state"], panel.state["error"]) == ("failed", "ValueError: bad")
    second = Loading("second", "", panel.follow)
    second.tell(reading(1))
    panel._pump.drain()
    assert (panel.state["name"], panel.state["state"], panel.state["error"]) == ("second", "loading", "")
    second.fail(ValueError("bad"))


def test_a_load_on_another_thread_is_not_interrupted(panel: LoadPanel) -> None:
    loading = Loading("Flash", "", panel.follow)
    thread = threading.Thread(target=loading.tell, args=(reading(1),))
    thread.start()
    thread.join()
    panel._pump.drain()
    assert panel.state["interrupts"] is False
    loading.fail(ValueError("x"))


def test_the_card_of_a_model() -> None:
    with fake_model("hi", name="<b>me</b>") as model:
        panel = LoadPanel(model)
        assert panel.state["state"] == "loaded" and panel.state["name"] == "<b>me</b>" and not panel.state["brief"]
        text, page = str(panel.saved()), panel.saved()._repr_html_()
        assert all(value in text for _, value in model.info.rows())
        assert "<b>me</b> is loaded." in text and "<b>" not in page
        panel.close()
    with pytest.raises(RequestError, match="model is a int"):
        LoadPanel(5)


def test_j11_the_saved_form_of_a_load_that_was_stopped(panel: LoadPanel) -> None:
    assert str(panel.saved()) == "No load yet."
    loading = Loading("Flash", "", panel.follow)
    loading.tell(reading(250))
    panel._pump.drain()
    assert "Loading Flash: reading weights" in str(panel.saved())
    loading.fail(KeyboardInterrupt())
    panel._pump.drain()
    text = str(panel.saved())
    assert "loading Flash was cancelled at 25 %" in text and "250 B of 1.0 kB" in text and "2 of 46" in text


def test_what_is_none_of_ours_is_ignored(panel: LoadPanel) -> None:
    contents: list[Any] = [None, {"kind": "cancel"}, {"kind": "stop", "id": "a"}]
    for content in contents:
        panel.comm.from_page(content)
    panel._pump.drain()
    assert panel.comm.messages() == []
