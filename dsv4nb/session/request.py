"""A request, checked in order before any device work."""

from __future__ import annotations

import difflib
import operator
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Protocol

from dsv4nb.config import SamplerConfig, SpecConfig, parse_window
from dsv4nb.encoding.constants import THINK_OPEN, Revision
from dsv4nb.encoding.grammar import Constraint, compile_constraint, constraint_of
from dsv4nb.encoding.policy import normalize, reasoning
from dsv4nb.encoding.render import Segment, render
from dsv4nb.engine.logprobs import MAX_LOGPROBS
from dsv4nb.engine.processors import Processor
from dsv4nb.errors import PromptEmpty, PromptOverCeiling, RequestError
from dsv4nb.events import Route, TokenLogprob
from dsv4nb.session.functions import Toolset, tools_of
from dsv4nb.session.limits import budget


class ChatTokens(Protocol):
    """The part of a tokenizer that a request and its run need."""

    @property
    def eos_id(self) -> int: ...
    def id_of(self, control: str, /) -> int: ...
    def encode_plain(self, text: str, /) -> list[int]: ...
    def encode_segments(self, segments: Iterable[Segment], *, trust_text: bool = False) -> list[int]: ...
    def token_bytes(self, token: int, /) -> bytes: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def control_ids(self) -> frozenset[int]: ...
    def __hash__(self) -> int: ...


