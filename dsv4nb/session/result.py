"""Events of a finished run → its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4nb.encoding.constants import CALLS_OPEN
from dsv4nb.encoding.parse import parse_strict
from dsv4nb.errors import ParseError
from dsv4nb.events import Channel, Done, Event, Generation, StopReason, Token, TokenSnapshot
from dsv4nb.session.request import Request


def generation_of(request: Request, events: Sequence[Event]) -> Generation:
    """Return the result of a run whose last two events are a `TokenSnapshot` and a `Done`."""
    snapshot, done = events[-2:]
    assert isinstance(snapshot, TokenSnapshot) and isinstance(done, Done), events[-2:]
    text, thought = joined(events, "content"), joined(events, "reasoning")
    raw = "".join(event.text for event in events if isinstance(event, Token))
    messages: tuple[dict[str, Any], ...] = ()
    if request.messages:
        reply = _reply(text, thought, raw, done.stop_reason, is_thinking=request.is_thinking)
        before = request.messages
        if before[-1]["role"] == "assistant":  # a reply that was continued
            reply["content"] = before[-1]["content"] + reply["content"]
            reply = {**{k: v for k, v in before[-1].items() if k != "wo_eos"}, **reply}
            before = before[:-1]
        messages = (*before, reply)
    return Generation(
        text=text,
        reasoning=thought,
        raw_text=raw,
        ids=snapshot.ids,
        all_ids=(*request.prompt, *snapshot.ids),
        done=done,
        messages=messages,
    )


def joined(events: Sequence[Event], channel: Channel) -> str:
    """Return the text of one channel."""
    return "".join(event.text for event in events if isinstance(event, Token) and event.channel == channel)


def _reply(text: str, thought: str, raw: str, stop_reason: StopReason, *, is_thinking: bool) -> dict[str, Any]:
    """Return the reply as the message that continues the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if stop_reason == "tool_calls" and CALLS_OPEN in raw:
        try:
            calls = parse_strict(raw, thinking=is_thinking).tool_calls
        except ParseError:  # calls that nobody can read are left to `raw_text`
            calls = ()
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": c.name, "arguments": c.arguments_json}}
                for i, c in enumerate(calls)
            ]
    return message
