"""The queue as values: places, counters, history, cancelling by id."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dsv4nb.errors import EngineError, RequestError
from dsv4nb.session.server import KEPT_PAST
from dsv4nb.session.waiting import SHORT, Past
from dsv4nb.testing.fake_model import fake_model

LONG = " ".join(f"w{i}" for i in range(2000))


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_who_runs_tells_how_far_it_is_and_who_waits_does_not() -> None:
    with fake_model(LONG, delay_s=0.002, chunk=16, chunk_delay_s=0.02) as model:
        tickets = [model.submit("a b " * 40 + text, temperature=0) for text in ("first", "second")]
        until(lambda: model.queue[0].n_read > 0)
        first, second = model.queue
        assert (first.id, first.state, second.id, second.state) == (1, "running", 2, "queued")
        assert 0 < first.n_read < first.n_prompt and first.n_tokens == 0 and first.tokens_per_s is None
        assert first.about.startswith("a b a b") and len(first.about) == SHORT and first.about.endswith("…")
        assert second.n_read == second.n_tokens == 0 and second.waited_s > 0
        until(lambda: model.queue[0].n_tokens > 20)
        first = model.queue[0]
        assert first.n_read == first.n_prompt and first.tokens_per_s is not None and 50 < first.tokens_per_s < 2000
        assert model.queue_head(1) == ([model.queue[0]], 2) or model.queue_head(1)[1] == 2
        for ticket in tickets:
            ticket.cancel()


def test_the_past_tells_what_a_request_came_to() -> None:
    with fake_model(LONG, delay_s=0.001) as model:
        done = model.generate("hi there", max_new=20, temperature=0)
        until(lambda: model.past)
        (past,) = model.past
        assert past == Past(
            id=1,
            state="done",
            about="hi there",
            n_prompt=done.done.n_prompt,
            n_cached=0,
            queue_s=done.done.queue_s,
            run_s=past.run_s,
            n_tokens=20,
            tokens_per_s=past.tokens_per_s,
            outcome="length",
        )
        assert past.run_s == pytest.approx(done.done.elapsed_s - done.done.timings.prepare_s)
        assert past.tokens_per_s == pytest.approx(19 / (done.done.timings.decode_s or 0))
        assert model.queue == []


def test_a_request_is_cancelled_by_its_id_where_it_waits_and_where_it_runs() -> None:
    with fake_model(LONG, delay_s=0.002) as model:
        tickets = [model.submit("hi") for _ in range(3)]
        until(lambda: model.queue[0].n_tokens > 1)
        model.cancel(2)
        assert [one.id for one in model.queue] == [1, 3]
        (past,) = model.past
        assert (past.id, past.state, past.outcome, past.n_tokens) == (2, "cancelled", "cancelled", 0)
        assert past.queue_s > 0 and past.run_s == pytest.approx(0, abs=0.1)
        model.cancel(1)
        until(lambda: tickets[0].state == "cancelled" and [one.id for one in model.queue] == [3])
        until(lambda: [one.id for one in model.past] == [2, 1])
        assert model.past[1].n_tokens > 0
        tickets[2].cancel()
        for number in (1, 2, 7):
            with pytest.raises(RequestError, match=f"request {number} is not in the queue") as refused:
                model.cancel(number)
            assert refused.value.param == "id"


def test_a_failure_is_told_in_its_own_words() -> None:
    with fake_model("Fine.", faults={0: RuntimeError("boom")}) as model:
        with pytest.raises(EngineError):
            model.generate("hi")
        until(lambda: model.past)
        (past,) = model.past
        assert past.state == "failed" and "boom" in past.outcome and past.tokens_per_s is None and past.run_s >= 0


def test_the_past_is_bounded_and_holds_no_reply() -> None:
    with fake_model("Fine.") as model:
        for _ in range(KEPT_PAST + 5):
            model.generate("hi", max_new=1)
        until(lambda: len(model.past) == KEPT_PAST and model.past[0].id == KEPT_PAST + 5)
        assert all(type(value) in (int, float, str, type(None)) for value in map(str, model.past))


def test_a_listener_hears_of_every_coming_and_going_and_can_stop_listening() -> None:
    heard: list[tuple[str, int]] = []
    with fake_model("Fine.") as model:
        end = model.on_queue_change(lambda: heard.append((threading.current_thread().name, len(model.past))))
        model.generate("hi", max_new=1)
        until(lambda: len(heard) == 2)
        assert heard == [("MainThread", 0), (f"dsv4nb-serve-{model.name}", 1)]
        end()
        model.generate("hi", max_new=1)
    assert len(heard) == 2


def test_a_listener_that_fails_stops_no_request() -> None:
    def fail() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("nobody looks")

    with fake_model(["Fine.", "Again."]) as model:
        model.on_queue_change(fail)
        assert model.generate("hi").text == "Fine." and model.generate("hi").text == "Again."


def test_ids_are_told_without_slowing_the_run() -> None:
    """Counting happens on the thread that asks: a reader that asks all the time costs the run only the interpreter."""
    with fake_model(LONG) as model:
        ticket = model.submit("hi", max_new=500)
        seen = set()
        while ticket.state in ("queued", "running"):
            seen |= {one.n_tokens for one in model.queue}
        assert ticket.result().done.n_tokens == 500 and seen
