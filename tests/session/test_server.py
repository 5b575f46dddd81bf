"""Order, cancellation and containment, through the model's doors."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import EngineDead, EngineError, ModelClosed, Overloaded
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
    def test_m13_one_thread_serves_from_load_to_close(self, make_model: MakeModel) -> None:
        model = make_model(name="alone")
        assert len(serving("alone")) == 1
        assert next(t for t in threading.enumerate() if t.name == "dsv4nb-serve-alone").daemon
        model.generate("hi")
        assert model.engine.threads == {"dsv4nb-serve-alone"}
        model.close()
        assert serving("alone") == []
        assert model.engine.calls["close"] == 1

    def test_m14_requests_run_in_the_order_they_came_one_at_a_time(self, make_model: MakeModel) -> None:
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

    def test_m15_waiting_is_told_apart_from_working(self, make_model: MakeModel) -> None:
        model = make_model("a", delay_s=0.2)
        done = [ticket.result().done for ticket in [model.submit("hi") for _ in range(3)]]
        assert done[2].queue_s == pytest.approx(0.4, abs=0.15)
        assert done[2].elapsed_s == pytest.approx(0.2, abs=0.1)
        assert done[0].queue_s < 0.1

    def test_m52_m63_events_come_in_the_promised_order(self, make_model: MakeModel) -> None:
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
    def test_m16_in_the_queue_nothing_is_run(self, make_model: MakeModel) -> None:
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
    def test_m17_any_exception_ends_its_own_run_only(
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
    def test_m20_it_ends_what_runs_and_what_waits(self, make_model: MakeModel) -> None:
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


class Odd(BaseException):
    """No Exception."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise Odd


def broken(*_: object) -> None:
    raise LookupError("a listener")


def odd(*_: object) -> None:
    raise Odd


class TestListeners:
    """What listens for an end may fail; the queue, the thread and the engine do not."""

    def test_a_listener_that_fails_keeps_nothing_from_closing(self, make_model: MakeModel) -> None:
        model = make_model(LONG, delay_s=0.002, name="listened")
        request = model.prepare("hi")
        tickets = [model.start(request, on_end) for on_end in (None, broken, None)]
        wait_for(lambda: tickets[0].state == "running")
        model.close()
        assert [ticket.state for ticket in tickets] == ["cancelled"] * 3
        assert serving("listened") == [] and model.engine.calls["close"] == 1

    def test_whoever_cancels_does_not_hear_of_a_listener(self, make_model: MakeModel) -> None:
        model = make_model(LONG, delay_s=0.002)
        first, queued = model.start(model.prepare("hi")), model.start(model.prepare("hi"), broken)
        queued.cancel()
        assert queued.state == "cancelled"
        first.cancel()

    @pytest.mark.parametrize("fault", [RuntimeError("lost"), Unprintable()], ids=["plain", "unprintable"])
    @pytest.mark.parametrize("on_end", [None, broken, odd])
    def test_the_thread_outlives_every_listener_and_every_fault(
        self, make_model: MakeModel, fault: BaseException, on_end: Any
    ) -> None:
        model = make_model("Fine.", prefill_faults={0: fault})
        assert model.start(model.prepare("hi"), on_end).wait(2)
        assert model.generate("hi").text == "Fine."

    def test_a_failed_run_keeps_nothing_of_what_its_frames_held(self, make_model: MakeModel) -> None:
        held: list[weakref.ref[Any]] = []

        class Big:
            """Stands for gigabytes."""

        def fail(*_: object, **__: object) -> None:
            big = Big()
            held.append(weakref.ref(big))
            try:
                raise ValueError("inner")
            except ValueError as error:
                again = Big()
                held.append(weakref.ref(again))
                raise RuntimeError("outer") from error

        model = make_model()
        model.engine.prefill = fail
        ticket = model.submit("hi")
        with pytest.raises(EngineError):
            ticket.result()
        gc.collect()
        assert [ref() for ref in held] == [None, None]

    def test_a_lost_device_is_not_asked_again(self, make_model: MakeModel) -> None:
        lost = RuntimeError("CUDA error: an illegal memory access was encountered")
        model = make_model("Fine.", faults={0: lost}, delay_s=0.01)
        first, second = model.submit("hi"), model.submit("hi")
        with pytest.raises(EngineDead, match="the device was lost: RuntimeError: CUDA error"):
            first.result()
        with pytest.raises(EngineDead):
            second.result()
        before = dict(model.engine.calls)
        with pytest.raises(EngineDead) as caught:
            model.generate("hi")
        assert (caught.value.code, caught.value.retryable) == ("engine_dead", False)
        assert model.engine.calls == before

    @pytest.mark.parametrize(
        "fault", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")], ids=["host", "device"]
    )
    def test_memory_that_ran_out_can_be_tried_again(self, make_model: MakeModel, fault: BaseException) -> None:
        model = make_model("Fine.", faults={0: fault})
        with pytest.raises(Overloaded, match=r"memory ran out: .*\(decode at position \d+\)") as caught:
            model.generate("hi")
        assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
        assert model.generate("hi").text == "Fine."


class TestQueue:
    def test_a_ticket_knows_its_place(self, make_model: MakeModel) -> None:
        model = make_model(LONG, delay_s=0.002)
        tickets = [model.submit("hi") for _ in range(4)]
        wait_for(lambda: tickets[0].state == "running")
        assert [ticket.place for ticket in tickets] == [0, 1, 2, 3]
        assert [entry.state for entry in model.queue] == ["running", "queued", "queued", "queued"]
        assert model.queue[0].waited_s >= model.queue[3].waited_s >= 0
        tickets[1].cancel()
        assert [ticket.place for ticket in tickets] == [0, None, 1, 2]
        for ticket in tickets:
            ticket.cancel()
        assert all(ticket.wait(2) for ticket in tickets)
        assert model.queue == []


class TestInStep:
    def test_a_run_waits_for_its_reader(self, make_model: MakeModel) -> None:
        model = make_model(LONG)
        ticket = model.start(model.prepare("hi"), in_step=True)
        wait_for(lambda: len(tokens_of(ticket.poll(0)[0])) == 1)
        time.sleep(0.05)
        events = ticket.poll(0)[0]
        assert len(tokens_of(events)) == 1
        ticket.taken(len(events))
        wait_for(lambda: len(tokens_of(ticket.poll(0)[0])) == 2)
        ticket.cancel()
        assert ticket.result().stop_reason == "cancelled"

    def test_false_stops_after_the_token_it_was_said_to(self, make_model: MakeModel) -> None:
        model = make_model(LONG)
        said: list[Token] = []

        def third(token: Token) -> bool:
            said.append(token)
            return len(said) < 3

        reply = model.generate("hi", on_token=third)
        assert (len(reply.ids), len(said), reply.stop_reason) == (3, 3, "cancelled")
        with pytest.raises(LookupError):
            model.generate("hi", on_token=broken)
        assert model.generate("hi", on_token=lambda token: None, max_new=5).stop_reason == "length"

    def test_a_handle_that_is_closed_releases_a_run_in_step(self, make_model: MakeModel) -> None:
        model = make_model(LONG, name="held")
        ticket = model.start(model.prepare("hi"), in_step=True)
        wait_for(lambda: ticket.state == "running")
        model.close()
        assert ticket.state == "cancelled" and serving("held") == []
