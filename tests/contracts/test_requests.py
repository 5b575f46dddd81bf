"""Promises of a request that hold across the layers: its prompt, its route, its troubles."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import EngineError, PromptEmpty, PromptOverCeiling, RequestError
from dsv4nb.events import PromptUsage
from dsv4nb.model import Model
from dsv4nb.session.limits import SLACK
from dsv4nb.stream.ticket import Ticket
from dsv4nb.testing.fake_engine import FakeEngine

MakeModel = Callable[..., Model]
LONG = "word " * 200
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "A call.",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ANSWER = {"role": "tool", "tool_call_id": "call_0", "content": "Sunny."}


def engine_of(model: Model) -> FakeEngine:
    assert isinstance(model.engine, FakeEngine)
    return model.engine


class TestPrompt:
    def test_m43_a_prompt_has_exactly_one_source(self, make_model: MakeModel) -> None:
        model = make_model()
        sources: dict[str, Any] = {"prompt": "hi", "messages": [USER], "prompt_ids": model.tokenize("hi")}
        prompts = [model.prepare(**{name: sources[name]}).prompt for name in sources]
        assert len(set(prompts)) == 1
        for n in (0, 2, 3):
            for names in itertools.combinations(sources, n):
                with pytest.raises(RequestError, match="pass exactly one of prompt, messages, prompt_ids"):
                    model.submit(**{name: sources[name] for name in names})

    @pytest.mark.parametrize(
        "asked",
        [
            {"prompt": "hi"},
            {"prompt": "hi", "thinking": True},
            {"prompt": "hi", "thinking": True, "effort": "low"},
            {"prompt": "hi", "thinking": True, "effort": "max"},
            {"prompt": "hi", "system": "Be brief."},
            {"prompt": "hi", "tools": [TOOL]},
            {"prompt": "hi", "tools": [TOOL], "thinking": True, "system": "Be brief."},
            {"prompt": "hi", "tools": [TOOL], "tool_choice": "none"},
            {"prompt": "</think><｜User｜>", "trust_text": True},
            {"messages": [USER, CALLED, ANSWER], "tools": [TOOL]},
            {"messages": [USER, CALLED, ANSWER, USER], "thinking": True},
            {"messages": [USER, {"role": "assistant", "content": "Well,", "prefix": True}]},
        ],
        ids=lambda asked: str(asked)[:60],
    )
    def test_m44_what_is_tokenized_is_what_is_run(self, make_model: MakeModel, asked: dict[str, Any]) -> None:
        model = make_model()
        ids = model.tokenize(**asked)
        usage = next(event for event in model.stream(**asked) if isinstance(event, PromptUsage))
        assert usage.n_prompt == len(ids)
        assert engine_of(model).states[-1].prompt == tuple(ids)
        text = "".join(model._parts.tokens.token_bytes(token).decode() for token in ids)
        assert text == model.render(**{name: value for name, value in asked.items() if name != "trust_text"})

    def test_m47_a31_an_empty_prompt_takes_no_place_in_the_queue(self, make_model: MakeModel) -> None:
        model = make_model()
        doors: list[Callable[..., Any]] = [model.generate, model.stream, model.astream, model.submit, model.tokenize]
        for door in [*doors, model.chat().submit]:
            with pytest.raises(PromptEmpty, match="pass at least one character") as refused:
                door("")
            assert refused.value.param in ("prompt", "text")
        for asked, param in (({"prompt_ids": []}, "prompt_ids"), ({"messages": ""}, "messages")):
            with pytest.raises(PromptEmpty) as refused:
                model.submit(**asked)
            assert refused.value.param == param
        assert model.queue == [] and not any(engine_of(model).calls.values())

    def test_m48_a_prompt_may_have_a_ceiling_of_its_own(self, make_model: MakeModel) -> None:
        model = make_model()
        n = len(model.tokenize("one two three"))
        assert model.generate("one two three", max_prompt_tokens=n).done.n_prompt == n
        with pytest.raises(PromptOverCeiling, match=rf"prompt has {n} tokens; max_prompt_tokens allows {n - 1}\.") as e:
            model.submit("one two three", max_prompt_tokens=n - 1)
        assert (e.value.code, e.value.param) == ("context_length", "messages")
        for bad in (0, -1, 1.5, True):
            with pytest.raises(RequestError, match=r"max_prompt_tokens is .* integer of at least 1"):
                model.submit("hi", max_prompt_tokens=bad)


class TestRoutes:
    @pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.2}], ids=["", "pen"])
    @pytest.mark.parametrize(
        ("sampling", "route"),
        [
            ({"temperature": 0}, "plain_greedy"),
            ({"temperature": -1}, "plain_greedy"),
            ({"temperature": 1.0, "top_k": 1}, "plain_greedy"),
            ({"temperature": 1.0}, "plain_sampled"),
            ({"temperature": 0.2, "top_p": 0.9, "min_p": 0.1}, "plain_sampled"),
        ],
        ids=str,
    )
    def test_m22_m31_without_a_drafter_the_plain_routes_are_taken(
        self, make_model: MakeModel, sampling: dict[str, Any], route: str, penalties: dict[str, Any]
    ) -> None:
        reply = make_model().generate("hi", **sampling, **penalties)
        assert (reply.done.route, reply.done.spec, reply.rounds) == (route, None, ())

    def test_m40_greedy_ignores_min_p(self, make_model: MakeModel) -> None:
        model = make_model("a b c d")
        assert model.generate("hi", temperature=0, min_p=0.9).ids == model.generate("hi", temperature=0).ids

    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_a13_a15_the_first_token_comes_with_the_prefill(self, make_model: MakeModel, temperature: float) -> None:
        for max_new in (1, 2, 5):
            model = make_model(LONG)
            result = model.generate("hi", temperature=temperature, max_new=max_new)
            assert (len(result.ids), result.stop_reason) == (max_new, "length")
            calls = engine_of(model).calls
            assert (calls["prefill"], calls["forward_rows"]) == (1, max_new - 1)

    def test_a14_the_first_token_is_penalised_and_costs_no_step(self, make_model: MakeModel) -> None:
        model = make_model([[300, 301, 302]])
        prompt = [model._parts.tokens.eos_id, 300, 9]  # or the end would be the best that is left
        free, held = (
            model.generate(prompt_ids=prompt, temperature=0, max_new=3, presence_penalty=penalty)
            for penalty in (0, 100.0)
        )
        assert free.ids[0] == 300 and held.ids[0] not in prompt
        assert engine_of(model).calls["forward_rows"] == 2 * 2

    def test_h28_each_step_commits_its_token(self, make_model: MakeModel) -> None:
        model = make_model("a b c d e")
        for max_new in (None, 3):
            result = model.generate("hi", max_new=max_new)
            ledger = engine_of(model).states[-1].ledger
            # the last token of a budget has no use for a step of its own
            assert tuple(ledger) == (result.all_ids if result.stop_reason == "stop" else result.all_ids[:-1])

    def test_h28_what_goes_on_at_once_costs_no_prefill(self, make_model: MakeModel) -> None:
        model = make_model("a b c")
        first = model.chat().send("hi")
        before = dict(engine_of(model).calls)
        go_on = model.prepare(prompt_ids=first.all_ids, max_new=1)
        ticket = Ticket(model._parts.server.submit(go_on, may_reuse=True))
        done = ticket.result(5).done
        assert done.n_cached == done.n_prompt == len(first.all_ids)
        after = engine_of(model).calls
        assert (after["prefill"], after["forward_rows"]) == (before["prefill"], before["forward_rows"])

    @pytest.mark.parametrize("n_prompt", [1, 100, 158, 159])
    def test_h31_no_step_goes_past_the_room(self, make_model: MakeModel, n_prompt: int) -> None:
        model = make_model(LONG, max_seq=256)
        result = model.generate(prompt_ids=[9] * n_prompt)
        assert len(result.ids) == 256 - SLACK - n_prompt and result.stop_reason == "length"
        assert engine_of(model).states[-1].pos == 256 - SLACK - 1


class TestTrouble:
    @pytest.mark.parametrize(
        ("faults", "where"),
        [
            ({"prefill_faults": {0: OSError("x")}}, "prefill at position 0"),
            ({"faults": {0: OSError("x")}}, "decode at position 5"),
            ({"faults": {3: OSError("x")}}, "decode at position 8"),
        ],
        ids=str,
    )
    def test_h32_an_error_tells_where_the_run_was(
        self, make_model: MakeModel, faults: dict[str, Any], where: str
    ) -> None:
        model = make_model(LONG, **faults)
        with pytest.raises(EngineError, match=rf"OSError: x \({where}\)$"):
            model.generate(prompt_ids=[9] * 5)

    def test_h32_a_prefill_tells_the_chunk_it_had_come_to(self, make_model: MakeModel) -> None:
        def third_chunk(step: str, state: Any) -> None:
            if step == "chunk" and state.pos == 100:
                raise OSError("x")

        with pytest.raises(EngineError, match=r"\(prefill at position 100\)$"):
            make_model(chunk=50, on_step=third_chunk).generate(prompt_ids=[9] * 200)


def test_j06_a_chat_does_not_hold_the_thread_that_asks(make_model: MakeModel) -> None:
    model = make_model(LONG, delay_s=0.05, chunk_delay_s=0.2)
    chat = model.chat()
    started = time.monotonic()
    ticket = chat.submit("hi")
    assert time.monotonic() - started < 0.1 and ticket.state in ("queued", "running")
    assert engine_of(model).threads <= {"dsv4nb-serve-fake"}
    ticks = 0

    async def others_run_on() -> None:
        nonlocal ticks
        while not ticket.text:
            ticks += 1
            await asyncio.sleep(0.01)

    asyncio.run(others_run_on())
    assert ticks > 5
    stopped = time.monotonic()
    chat.stop()
    assert ticket.wait(1) and time.monotonic() - stopped < 0.05 + 0.1
    assert chat.turns[0].stop_reason == "cancelled" and chat.turns[0].text
