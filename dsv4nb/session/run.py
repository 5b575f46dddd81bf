"""One request, from prefill to Done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dsv4nb.encoding.parse import ToolCall, parse_strict
from dsv4nb.engine.protocol import Cancelled, Engine
from dsv4nb.engine.sampler import choose
from dsv4nb.errors import ParseError
from dsv4nb.events import Done, Generation, PromptUsage, StopReason
from dsv4nb.session.emission import Emission
from dsv4nb.session.job import Job
from dsv4nb.session.request import Request, Tokenizer


def run(job: Job, engine: Engine, tokenizer: Tokenizer) -> Generation:
    """Run a started job to its end and return the result; all events but `Done` are told on the way."""
    started = time.perf_counter()
    request = job.request
    emission = Emission(request, tokenizer, job.tell)
    job.tell(PromptUsage(n_prompt=len(request.prompt), n_cached=0))
    reason = _decode(request, engine, emission, job.is_cancelled)
    emission.finish(reason)
    elapsed = request.composed_s + time.perf_counter() - started
    return result_of(request, emission, reason, queue_s=job.queue_s, elapsed_s=elapsed)


def result_of(
    request: Request, emission: Emission, reason: StopReason, *, queue_s: float, elapsed_s: float
) -> Generation:
    """Return what came of a request."""
    done = Done(
        stop_reason=reason,
        n_tokens=len(emission.ids),
        n_prompt=len(request.prompt),
        n_cached=0,
        queue_s=queue_s,
        elapsed_s=elapsed_s,
        config=request.sampler,
    )
    return Generation(
        text=emission.text("content"),
        reasoning=emission.text("reasoning"),
        raw_text=emission.raw_text,
        ids=tuple(emission.ids),
        all_ids=(*request.prompt, *emission.ids),
        done=done,
        messages=(*request.messages, _reply(request, emission)) if request.messages else (),
    )


def _decode(request: Request, engine: Engine, emission: Emission, is_cancelled: Callable[[], bool]) -> StopReason:
    """Prefill, then one token a step; a cancel is looked for before each chunk and each step."""
    state = engine.new_state()
    try:
        prefilled = engine.prefill(state, request.prompt, should_stop=is_cancelled)
    except Cancelled:
        return "cancelled"
    row, position = prefilled.logits, prefilled.pos
    while not is_cancelled():
        token = choose(row, request.sampler, position)
        reason = emission.take(token)
        if reason is not None:
            return reason
        if is_cancelled():
            break
        row = engine.forward_rows(state, [token])[0]
        engine.commit(state, 1)
        position += 1
    return "cancelled"


def _reply(request: Request, emission: Emission) -> dict[str, Any]:
    """The assistant's message; calls that cannot be read stay in its text, so that nothing shown is lost."""
    message: dict[str, Any] = {"role": "assistant", "content": emission.text("content")}
    if reasoning := emission.text("reasoning"):
        message["reasoning_content"] = reasoning
    if tool := emission.text("tool"):
        try:
            calls = parse_strict(emission.raw_text, thinking=request.thinking).tool_calls
        except ParseError:
            message["content"] += tool
        else:
            message["tool_calls"] = _calls(calls, len(request.messages))
    return message


def _calls(calls: Sequence[ToolCall], turn: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{turn}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        for i, call in enumerate(calls)
    ]
