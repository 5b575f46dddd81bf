"""What a run says, as frozen, JSON-able values; the only thing screens know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dsv4nb.config import SamplerConfig

Channel = Literal["content", "reasoning", "tool", "hidden"]
StopReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUsage:
    """First event of a run: what the prompt costs.

    Attributes:
        n_prompt: tokens of the prompt.
        n_cached: of these, how many were already in the cache.
    """

    n_prompt: int
    n_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One chosen token, or text that was held back and is released (`id` is None).

    `text` may be empty while a character is unfinished. Joined per channel the texts equal the
    result's `text` and `reasoning`; joined over all channels its `raw_text`.
    """

    id: int | None
    text: str
    channel: Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning span is complete; repeats nothing as a delta."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSnapshot:
    """All new ids, once, before `Done`."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The run ended; the last event.

    Attributes:
        elapsed_s: render, prefill and decode of this request; waiting in the queue is `queue_s`.
    """

    stop_reason: StopReason
    n_tokens: int
    n_prompt: int
    n_cached: int
    queue_s: float
    elapsed_s: float
    config: SamplerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run failed; the last event. `Ticket.result()` raises the same error."""

    code: str
    message: str
    param: str | None
    retryable: bool


Event = PromptUsage | Token | Reasoning | TokenSnapshot | Done | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one request.

    Attributes:
        text: the content, without reasoning and control tokens.
        reasoning: what was thought before the content, "" in chat mode.
        raw_text: every token's text, control tokens included, as the model wrote it.
        ids: the new token ids, without the one that ended the run.
        all_ids: prompt and new ids.
    """

    text: str
    reasoning: str
    raw_text: str
    ids: tuple[int, ...]
    all_ids: tuple[int, ...]
    done: Done
    messages: tuple[dict[str, object], ...] = field(default=(), repr=False)

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended: stop, length, tool_calls or cancelled."""
        return self.done.stop_reason

    def __str__(self) -> str:
        return self.text