Tool = Mapping[str, Any] | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request may ask for, as it was asked; None takes the model's default.

    Attributes:
        max_new: tokens of the reply at most; all that is left of the room when None.
        max_prompt_tokens: refuse a longer prompt.
        seed: drawn when None, and echoed in `Done.config`.
        sampler: gumbel or inverse_cdf, two draws of the same distribution.
        repetition_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 are off.
        penalty_last_n: tokens that the penalties look back on; 0 is the whole context.
        penalty_scope: all counts the prompt too, generated does not.
        logit_bias: id -> what is added to its logit; -inf bans it.
        logprobs: report each token's log-probability, with this many alternatives.
        effort: how long to think, in thinking mode.
        system: put in front of the messages.
        tools: declarations, or Python functions, whose signature and docstring become one.
        tool_choice: auto, none, required, or {"type": "function", "function": {"name": ...}}.
        response_format: text, json_object or json_schema, as in the OpenAI API; the reply keeps to it.
        regex: what the content must match as a whole.
        stop: strings that end the content and are not part of it.
        stop_token_ids: ids that end the reply like its own end token.
        trust_text: let text of messages become control tokens.
        spec: speculate; wherever the model has a drafter when None.
        spec_mode, spec_proposal, spec_depth: see `SpecConfig`.
        spec_window: off, auto, slot, (slot, tau) or (slot, tau, floor).
    """

    max_new: int | None = None
    max_prompt_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    sampler: str | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_last_n: int | None = None
    penalty_scope: str | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    thinking: bool = False
    effort: str | None = None
    system: str | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    regex: str | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    trust_text: bool = False
    spec: bool | None = None
    spec_mode: str | None = None
    spec_proposal: str | None = None
    spec_depth: int | None = None
    spec_window: str | Sequence[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a loaded model is, allows, and does when nothing is asked for.

    Attributes:
        spec: how requests speculate that do not say; None without a drafter, and `no_drafter` says why.
        block_size: drafts of a round at most.
        model, weights, arithmetic: name, fingerprint of the files and numeric contract, for recipes.
        prefill: how prompts are read, for recipes: "exact" or "fast".
    """

    max_seq: int
    vocab_size: int
    revision: Revision
    sampler: SamplerConfig
    spec: SpecConfig | None = None
    no_drafter: str = "the checkpoint has no drafter"
    block_size: int = 0
    model: str = ""
    weights: str = ""
    arithmetic: str = ""
    prefill: str = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that passed every check.

    Attributes:
        max_new: tokens the reply may have, the room considered; at least one.
        is_thinking: whether the prompt ended in `<think>`.
        has_tools: whether a block of calls in the reply is one.
        eos: ids that end the reply and are not part of it.
        logprobs: alternatives to report per token; None reports nothing.
        spec: how it speculates, None on a plain route.
        constraint: the grammar that the reply keeps to.
        given: ids that the reply begins with, put there and not chosen; `max_new` counts them.
        given_logprobs: one per given id, () when they are not reported.
        messages: the conversation that was rendered, () for a prompt given as ids.
        limits: of the model it was checked against.
        marks: (label, reading of the monotonic clock) of the checks.
    """

    prompt: tuple[int, ...]
    max_new: int
    config: SamplerConfig
    is_thinking: bool
    has_tools: bool
    stops: tuple[str, ...]
    eos: frozenset[int]
    logprobs: int | None = None
    spec: SpecConfig | None = None
    constraint: Constraint | None = field(default=None, repr=False)
    given: tuple[int, ...] = ()
    given_logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    messages: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    limits: Limits | None = field(default=None, repr=False)
    marks: tuple[tuple[str, float], ...] = field(default=(), repr=False, compare=False)

    @property
    def route(self) -> Route:
        """How its tokens are chosen."""
        if self.spec is None:
            return "plain_greedy" if self.config.is_greedy else "plain_sampled"
        return "spec_greedy" if self.config.is_greedy else "spec_sampled"


def prepare(
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    prompt_ids: Sequence[int] | None,
    options: Options,
    tokens: ChatTokens,
    limits: Limits,
) -> Request:
    """Check a request; nothing is run.

    Raises:
        RequestError: an argument is not understood, the prompt is empty or too long; the first bad one is named.
        EncodingError: the messages cannot be rendered.
    """
    marks = [("called", time.monotonic())]
    settings = settings_of(options, limits)
    source = _one_of(prompt=prompt, messages=messages, prompt_ids=prompt_ids)
    rule = _rule(options)
    rendered: list[dict[str, Any]] = []
    if source == "prompt_ids":
        assert prompt_ids is not None
        ids = _given_ids(prompt_ids, options, limits.vocab_size)
    else:
        rendered = conversation(prompt, messages, options)
        segments = segments_of(rendered, options, limits.revision)
        marks.append(("tokenize_start", time.monotonic()))
        ids = tokens.encode_segments(segments, trust_text=_flag("trust_text", options.trust_text))
        marks.append(("tokenize_end", time.monotonic()))
    if options.max_prompt_tokens is not None:
        most = _integer("max_prompt_tokens", options.max_prompt_tokens, low=1)
        if len(ids) > most:
            raise PromptOverCeiling(len(ids), most)
    if rule is not None and rendered and rendered[-1]["role"] == "assistant":
        raise RequestError(
            "a reply that is continued cannot be constrained: its beginning is not part of the grammar; "
            "leave out prefix=True, or response_format, regex and tool_choice",
            param="response_format" if options.regex is None else "regex",
        )
    is_thinking = ids[-1] == tokens.id_of(THINK_OPEN)
    if rule is not None:
        rule = replace(rule, thinking=is_thinking)
        compile_constraint(rule, tokens)  # a grammar that cannot be is refused here
    return Request(
        prompt=tuple(ids),
        max_new=budget(len(ids), settings.max_new, limits.max_seq),
        config=settings.config,
        is_thinking=is_thinking,
        has_tools=_has_tools(rendered),
        stops=settings.stops,
        eos=frozenset({tokens.eos_id, *settings.ends}),
        logprobs=settings.logprobs,
        spec=settings.spec,
        constraint=rule,
        messages=tuple(rendered),
        limits=limits,
        marks=tuple(marks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a request asks for besides its prompt, checked; fields as of `Request`.

    Attributes:
        ends: ids that end the reply, besides the tokenizer's own.
        max_new: as asked; the prompt may leave less.
    """

    config: SamplerConfig
    spec: SpecConfig | None
    stops: tuple[str, ...]
    ends: tuple[int, ...]
    max_new: int
    logprobs: int | None


def settings_of(options: Options, limits: Limits) -> Settings:
    """Check the numbers of a request; the first bad one is named.

    Raises:
        RequestError: a value is not understood, outside its range, or would have no effect.
    """
    config = sampler_config(options, limits.sampler)
    Processor(config, (), limits.vocab_size)  # refuses a bias of an id that there is not
    return Settings(
        config=config,
        spec=spec_config(options, config, limits),
        stops=_stops(options.stop),
        ends=tuple(_ids("stop_token_ids", options.stop_token_ids, limits.vocab_size)),
        max_new=limits.max_seq if options.max_new is None else _integer("max_new", options.max_new, low=0),
        logprobs=None if options.logprobs is None else _logprobs(options.logprobs),
    )


