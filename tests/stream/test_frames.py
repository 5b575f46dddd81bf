from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.events import Failed, ToolCall, ToolResult
from dsv4nb.stream.frames import LETTERS, Called, Ended, Frame, News, Pump, Status, Watch, shared_pump

Make = Callable[[], Any]


def frames(told: list[News]) -> list[Frame]:
    return [item for item in told if isinstance(item, Frame)]


def wait_for(holds: Callable[[], bool], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("seed", range(5))
def test_frames_joined_are_the_run_however_it_is_cut(tape: Make, seed: int) -> None:
    draw = random.Random(seed)
    ticket = tape()
    watch = Watch(3, ticket, lambda news: None)
    told: list[News] = []
    ticket.start()
    for i in range(200):
        ticket.say(f"t{i} ", channel=draw.choice(list(LETTERS)))
        if draw.random() < 0.2:
            told += watch.news()
    ticket.end()
    told += watch.news()
    tokens = [text for frame in frames(told) for _, text in frame.tokens]
    assert tokens == [f"t{i} " for i in range(200)]
    assert [frame.start for frame in frames(told)] == [
        sum(len(before.tokens) for before in frames(told)[:i]) for i in range(len(frames(told)))
    ]
    assert told[-1] == Ended(run=3, stop_reason="stop", n_tokens=200, seconds=0.5, error="")


def test_calls_are_told_once_each_and_with_their_results(tape: Make) -> None:
    ticket = tape()
    watch = Watch(1, ticket, lambda news: None)
    calls = [ToolCall(id=f"call_{i}", name="f", arguments="{}") for i in range(2)]
    results = [ToolResult(id=call.id, name="f", content=call.id) for call in calls]
    ticket.start()
    ticket.say("<calls>", channel="tool")
    ticket.events += calls
    told = watch.news()
    ticket.events += [results[1], ToolResult(id="call_9", name="f", content="of no call"), results[0]]
    told += watch.news()
    assert [item for item in told if isinstance(item, Called)] == [
        Called(run=1, index=0, call=calls[0], result=None),
        Called(run=1, index=1, call=calls[1], result=None),
        Called(run=1, index=1, call=calls[1], result=results[1]),
        Called(run=1, index=0, call=calls[0], result=results[0]),
    ]


def test_m56_frames_carry_text_and_count_tokens_not_characters(tape: Make) -> None:
    text = "a😀b｜DSML｜’"  # a code point, two UTF-16 units, three bytes: whoever counts characters counts differently
    ticket = tape()
    watch = Watch(1, ticket, lambda news: None)
    ticket.start()
    sent: list[Frame] = []
    for character in text:
        ticket.say(character)
        sent += frames(watch.news())
    wire = [json.loads(json.dumps(frame.message())) for frame in sent]
    assert [message["start"] for message in wire] == list(range(len(text)))
    assert "".join(piece for message in wire for _, piece in message["tokens"]) == text


def test_states_are_told_once_and_before_the_tokens(tape: Make) -> None:
    ticket = tape()
    watch = Watch(1, ticket, lambda news: None)
    assert watch.news() == [Status(run=1, state="queued")]
    assert watch.news() == []
    ticket.start()
    ticket.say("a")
    assert [type(item) for item in watch.news()] == [Status, Frame]
    ticket.end("cancelled")
    assert watch.news() == [Ended(run=1, stop_reason="cancelled", n_tokens=1, seconds=0.5, error="")]
    assert watch.over and watch.news() == []


def test_the_end_is_known_when_it_was_read_before_the_ticket_was_closed(tape: Make) -> None:
    ticket = tape()
    watch = Watch(1, ticket, lambda news: None)
    ticket.start()
    ticket.end("length")
    ticket.finished = False
    assert not any(isinstance(item, Ended) for item in watch.news())
    ticket.finished = True
    assert watch.news() == [Ended(run=1, stop_reason="length", n_tokens=0, seconds=0.5, error="")]


def test_a_failure_is_told_in_words(tape: Make) -> None:
    ticket = tape()
    ticket.start()
    ticket.say("half ")
    ticket.events.append(Failed(code="engine", message="out of memory", param=None, retryable=True))
    ticket.state, ticket.finished = "failed", True
    last = Watch(1, ticket, lambda news: None).news()[-1]
    assert last == Ended(run=1, stop_reason=None, n_tokens=1, seconds=0.0, error="out of memory")


def test_a_frame_is_json_with_one_letter_for_a_channel() -> None:
    frame = Frame(run=2, start=7, tokens=(("reasoning", "a"), ("content", "<b>")))
    assert json.loads(json.dumps(frame.message())) == {
        "kind": "frame",
        "run": 2,
        "start": 7,
        "tokens": [["r", "a"], ["c", "<b>"]],
    }


def test_all_watches_together_stay_below_the_rate(tape: Make) -> None:
    """Three screens do not make three times the messages."""
    pump, rate = Pump(), 30
    tapes = [tape() for _ in range(3)]
    told: list[tuple[float, News]] = []
    for i, ticket in enumerate(tapes):
        ticket.start()
        pump.watch(Watch(i, ticket, lambda news: told.append((time.monotonic(), news))))
    stop = time.monotonic() + 0.6
    while time.monotonic() < stop:
        for ticket in tapes:
            ticket.say("x")
        time.sleep(0.002)
    for ticket in tapes:
        ticket.end()
    wait_for(lambda: sum(isinstance(news, Ended) for _, news in told) == 3)
    during = [at for at, news in told if isinstance(news, Frame) and at < stop]
    assert len(during) <= rate * 0.6 + 2
    runs = {news.run for at, news in told if isinstance(news, Frame) and at < stop}
    assert runs == {0, 1, 2}, "every watch gets its turn"
    sent = [text for _, news in told if isinstance(news, Frame) for _, text in news.tokens]
    assert len(sent) == sum(len(ticket.events) - 2 for ticket in tapes)


def test_a_run_of_2000_tokens_costs_at_most_four_times_its_text(tape: Make) -> None:
    ticket = tape()
    watch = Watch(1, ticket, lambda news: None)
    ticket.start()
    told: list[News] = []
    for i in range(2000):
        ticket.say("word")
        if i % 40 == 0:
            told += watch.news()
    ticket.end()
    told += watch.news()
    sent = [json.dumps(frame.message()) for frame in frames(told)]
    assert sum(map(len, sent)) <= 4 * 8000 + 200 * len(sent)


def test_a_sink_that_fails_is_dropped_and_the_others_go_on(tape: Make, caplog: pytest.LogCaptureFixture) -> None:
    def broken(news: News) -> None:
        raise RuntimeError("the page went away")

    pump, bad, good = Pump(rate=500), tape(), tape()
    told: list[News] = []
    for ticket, sink in ((bad, broken), (good, told.append)):
        ticket.start()
        pump.watch(Watch(1, ticket, sink))
    wait_for(lambda: len(told) == 1)
    asked = bad.asked
    good.say("a")
    good.end()
    wait_for(lambda: isinstance(told[-1], Ended))
    assert asked == bad.asked == 1
    assert "a job of the pump failed" in caplog.text


def test_jobs_run_in_order_on_one_thread_and_idle_costs_nothing(tape: Make) -> None:
    pump = Pump()
    seen: list[tuple[int, int]] = []
    for i in range(50):
        pump.call(lambda i=i: seen.append((i, threading.get_ident())))  # type: ignore[misc]
    assert pump.drain()
    assert [i for i, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) == 1 and threading.get_ident() not in {thread for _, thread in seen}
    ticket = tape()
    ticket.end()
    pump.watch(Watch(1, ticket, lambda news: None))
    wait_for(lambda: ticket.asked == 1)
    time.sleep(0.1)
    assert ticket.asked == 1


def test_a_kernel_has_one_pump() -> None:
    assert shared_pump() is shared_pump()
