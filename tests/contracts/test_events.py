"""Promises about what a run says: order, ends, numbers, marks."""

from __future__ import annotations

import ast
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import dsv4nb
from dsv4nb.engine.protocol import Prefilled
from dsv4nb.events import Done, Event, Failed, Generation, PromptUsage, TokenSnapshot
from dsv4nb.model import Model
from dsv4nb.stream.iterate import iterate
from dsv4nb.testing.fake_engine import FakeEngine

MakeModel = Callable[..., Model]
LONG = "word " * 200
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BLOCK = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def engine_of(model: Model) -> FakeEngine:
    assert isinstance(model.engine, FakeEngine)
    return model.engine


def wait_for(holds: Callable[[], bool], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def stopped_after(n: int) -> Callable[[Model], list[Event]]:
    def go(model: Model) -> list[Event]:
        ticket = model.submit("hi")
        wait_for(lambda: len(ticket.poll(0)[0]) >= n)
        ticket.cancel()
        return list(ticket.events())

    return go


# how a run ends: the script, the engine, what is asked, and the terminal event
ENDS: dict[str, tuple[dict[str, Any], Callable[[Model], list[Event]], str]] = {
    "end token": ({}, lambda m: list(m.submit("hi").events()), "stop"),
    "budget": ({}, lambda m: list(m.submit("hi", max_new=1).events()), "length"),
    "stop string": ({"script": "a b END c"}, lambda m: list(m.submit("hi", stop="END").events()), "stop"),
    "calls": ({"script": BLOCK}, lambda m: list(m.submit("hi", tools=[TOOL]).events()), "tool_calls"),
    "stopped in prefill": ({"script": LONG, "chunk": 1, "chunk_delay_s": 0.01}, stopped_after(1), "cancelled"),
    "stopped in decode": ({"script": LONG, "delay_s": 0.002}, stopped_after(4), "cancelled"),
    "failed in prefill": ({"prefill_faults": {0: OSError("x")}}, lambda m: list(m.submit("hi").events()), "failed"),
    "failed in decode": ({"faults": {0: OSError("x")}}, lambda m: list(m.submit("hi").events()), "failed"),
}


@pytest.mark.parametrize("name", ENDS)
def test_m52_m63_usage_comes_first_and_one_terminal_event_last(make_model: MakeModel, name: str) -> None:
    options, ask, ending = ENDS[name]
    events = ask(make_model(**options))
    assert isinstance(events[0], PromptUsage)
    assert [i for i, event in enumerate(events) if isinstance(event, Done | Failed)] == [len(events) - 1]
    snapshots = [i for i, event in enumerate(events) if isinstance(event, TokenSnapshot)]
    if ending == "failed":
        assert isinstance(events[-1], Failed) and snapshots == []
    else:
        assert isinstance(events[-1], Done) and events[-1].stop_reason == ending
        assert snapshots == [len(events) - 2]


def test_m53_ids_of_the_caller_end_a_reply_like_the_models_own(make_model: MakeModel) -> None:
    model = make_model("a b c d")
    tokens = model._parts.tokens
    a, b, c, d = model.generate("hi").ids
    result = model.generate("hi", stop_token_ids=[c, 9])
    assert (result.ids, result.text, result.stop_reason, result.done.n_tokens) == ((a, b), "a b", "stop", 2)
    assert model.prepare("hi", stop_token_ids=[c]).eos == {c, tokens.eos_id}
    assert model.generate("hi", stop_token_ids=[9]).ids == (a, b, c, d)


def test_a16_a_reply_whose_first_token_ends_it_is_empty(make_model: MakeModel) -> None:
    model = make_model("a b")
    first = model.generate("hi").ids[0]
    for result in (model.generate("hi", stop_token_ids=[first]), make_model("").generate("hi")):
        assert (result.ids, result.text, result.raw_text, result.stop_reason) == ((), "", "", "stop")


def test_m62_a_reader_that_leaves_costs_at_most_one_more_round(make_model: MakeModel) -> None:
    here, go_on = threading.Event(), threading.Event()
    begun: list[str] = []

    def third_forward(step: str, _: object) -> None:
        begun.append(step)
        if begun.count("forward_rows") == 3 and not here.is_set():
            here.set()
            assert go_on.wait(5)

    model = make_model([LONG, "Next."], on_step=third_forward)
    ticket = model.submit("hi")
    reader = iterate(ticket)
    seen = [next(reader) for _ in range(4)]
    assert here.wait(5)
    reader.close()  # type: ignore[attr-defined]
    go_on.set()
    assert ticket.wait(5) and ticket.state == "cancelled"
    assert begun.count("forward_rows") == 3
    assert next(reader, None) is None and not any(isinstance(event, Done) for event in seen)
    assert model.generate("hi").text == "Next."


def test_m64_done_has_the_numbers_of_its_own_request(make_model: MakeModel) -> None:
    model = make_model("a b c", delay_s=0.02, chunk_delay_s=0.05)
    model.submit("hi")
    before = time.monotonic()
    done = model.generate("hi", seed=3, max_new=2).done
    wall_s = time.monotonic() - before
    told = json.loads(json.dumps(asdict(done), allow_nan=False))
    kinds = {
        "stop_reason": str,
        "n_tokens": int,
        "n_prompt": int,
        "n_cached": int,
        "queue_s": float,
        "elapsed_s": float,
        "config": dict,
        "route": str,
        "timings": dict,
        "spec": type(None),  # nothing was speculated
    }
    assert {name: type(told[name]) for name in kinds} == kinds
    assert (done.stop_reason, done.n_tokens, done.n_prompt) == ("length", 2, len(model.tokenize("hi")))
    ran_s = sum(end - start for start, end in engine_of(model).intervals[-2:])
    assert done.elapsed_s >= ran_s >= 0.07 and done.queue_s >= 0.1
    assert done.elapsed_s + done.queue_s <= wall_s + 0.001


def test_m65_h33_cached_is_what_the_engine_did_not_run(make_model: MakeModel) -> None:
    model = make_model()
    engine, computed = engine_of(model), list[int]()
    prefill = engine.prefill

    def counted(*arguments: Any, **options: Any) -> Prefilled:
        done = prefill(*arguments, **options)
        computed.append(done.computed)
        return done

    engine.prefill = counted  # type: ignore[method-assign]
    chat = model.chat()
    asks: list[Callable[[], Generation]] = [
        lambda: chat.send("word " * 200),
        lambda: chat.send("and then?"),
        lambda: model.generate("hi"),
        lambda: model.generate("hi"),
    ]
    cached = []
    for ask in asks:
        computed.clear()
        done = ask().done
        assert done.n_cached == done.n_prompt - sum(computed)
        cached.append(done.n_cached)
    assert cached[0] == 0 < cached[1] and cached[2:] == [0, 0]  # a request on its own starts afresh
    usage = next(iter(model.stream("hi")))
    assert isinstance(usage, PromptUsage) and usage.n_cached == 0


def test_m66_marks_are_in_order_and_tell_what_happened(make_model: MakeModel) -> None:
    labels = ["called", "tokenize_start", "tokenize_end", "queued", "started", "prefilled", "first_token", "ended"]
    model = make_model(["a b c d", "b", LONG], delay_s=0.01, chunk=1, chunk_delay_s=0.005)
    timings = model.generate("hi").timings
    assert [label for label, _ in timings.marks] == labels
    at = [seconds for _, seconds in timings.marks]
    assert at[0] == 0 and at == sorted(at)
    assert timings == model.timings
    spans = dict(timings.marks)
    assert timings.prefill_s == pytest.approx(spans["prefilled"] - spans["started"])
    assert timings.first_token_s == pytest.approx(spans["first_token"])
    assert timings.decode_s == pytest.approx(spans["ended"] - spans["first_token"])
    assert spans["ended"] - spans["first_token"] >= 0.04  # four more forwards
    untokenized = model.generate(prompt_ids=[9]).timings
    assert [label for label, _ in untokenized.marks] == [x for x in labels if not x.startswith("tokenize")]
    stopped = model.submit("one two three four five")
    wait_for(lambda: engine_of(model).calls["chunks"] > 7)
    stopped.cancel()
    cut = stopped.result().timings
    assert (cut.prefill_s, cut.first_token_s, cut.decode_s) == (None, None, None)


def test_m66_reasoning_is_timed_from_its_first_token_to_its_end(make_model: MakeModel) -> None:
    model = make_model(["a b c d e</think>f g", "a", "one two three four five"], delay_s=0.02)
    timings = model.generate("hi", thinking=True).timings
    spans = dict(timings.marks)
    assert [label for label, _ in timings.marks][-3:] == ["first_token", "thought", "ended"]
    assert timings.reasoning_s == pytest.approx(spans["thought"] - spans["first_token"])
    assert timings.decode_s is not None and 0.08 <= timings.reasoning_s <= timings.decode_s - 0.02
    assert model.generate("hi").timings.reasoning_s is None
    stopped = model.submit("hi", thinking=True)
    wait_for(lambda: len(stopped.poll(0)[0]) > 3)
    stopped.cancel()
    cut = stopped.result().timings
    assert cut.reasoning_s == cut.decode_s, "it ended in its reasoning"


def test_m67_one_place_makes_tokens() -> None:
    made = []
    package = Path(dsv4nb.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "Token" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                made.append(path.relative_to(package).as_posix())
    assert made == ["session/emission.py"]