def check_options(options: Options, limits: Limits) -> None:
    """Check what a chat's turns are going to ask for; an effort is that of its thinking turns.

    Raises:
        RequestError, EncodingError: a turn with these options would be refused whatever is asked.
    """
    settings_of(options, limits)
    for name in ("thinking", "trust_text"):
        _flag(name, getattr(options, name))
    reasoning(options.effort, revision=limits.revision, thinking=True)
    if options.max_prompt_tokens is not None:
        _integer("max_prompt_tokens", options.max_prompt_tokens, low=1)
    _system(options)
    _rule(options)


def conversation(
    prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, options: Options
) -> list[dict[str, Any]]:
    """Return the messages of a request in the encoder's form."""
    _one_of(prompt=prompt, messages=messages)
    if prompt is not None:
        if not isinstance(prompt, str):
            raise RequestError(f"prompt is {type(prompt).__name__}; it must be text", param="prompt")
        if not prompt:
            raise PromptEmpty("prompt")
        given: Any = [{"role": "user", "content": prompt}]
    else:
        given = messages
    if (system := _system(options)) is not None:
        if isinstance(given, str) and given:
            given = [{"role": "user", "content": given}]
        if isinstance(given, list | tuple):  # anything else is refused below
            if given and isinstance(given[0], Mapping) and given[0].get("role") in ("system", "developer"):
                raise RequestError("messages begin with a system message; leave out system=", param="system")
            given = [{"role": "system", "content": system}, *given]
    choice = options.tool_choice
    tools = None if options.tools is None or choice == "none" else toolset(options).schemas
    return normalize(given, tools=tools, response_format=options.response_format)


def _system(options: Options) -> str | None:
    if not isinstance(options.system, str | None):
        raise RequestError(f"system is {type(options.system).__name__}; it must be text", param="system")
    return options.system


def toolset(options: Options) -> Toolset:
    """Return the declared tools, functions among them.

    Raises:
        RequestError: a tool is not understood.
    """
    return tools_of(() if options.tools is None else options.tools)


def segments_of(messages: Sequence[Mapping[str, Any]], options: Options, revision: Revision) -> list[Segment]:
    """Render messages in the encoder's form."""
    if options.effort is not None and not options.thinking and options.effort != "none":
        raise RequestError(
            f"effort is {options.effort!r} and thinking is off; pass thinking=True or leave out effort=", param="effort"
        )
    mode = reasoning(options.effort, revision=revision, thinking=_flag("thinking", options.thinking))
    return render(messages, revision=revision, thinking=mode.thinking, effort=mode.effort)


