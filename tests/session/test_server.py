"""Order, cancellation and containment, through the model's doors."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import EngineError, ModelClosed
from dsv4nb.events import Done, Event, Failed, PromptUsage, Token, TokenSnapshot

MakeModel = Callable[..., Any]

LONG = "word " * 200


def wait_for(holds: Callable[[], bool], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def serving(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == f"dsv4nb-serve-{name}"]


def tokens_of(events: list[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


class TestOrder:
    def test_one_thread_serves_from_load_to_close(self, make_model: MakeModel) -> None:
        model = make_model(name="alone")
        assert len(serving("alone")) == 1
        assert next(t for t in threading.enumerate() if t.name == "dsv4nb-serve-alone").daemon
        model.generate("hi")
        assert model.engine.threads == {"dsv4nb-serve-alone"}
        model.close()
        assert serving("alone") == []
        assert model.engine.calls["close"] == 1

    def test_requests_run_in_the_order_they_came_one_at_a_time(self, make_model: MakeModel) -> None:
        model = make_model([f"reply {i}" for i in range(5)], delay_s=0.005)
        tickets: list[Any] = []
        lock = threading.Lock()

        def submit() -> None:
            with lock:
                tickets.append(model.submit("hi"))

        threads = [threading.Thread(target=submit) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [ticket.result().text for ticket in tickets] == [f"reply {i}" for i in range(5)]
        intervals = sorted(model.engine.intervals)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(intervals))

    def test_waiting_is_told_apart_from_working(self, make_model: MakeModel) -> None:
        model = make_model("a", delay_s=0.2)
        done = [ticket.result().done for ticket in [model.submit("hi") for _ in range(3)]]
        assert done[2].queue_s == pytest.approx(0.4, abs=0.15)
        assert done[2].elapsed_s == pytest.approx(0.2, abs=0.1)
        assert done[0].queue_s < 0.1

    def test_events_come_in_the_promised_order(self, make_model: MakeModel) -> None:
        model = make_model("a b c")
        events = list(model.stream("hi"))
        assert isinstance(events[0], PromptUsage) and events[0].n_cached == 0
        assert events[0].n_prompt == len(model.tokenize("hi"))
        assert [type(event) for event in events[-2:]] == [TokenSnapshot, Done]
        assert [type(event) for event in events[1:-2]] == [Token] * 3
        assert events[-2] == TokenSnapshot(ids=tuple(token.id for token in tokens_of(events) if token.id is not None))

    def test_the_config_is_frozen_and_echoed(self, make_model: MakeModel) -> None:
        done = make_model().generate("hi", temperature=0.5, seed=9).done
        assert done.config == SamplerConfig(temperature=0.5, seed=9)

    def test_a_seed_gives_the_same_reply_again(self, make_model: MakeModel) -> None:
        model = make_model("a b c d")
        first = model.generate("hi", temperature=30.0, max_new=12)
        assert model.generate("hi", temperature=30.0, max_new=12, seed=first.done.config.seed).ids == first.ids


class TestCancel:
    def test_in_the_queue_nothing_is_run(self, make_model: MakeModel) -> None:
        model = make_model(LONG, delay_s=0.01)
        first, second, third = (model.submit("hi") for _ in range(3))
        wait_for(lambda: first.state == "running")
        second.cancel()
        assert second.state == "cancelled" and second.wait(0)
        assert second.result().stop_reason == "cancelled" and second.result().ids == ()
        assert not any(isinstance(event, PromptUsage | Token) for event in second.poll(0)[0])
        first.cancel()
        wait_for(lambda: third.state == "running", timeout=1.0)
        third.cancel()
        assert third.wait(2.0)
        assert model.engine.calls["new_state"] == 2

    def test_in_prefill_it_ends_after_the_chunk(self, make_model: MakeModel) -> None:
        model = make_model(chunk=50, chunk_delay_s=0.03)
        ticket = model.submit(prompt_ids=[9] * 300)
        wait_for(lambda: model.engine.calls["chunks"] == 3)
        ticket.cancel()
        result = ticket.result(2.0)
        assert (result.stop_reason, result.ids, result.text) == ("cancelled", (), "")
        assert model.engine.calls["chunks"] <= 4
        assert model.engine.calls["forward_rows"] == 0
        assert model.generate("hi").text == "Hello there."

    @pytest.mark.parametrize("after", [1, 7, 40])
    def test_in_decode_it_keeps_the_text_so_far(self, make_model: MakeModel, after: int) -> None:
        model = make_model([LONG, "Next."], delay_s=0.003)
        ticket = model.submit("hi")
        for event in ticket.events():
            if isinstance(event, Token) and len(tokens_of(ticket.poll(0)[0])) >= after:
                ticket.cancel()
                break
        forwards = model.engine.calls["forward_rows"]
        result = ticket.result(2.0)
        assert ticket.state == "cancelled"
        assert model.engine.calls["forward_rows"] <= forwards + 2  # one may have begun before the flag was set
        assert result.stop_reason == "cancelled"
        assert len(result.ids) >= after and result.text == ticket.text
        assert LONG.startswith(result.text)
        assert model.generate("hi").text == "Next."

    def test_it_is_idempotent_and_nothing_after_the_end(self, make_model: MakeModel) -> None:
        ticket = make_model().submit("hi")
        result = ticket.result()
        for _ in range(3):
            ticket.cancel()
        assert ticket.state == "done" and ticket.result() == result

    def test_ten_in_a_row_leak_nothing(self, make_model: MakeModel) -> None:
        model = make_model([*[LONG] * 10, "Fine."], delay_s=0.002)
        model.submit("hi").cancel()
        before = threading.active_count()
        for _ in range(10):
            ticket = model.submit("hi")
            wait_for(lambda: bool(tokens_of(ticket.poll(0)[0])))  # noqa: B023
            ticket.cancel()
            assert ticket.wait(2.0)
        assert threading.active_count() == before
        assert len(model._parts.server._open) <= 1


class Odd(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class TestContainment:
    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            (RuntimeError("device lost"), "generation panicked: RuntimeError: device lost"),
            (Odd("odd"), "generation panicked: Odd: odd"),
            (KeyboardInterrupt(), "generation panicked: KeyboardInterrupt"),
            (Exception(object()), "generation panicked: Exception: <object"),
            (Unprintable(), "generation panicked: Unprintable: it cannot be printed"),
            (EngineError("the numbers broke"), "the numbers broke"),
        ],
        ids=lambda value: type(value).__name__,
    )
    @pytest.mark.parametrize("where", ["faults", "prefill_faults"])
    def test_any_exception_ends_its_own_run_only(
        self, make_model: MakeModel, where: str, fault: BaseException, said: str
    ) -> None:
        model = make_model("a b c d", **{where: {0: fault}})
        ticket = model.submit("hi")
        with pytest.raises(EngineError) as raised:
            ticket.result(5.0)
        assert str(raised.value).startswith(said)
        events = ticket.poll(0)[0]
        assert isinstance(events[-1], Failed) and events[-1].message == str(raised.value)
        assert sum(isinstance(event, Failed | Done) for event in events) == 1
        assert ticket.state == "failed" and ticket.text == ("a" if where == "faults" else "")
        assert model.generate("hi").text == "a b c d"

    def test_what_listens_to_the_end_may_fail(self, make_model: MakeModel) -> None:
        model = make_model()

        def broken(*_: object) -> None:
            raise RuntimeError("listener")

        ticket = model.start(model.prepare("hi"), broken)
        assert ticket.result(5.0).text == "Hello there."
        assert model.generate("hi").text == "Hello there."


class TestClose:
    def test_it_ends_what_runs_and_what_waits(self, make_model: MakeModel) -> None:
        model = make_model(LONG, delay_s=0.01, name="closing")
        running, waiting = model.submit("hi"), model.submit("hi")
        wait_for(lambda: running.state == "running")
        started = time.monotonic()
        model.close()
        assert time.monotonic() - started < 2.0
        assert running.result(1.0).stop_reason == waiting.result(1.0).stop_reason == "cancelled"
        assert serving("closing") == [] and model.engine.calls["close"] == 1

    def test_a_closed_handle_says_so(self, make_model: MakeModel) -> None:
        model = make_model()
        chat = model.chat()
        model.close()
        model.close()
        for call in (model.generate, model.stream, model.astream, model.submit, model.tokenize, chat.send):
            with pytest.raises(ModelClosed, match="fake"):
                call("hi")
        with pytest.raises(ModelClosed):
            model.chat()
        assert chat.turns == [] and not chat.is_busy

    def test_a_forward_that_hangs_does_not_hold_the_caller(
        self, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dsv4nb.session.server.JOIN_S", 0.1)
        model = make_model("a b c", delay_s=0.5, name="slow")
        ticket = model.submit("hi")
        wait_for(lambda: model.engine.calls["forward_rows"] == 1)
        started = time.monotonic()
        model.close()
        assert time.monotonic() - started < 0.4
        assert ticket.result(2.0).stop_reason == "cancelled"
        wait_for(lambda: not serving("slow"))
        assert model.engine.calls["close"] == 1
