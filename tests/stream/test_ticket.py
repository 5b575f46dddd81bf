from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4nb.errors import EngineError
from dsv4nb.events import Done, Event, Failed, Token
from dsv4nb.model import Model
from dsv4nb.testing.fake_model import fake_model

LONG = "word " * 200


@pytest.fixture
def model() -> Iterator[Model]:
    with fake_model([LONG, "Fine."], delay_s=0.004) as made:
        yield made


def interrupt_in(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_every_reader_sees_every_event() -> None:
    with fake_model("a b c d e", delay_s=0.002) as model:
        ticket = model.submit("hi")
        seen: list[list[Any]] = [[], [], []]
        readers = [threading.Thread(target=lambda out=out: out.extend(ticket.events())) for out in seen]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(5)
        late = list(ticket.events())
        assert seen[0] == seen[1] == seen[2] == late == ticket.poll(0)[0]
        assert isinstance(late[-1], Done)


def test_polling_never_waits_and_goes_on_where_it_was(model: Model) -> None:
    ticket = model.submit("hi", max_new=5)
    got: list[Event] = []
    is_finished = False
    while not is_finished:
        started = time.monotonic()
        events, is_finished = ticket.poll(len(got))
        assert time.monotonic() - started < 0.1
        got += events
    assert got == list(ticket.events())
    assert ticket.poll(len(got)) == ([], True)


def test_states_go_one_way(model: Model) -> None:
    first, second = model.submit("hi", max_new=5), model.submit("hi", max_new=1)
    seen = [second.state]
    next(iter(first.events()))
    seen.append(first.state)
    assert second.result().text == "Fine."
    assert [*seen, first.state, second.state] == ["queued", "running", "done", "done"]
    assert repr(second) == "<Ticket done, 4 events>"


def test_waiting_has_a_limit_and_does_not_cancel(model: Model) -> None:
    ticket = model.submit("hi", max_new=30)
    assert not ticket.wait(0.02)
    assert not ticket.wait(0)
    with pytest.raises(TimeoutError, match=r"still running after 0\.01 s"):
        ticket.result(0.01)
    assert ticket.wait() and ticket.result().stop_reason == "length"


def test_text_grows(model: Model) -> None:
    ticket = model.submit("hi", max_new=10)
    lengths = []
    while not ticket.wait(0.005):
        lengths.append(len(ticket.text))
    assert lengths == sorted(lengths)
    assert ticket.text == ticket.result().text


def test_an_interrupt_of_result_cancels_and_waits_for_the_end(model: Model) -> None:
    ticket = model.submit("hi")
    interrupt_in(0.1)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ticket.result()
    assert time.monotonic() - started < 1.0
    assert ticket.state == "cancelled" and ticket.text
    assert model.generate("hi").text == "Fine."


def test_an_interrupt_of_events_cancels(model: Model) -> None:
    ticket = model.submit("hi")
    interrupt_in(0.1)
    with pytest.raises(KeyboardInterrupt):
        for _ in ticket.events():
            pass
    assert ticket.wait(1.0) and ticket.state == "cancelled"


def test_an_interrupt_in_a_silent_prefill_is_seen_soon() -> None:
    with fake_model("a", chunk=10, chunk_delay_s=0.1) as model:
        interrupt_in(0.15)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt_ids=[9] * 1000)
        assert time.monotonic() - started < 0.6


def test_a_failed_run_raises_its_error_from_result_only() -> None:
    with fake_model("a b", faults={0: RuntimeError("lost")}) as model:
        ticket = model.submit("hi")
        events = list(ticket.events())
        assert isinstance(events[-1], Failed) and events[-1].code == "engine"
        for _ in range(2):
            with pytest.raises(EngineError, match="RuntimeError: lost") as raised:
                ticket.result()
            assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_ticket_keeps_its_model_alive() -> None:
    ticket = fake_model(LONG, delay_s=0.001).submit("hi", max_new=20)
    assert ticket.result().stop_reason == "length"


def test_m54_texts_joined_per_channel_are_the_result(model: Model) -> None:
    ticket = model.submit("hi", max_new=9)
    result = ticket.result()
    tokens = [event for event in ticket.events() if isinstance(event, Token)]
    assert "".join(t.text for t in tokens if t.channel == "content") == result.text
    assert "".join(t.text for t in tokens) == result.raw_text
    assert tuple(t.id for t in tokens) == result.ids