def sampler_config(options: Options, defaults: SamplerConfig) -> SamplerConfig:
    """Return the sampler values of a request; a seed is drawn when none is given."""
    given: dict[str, Any] = {}
    for name in _NUMBERS:
        value = getattr(options, name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise RequestError(f"{name} is {value!r}; it must be a number", param=name)
            try:
                given[name] = float(value)
            except OverflowError:
                raise RequestError(f"{name} is too large for a number of 64 bits", param=name) from None
    for name in ("top_k", "penalty_last_n"):
        if getattr(options, name) is not None:
            given[name] = _integer(name, getattr(options, name), low=0)
    for name in ("penalty_scope", "sampler", "logit_bias"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    # 32 bits are enough to tell runs apart and short enough to be typed again
    given["seed"] = secrets.randbits(32) if options.seed is None else _integer("seed", options.seed, low=0)
    return replace(defaults, **given)


def spec_config(options: Options, sampler: SamplerConfig, limits: Limits) -> SpecConfig | None:
    """Return how a request speculates, None for a plain route.

    Raises:
        RequestError: a value is outside its range, or would have no effect.
    """
    wanted = None if options.spec is None else _flag("spec", options.spec)
    given = [name for name in _SPEC if getattr(options, name) is not None]
    if limits.spec is None and (wanted or given):
        name = given[0] if given else "spec"
        raise RequestError(f"{name} has nothing to act on: {limits.no_drafter}; leave it out", param=name)
    if wanted is False and given:
        raise RequestError(f"{given[0]} has no effect with spec=False; leave one of them out", param=given[0])
    if limits.spec is None or wanted is False:
        return None
    asked: dict[str, Any] = {name.removeprefix("spec_"): getattr(options, name) for name in given}
    if "window" in asked:
        asked["window"], asked["tau"], asked["floor"] = parse_window(asked["window"])
    config = replace(limits.spec, **asked)
    config.require_fits(limits.block_size)
    if config.mode == "rejection" and sampler.sampler != "gumbel":
        raise RequestError(
            f"spec_mode='rejection' draws three times a position and sampler={sampler.sampler!r} can draw once; "
            "use sampler='gumbel', or spec_mode='exact'",
            param="spec_mode",
        )
    return config


_SPEC = ("spec_mode", "spec_proposal", "spec_depth", "spec_window")
_TEXTS = ("effort", "sampler", "penalty_scope")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def override(options: Options, given: Mapping[str, Any], where: str) -> Options:
    """Return `options` with the values of `given`; a name that is no option is refused."""
    known = [f.name for f in fields(Options)]
    refuse_unknown({name: value for name, value in given.items() if name not in known}, known, where)
    for name in _TEXTS:
        if not isinstance(given.get(name), str | None):
            raise RequestError(f"{name} is {given[name]!r}; it must be text", param=name)
    if not isinstance(given.get("tool_choice"), str | Mapping | None):
        choice = given["tool_choice"]
        raise RequestError(f"tool_choice is {choice!r}; it must be text or a mapping", param="tool_choice")
    return replace(options, **given)


def refuse_unknown(unknown: Mapping[str, object], known: Iterable[str], where: str) -> None:
    """Refuse keywords that `where` does not have, naming the nearest one it has."""
    for name in unknown:
        names = list(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise RequestError(f"{where} has no keyword {name!r}; {hint}", param=name)


def _one_of(**sources: object) -> str:
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        met = f"{' and '.join(given)} are given" if given else "nothing is given"
        raise RequestError(f"{met}; pass exactly one of {', '.join(sources)}", param=given[1] if given else "prompt")
    return given[0]


def _given_ids(prompt_ids: Sequence[int], options: Options, vocab_size: int) -> list[int]:
    for name in ("system", "tools", "tool_choice", "effort"):
        if getattr(options, name) is not None:
            raise RequestError(f"{name} has no place in prompt_ids; render it, or pass messages", param=name)
    for name in ("thinking", "trust_text"):
        if getattr(options, name):
            raise RequestError(f"{name} changes nothing in prompt_ids; leave it out, or pass messages", param=name)
    ids = _ids("prompt_ids", prompt_ids, vocab_size)
    if not ids:
        raise PromptEmpty("prompt_ids")
    return ids


def _ids(name: str, given: Sequence[int], vocab_size: int) -> list[int]:
    try:
        ids = [operator.index(token) for token in given]
    except TypeError:
        raise RequestError(f"{name} must be a sequence of integers", param=name) from None
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name} has {token}; ids are 0 to {vocab_size - 1}", param=name)
    return ids


def _logprobs(value: object) -> int:
    number = _integer("logprobs", value, low=0)
    if number > MAX_LOGPROBS:
        raise RequestError(f"logprobs is {number}; at most {MAX_LOGPROBS} alternatives are reported", param="logprobs")
    return number


def _has_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("tools") for message in messages)


def _rule(options: Options) -> Constraint | None:
    """Return the grammar that the reply keeps to, None without one; whether it thinks first is not known yet."""
    schemas = toolset(options).schemas
    return constraint_of(
        response_format=options.response_format,
        tool_choice=options.tool_choice,
        tools=schemas,
        regex=options.regex,
        thinking=False,
        tools_enabled=bool(schemas) and options.tool_choice != "none",
    )


def _stops(stop: object) -> tuple[str, ...]:
    if not isinstance(stop, str | list | tuple | set | frozenset | None):
        raise RequestError(f"stop is {stop!r}; it must be text, or a list of texts", param="stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop has {text!r}; each must be text of at least one character", param="stop")
    return stops


def _integer(name: str, value: object, *, low: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < low:
        raise RequestError(f"{name} is {value!r}; it must be an integer of at least {low}", param=name)
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be True or False", param=name)
    return value
