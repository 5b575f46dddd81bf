from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from dsv4nb.errors import EngineError
from dsv4nb.events import Done, Event, Failed, Token
from dsv4nb.model import Model
from dsv4nb.stream.iterate import aiterate, iterate
from dsv4nb.testing.fake_engine import FakeEngine
from dsv4nb.testing.fake_model import fake_model

LONG = "word " * 200


@pytest.fixture
def model() -> Iterator[Model]:
    with fake_model([LONG, "Fine."], delay_s=0.004) as made:
        yield made


async def collected(model: Model, n: int = 10**9) -> list[Event]:
    events: list[Event] = []
    async for event in model.astream("hi", max_new=20):
        events.append(event)
        if len(events) == n:
            break
    return events


def forwards(model: Model) -> int:
    assert isinstance(model.engine, FakeEngine)
    return model.engine.calls["forward_rows"]


def test_both_loops_yield_what_the_ticket_has(model: Model) -> None:
    ticket = model.submit("hi", max_new=10)
    assert list(iterate(ticket)) == ticket.poll(0)[0]

    async def read() -> list[Event]:
        return [event async for event in aiterate(ticket)]

    assert asyncio.run(read()) == ticket.poll(0)[0]


def test_leaving_a_loop_stops_the_run(model: Model) -> None:
    for event in model.stream("hi"):
        if isinstance(event, Token):
            break
    assert model.generate("hi").text == "Fine."
    assert forwards(model) < 20


def test_leaving_an_async_loop_stops_the_run(model: Model) -> None:
    events = asyncio.run(collected(model, 3))
    assert len(events) == 3
    assert model.generate("hi").text == "Fine."


def test_a_failed_run_raises_after_its_last_event() -> None:
    with fake_model("a b", faults={0: RuntimeError("lost"), 1: RuntimeError("lost")}) as model:
        events: list[Event] = []
        with pytest.raises(EngineError, match="lost"):
            events.extend(model.stream("hi"))
        events = []

        async def read() -> None:
            async for event in model.astream("hi"):
                events.append(event)

        with pytest.raises(EngineError, match="lost"):
            asyncio.run(read())
        assert isinstance(events[-1], Failed)


def test_cancelling_a_task_stops_the_run(model: Model) -> None:
    ticket = model.submit("hi")

    async def cancelled() -> None:
        task = asyncio.create_task(ticket.aresult())
        await asyncio.sleep(0.06)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert ticket.wait(1.0) and ticket.state == "cancelled"


def test_the_loop_is_free_while_a_run_is_silent() -> None:
    with fake_model("a", chunk=1, chunk_delay_s=0.02) as model:
        ticks = 0

        async def both() -> None:
            nonlocal ticks
            task = asyncio.create_task(model.submit(prompt_ids=[9] * 15).aresult())
            while not task.done():
                ticks += 1
                await asyncio.sleep(0.01)
            assert task.result().text == "a"

        asyncio.run(both())
        assert ticks > 5


def test_an_interrupt_of_an_awaiting_loop_is_seen_at_the_next_heartbeat() -> None:
    with fake_model("a", chunk=1, chunk_delay_s=0.02) as model:
        ticket = model.submit(prompt_ids=[9] * 500)
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(ticket.aresult())
        assert time.monotonic() - started < 0.5
        assert ticket.wait(1.0) and ticket.state == "cancelled"


def test_many_can_await_at_once(model: Model) -> None:
    async def all_of_them() -> list[str]:
        tickets = [model.submit("hi", max_new=3) for _ in range(3)]
        return [result.text for result in await asyncio.gather(*(ticket.aresult() for ticket in tickets))]

    assert asyncio.run(all_of_them()) == ["word word word", "Fine.", "Fine."]


def test_a_callback_hears_every_token_on_the_callers_thread(model: Model) -> None:
    heard: list[Token] = []
    threads: set[str] = set()

    def on_token(token: Token) -> None:
        heard.append(token)
        threads.add(threading.current_thread().name)

    result = model.generate("hi", max_new=5, on_token=on_token)
    assert tuple(token.id for token in heard) == result.ids
    assert threads == {threading.current_thread().name}
    assert isinstance(result.done, Done)


def test_a_callback_that_raises_stops_the_run(model: Model) -> None:
    def on_token(token: Token) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        model.generate("hi", on_token=on_token)
    assert model.generate("hi").text == "Fine."
    assert forwards(model) < 20


def test_an_async_reader_gets_an_event_when_it_happens_not_at_the_next_heartbeat() -> None:
    with fake_model(LONG, delay_s=0.012) as model:

        async def gaps() -> list[float]:
            seen = []
            async for event in model.astream("hi", max_new=25):
                if isinstance(event, Token):
                    seen.append(time.monotonic())
            return [b - a for a, b in itertools.pairwise(seen)]

        measured = sorted(asyncio.run(gaps()))
    # read at heartbeats, four of five events would come together with another, without any gap
    assert sum(gap > 0.004 for gap in measured) > len(measured) // 2


def test_a_watcher_is_called_until_it_is_removed(model: Model) -> None:
    calls: list[str] = []
    ticket = model.submit("hi", max_new=3)
    remove = ticket.watch(lambda: calls.append(threading.current_thread().name))
    ticket.result()
    assert set(calls) == {"dsv4nb-serve-fake"}
    remove()
    before = len(calls)
    assert model.submit("hi", max_new=3).result().ids and len(calls) == before
