"""What a run says, as frozen, JSON-able values; the only thing screens know."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.errors import RequestError
from dsv4nb.rounds import Draft, Placed, Round, Rounds, SpecUsage

__all__ = [
    "Channel",
    "Done",
    "Draft",
    "Event",
    "Failed",
    "Generation",
    "Placed",
    "PromptProgress",
    "PromptUsage",
    "Reasoning",
    "Recipe",
    "Reuse",
    "ReuseKind",
    "Round",
    "Rounds",
    "Route",
    "SpecUsage",
    "StopReason",
    "Timings",
    "Token",
    "TokenLogprob",
    "TokenSnapshot",
    "ToolCall",
    "ToolResult",
]

Channel = Literal["content", "reasoning", "tool", "hidden"]
StopReason = Literal["stop", "length", "tool_calls", "cancelled"]
Route = Literal["plain_greedy", "plain_sampled", "spec_greedy", "spec_sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely a token was, by the network's own distribution: log-softmax of the raw row, before any setting.

    Attributes:
        id: the token it is about.
        logprob: natural logarithm, at most 0.
        rank: 1 for the most likely; of equals the lowest id comes first.
        entropy: of the distribution that it was chosen from, in nats: 0 where nothing else was possible.
        top: (id, logprob) of the most likely tokens, best first, as many as were asked for.
    """

    id: int
    logprob: float
    rank: int
    entropy: float
    top: tuple[tuple[int, float], ...] = ()


