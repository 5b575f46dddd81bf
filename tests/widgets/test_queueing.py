from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.model import Model
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.queueing import LISTED, QueuePanel

LONG = " ".join(f"w{i}" for i in range(3000))


@pytest.fixture
def model() -> Iterator[Model]:
    made = fake_model(LONG, delay_s=0.002)
    yield made
    made.close()


@pytest.fixture
def panel_of(open_panel: Callable[..., QueuePanel]) -> Callable[..., QueuePanel]:
    return partial(open_panel, QueuePanel)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_appear_run_and_become_the_past(model: Model, panel_of: Callable[..., QueuePanel]) -> None:
    panel = panel_of(model)
    assert panel.state == {"waiting": [], "more": 0, "past": [], "closed": False}
    tickets = [model.submit(text, temperature=0) for text in ("first", "second")]
    until(lambda: [one["state"] for one in panel.state["waiting"]] == ["running", "queued"])
    until(lambda: panel.state["waiting"][0]["n_tokens"] > 0 and panel.state["waiting"][0]["rate"])
    assert [one["about"] for one in panel.state["waiting"]] == ["first", "second"]
    panel.comm.from_page({"kind": "cancel", "id": "a", "request": 1})
    until(lambda: [one["id"] for one in panel.state["past"]] == [1])
    panel.comm.from_page({"kind": "cancel", "id": "b", "request": 2})
    until(lambda: not panel.state["waiting"] and [one["id"] for one in panel.state["past"]] == [2, 1])
    assert [ticket.state for ticket in tickets] == ["cancelled", "cancelled"]
    panel.comm.from_page({"kind": "cancel", "id": "c", "request": 2})
    panel._pump.drain()
    a, b, c = panel.comm.messages("ack")
    assert a["ok"] and b["ok"] and c["error"].startswith("request 2 is not in the queue")


def test_at_most_four_updates_a_second_and_none_when_nothing_is_there(
    model: Model, panel_of: Callable[..., QueuePanel]
) -> None:
    panel = panel_of(model)
    ticket = model.submit("hi", temperature=0)
    time.sleep(1.1)
    assert 3 <= len(panel.comm.traits("state")) <= 7, "four a second, one when it came, one when it started"
    ticket.cancel()
    until(lambda: not panel.state["waiting"])
    panel._pump.drain()
    time.sleep(0.3)  # of the tick that finds nothing
    told = len(panel.comm.published)
    assert panel._ticks is None and not panel._pump._watches
    time.sleep(0.6)
    assert len(panel.comm.published) == told


def test_a_burst_of_requests_is_no_burst_of_messages(panel_of: Callable[..., QueuePanel]) -> None:
    with fake_model("Fine.") as quick:
        panel = panel_of(quick)
        start = time.monotonic()
        for _ in range(300):
            quick.generate("hi", max_new=1)
        panel._pump.drain()
        spent = time.monotonic() - start
        assert len(panel.comm.traits("state")) <= 4 * spent + 4


def test_a_long_queue_is_listed_in_part_and_counted_whole(model: Model, panel_of: Callable[..., QueuePanel]) -> None:
    tickets = [model.submit("hi") for _ in range(LISTED + 50)]
    panel = panel_of(model)
    panel._pump.drain()
    assert len(panel.state["waiting"]) == LISTED and panel.state["more"] == 50
    assert "and 50 more" in str(panel.saved()) and "and 50 more" in panel.saved()._repr_html_()
    for ticket in reversed(tickets):
        ticket.cancel()


def test_a_closed_model_is_told(panel_of: Callable[..., QueuePanel]) -> None:
    made = fake_model("Fine.")
    panel = panel_of(made)
    made.close()
    until(lambda: panel.state["closed"])


def test_a_closed_panel_listens_no_more(model: Model, panel_of: Callable[..., QueuePanel]) -> None:
    panel = panel_of(model)
    panel.close()
    model.generate("hi", max_new=1)
    panel._pump.drain()
    assert model._parts.server._on_change == ()
    until(lambda: not panel._pump._watches)


def test_j11_the_saved_form_tells_both(model: Model, panel_of: Callable[..., QueuePanel]) -> None:
    panel = panel_of(model)
    assert "No request is waiting or running." in str(panel.saved())
    model.generate("<script>alert(1)</script>", max_new=2)
    until(lambda: panel.state["past"])
    ticket = model.submit("What is it?")
    until(lambda: panel.state["waiting"])
    text, page = str(panel.saved()), panel.saved()._repr_html_()
    assert "What is it?" in text and "#1" in text and "length" in text
    assert "<script>" not in page and "&lt;script&gt;" in page
    ticket.cancel()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(RequestError, match="model is a int; it must be a model"):
        QueuePanel(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", [None, {"kind": "cancel", "id": "a"}, {"kind": "cancel", "id": "a", "request": "1"}]
)
def test_what_is_none_of_ours_is_ignored(model: Model, panel_of: Callable[..., QueuePanel], content: object) -> None:
    panel = panel_of(model)
    panel.comm.from_page(content)
    panel._pump.drain()
    assert panel.comm.messages() == []
