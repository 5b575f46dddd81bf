"""Events of a finished run → its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4nb.events import Channel, Done, Event, Generation, Round, Rounds, Token, TokenSnapshot, ToolCall
from dsv4nb.session.recipe import recipe_of
from dsv4nb.session.request import Request


def generation_of(request: Request, events: Sequence[Event], problems: Sequence[str] = ()) -> Generation:
    """Return the result of a run whose last two events are a `TokenSnapshot` and a `Done`.

    Args:
        problems: where the reply departs from the format.
    """
    snapshot, done = events[-2:]
    assert isinstance(snapshot, TokenSnapshot) and isinstance(done, Done), events[-2:]
    said = [event for event in events if isinstance(event, Token)]
    text, thought = joined(said, "content"), joined(said, "reasoning")
    calls = tuple(event for event in events if isinstance(event, ToolCall))
    messages: tuple[dict[str, Any], ...] = ()
    if request.messages:
        reply = _reply(text, thought, calls if done.stop_reason == "tool_calls" else ())
        before = request.messages
        if before[-1]["role"] == "assistant":  # a reply that was continued
            reply["content"] = before[-1]["content"] + reply["content"]
            reply = {**{k: v for k, v in before[-1].items() if k != "wo_eos"}, **reply}
            before = before[:-1]
        messages = (*before, reply)
    return Generation(
        text=text,
        reasoning=thought,
        raw_text="".join(event.text for event in said),
        ids=snapshot.ids,
        all_ids=(*request.prompt, *snapshot.ids),
        done=done,
        tool_calls=calls,
        problems=tuple(problems),
        logprobs=tuple(event.logprob for event in said if event.logprob is not None),
        rounds=Rounds(event for event in events if isinstance(event, Round)),
        recipe=recipe_of(request, snapshot.ids),
        messages=messages,
    )


def joined(events: Sequence[Event], channel: Channel) -> str:
    """Return the text of one channel."""
    return "".join(event.text for event in events if isinstance(event, Token) and event.channel == channel)


def _reply(text: str, thought: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the reply as the message that continues the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message