ReuseKind = Literal["exact", "live", "anchor", "host", "reset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Where a run started, and why.

    Attributes:
        kind: exact: nothing was computed; live: the chat's own cache was continued; anchor, host: a snapshot was;
            reset: everything was computed.
        length: prompt tokens that were not computed again; `computed` those that were.
        reason: a sentence for people.
        diverges_at: the first position at which the prompt leaves the chat's cache, None when it does not.
    """

    kind: ReuseKind
    length: int
    computed: int
    reason: str
    diverges_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUsage:
    """First event of a run: what the prompt costs.

    Attributes:
        n_prompt: tokens of the prompt, and of the reply's beginning where it was given.
        n_cached: of these, how many were already in the cache.
        reuse: where they come from, None when nothing was run.
        n_given: tokens of the reply's beginning, which are told before those that the model chooses.
    """

    n_prompt: int
    n_cached: int
    reuse: Reuse | None = None
    n_given: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """A chunk of a long prompt was computed, and more are to come.

    Attributes:
        done: prompt tokens in the caches, reused ones included; `total` tokens of the prompt.
    """

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One chosen token, or text that was held back and is released (`id` is None).

    `text` may be empty while a character is unfinished. Joined per channel the texts equal the
    result's `text` and `reasoning`; joined over all channels its `raw_text`.

    Attributes:
        logprob: when the request asked for it and `id` is not None.
    """

    id: int | None
    text: str
    channel: Channel
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning span is complete; repeats nothing as a delta."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call is complete; repeats nothing as a delta.

    Attributes:
        id: unique in its conversation; the tool's result names it.
        arguments: a JSON object, in the order and spelling that the model wrote.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """A call was answered; the model reads `content` next.

    Attributes:
        id: of the call.
        arguments: what it was run with: the model's own, or those that its approval put in their place.
        error: why it failed or was declined, "" when it did not; `content` tells the model so.
    """

    id: str
    name: str
    content: str
    arguments: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When what happened, of this request alone; None for what did not happen.

    Attributes:
        queue_s: from the end of the checks to the start of the run.
        prepare_s: checks, rendering and tokenizing.
        prefill_s: the prompt's forward.
        first_token_s: from the call to the first token, waiting in the queue included.
        decode_s: from the first token to the end.
        reasoning_s: from the first token to the end of the reasoning, or of the run when it ended in it.
        marks: (label, seconds since the call), in the order in which they happened.
    """

    queue_s: float
    prepare_s: float
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    reasoning_s: float | None = None
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSnapshot:
    """All ids of the reply, once, before `Done`."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The run ended; the last event.

    Attributes:
        n_tokens: that the model chose; a beginning that was given is part of the prompt.
        elapsed_s: render, prefill and decode of this request; waiting in the queue is `queue_s`.
        route: how tokens were chosen.
        spec: what speculation came to, None on a plain route.
        spec_config: how it was set, None on a plain route.
        spec_note: why a route is plain or became so, "" when it speculates.
        reuse: where the run started, None when it never did.
    """

    stop_reason: StopReason
    n_tokens: int
    n_prompt: int
    n_cached: int
    queue_s: float
    elapsed_s: float
    config: SamplerConfig
    route: Route
    timings: Timings
    spec: SpecUsage | None = None
    spec_config: SpecConfig | None = None
    spec_note: str = ""
    reuse: Reuse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run failed; the last event. `Ticket.result()` raises the same error."""

    code: str
    message: str
    param: str | None
    retryable: bool


Event = PromptUsage | PromptProgress | Token | Reasoning | ToolCall | ToolResult | Round | TokenSnapshot | Done | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that the ids of a reply depend on.

    Attributes:
        version: of dsv4nb.
        model: name of the checkpoint, `weights` the fingerprint of its files, `arithmetic` its numeric contract.
        prompt: the ids that the model read.
        max_new: tokens the reply may have, the room considered.
        given: ids that the reply began with, put there and not chosen.
        prefill: how the prompt was read: "exact", as rows are, or "fast", in chunks that add in another order.
        spec: how it was speculated, None on a plain route; ids depend on it with mode="rejection" alone.
        eos: ids that end the reply.
        constraint: what the grammar was made of, None without one.
        ids_sha256: of the reply's ids, as decimal numbers with commas between them.
    """

    version: str
    model: str
    weights: str
    arithmetic: str
    encoding: str
    prompt: tuple[int, ...]
    max_new: int
    config: SamplerConfig
    spec: SpecConfig | None
    is_thinking: bool
    has_tools: bool
    stops: tuple[str, ...]
    eos: tuple[int, ...]
    constraint: str | None
    ids_sha256: str
    given: tuple[int, ...] = ()
    prefill: str = "exact"

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read what `to_json` wrote.

        Raises:
            RequestError: the text is no recipe.
        """
        try:
            raw = json.loads(text)
            if isinstance(raw, dict):
                raw.setdefault("given", [])  # older recipes have neither
                raw.setdefault("prefill", "exact")
            if not isinstance(raw, dict) or raw.keys() != {f.name for f in fields(cls)}:
                raise ValueError(f"it must be an object with {', '.join(f.name for f in fields(cls))}")
            lists = {name: tuple(raw[name]) for name in ("prompt", "stops", "eos", "given")}
            config = SamplerConfig(
                **raw["config"] | {"logit_bias": [(token, float(bias)) for token, bias in raw["config"]["logit_bias"]]}
            )
            spec = None if raw["spec"] is None else SpecConfig(**raw["spec"])
        except (TypeError, KeyError, ValueError) as error:
            raise RequestError(f"the recipe cannot be read: {error}", param="recipe") from error
        return cls(**raw | lists | {"config": config, "spec": spec})


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one request.

    Attributes:
        text: the content, without reasoning and control tokens.
        reasoning: what was thought before the content, "" in chat mode.
        raw_text: every token's text, control tokens included, as the model wrote it.
        ids: the new token ids, without the one that ended the run.
        all_ids: prompt and new ids.
        tool_calls: the calls that the reply asks for.
        problems: where the reply departs from the format, by the names of encoding.md 9; () when it does not.
        logprobs: one per id of `ids`, when the request asked for them.
        rounds: of speculation, empty on a plain route; `rounds.to_frame()` is a table of them.
        recipe: what replays the reply, see `Model.replay`.
        messages: the conversation with this reply at its end; () for a prompt given as ids.
        steps: every run of a turn that called Python functions, this one the last; () for a single run.
    """

    text: str
    reasoning: str
    raw_text: str
    ids: tuple[int, ...]
    all_ids: tuple[int, ...]
    done: Done
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    rounds: Rounds = field(default_factory=Rounds, repr=False)
    recipe: Recipe = field(repr=False)
    messages: tuple[dict[str, object], ...] = field(default=(), repr=False)
    steps: tuple[Generation, ...] = field(default=(), repr=False)

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended: stop, length, tool_calls or cancelled."""
        return self.done.stop_reason

    @property
    def config(self) -> SamplerConfig:
        """The sampler values it was made with, the drawn seed among them."""
        return self.done.config

    @property
    def timings(self) -> Timings:
        """When what happened."""
        return self.done.timings

    def __str__(self) -> str:
        return self.text
