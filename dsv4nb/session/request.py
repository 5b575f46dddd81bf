"""A request, checked in order before any device work."""

from __future__ import annotations

import difflib
import operator
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Protocol

from dsv4nb.config import SamplerConfig
from dsv4nb.encoding.constants import THINK_OPEN, Revision
from dsv4nb.encoding.policy import normalize, reasoning
from dsv4nb.encoding.render import Segment, render
from dsv4nb.errors import PromptEmpty, RequestError
from dsv4nb.session.limits import budget

MAX_NEW = 1024  # tokens of a reply when nothing is asked for and there is room


class ChatTokens(Protocol):
    """The part of a tokenizer that a request and its run need."""

    @property
    def eos_id(self) -> int: ...
    def id_of(self, control: str, /) -> int: ...
    def encode_segments(self, segments: Iterable[Segment], *, trust_text: bool = False) -> list[int]: ...
    def token_bytes(self, token: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request may ask for, as it was asked; None takes the model's default.

    Attributes:
        max_new: tokens of the reply at most; what is left of the room when None, at most `MAX_NEW`.
        seed: drawn when None, and echoed in `Done.config`.
        effort: how long to think, in thinking mode.
        system: put in front of the messages.
        stop: strings that end the content and are not part of it.
        trust_text: let text of messages become control tokens.
    """

    max_new: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    thinking: bool = False
    effort: str | None = None
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    stop: str | Sequence[str] = ()
    trust_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a loaded model allows and does when nothing is asked for."""

    max_seq: int
    vocab_size: int
    revision: Revision
    sampler: SamplerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that passed every check.

    Attributes:
        max_new: tokens the reply may have, the room considered; at least one.
        is_thinking: whether the prompt ended in `<think>`.
        has_tools: whether a block of calls in the reply is one.
        eos: ids that end the reply and are not part of it.
        messages: the conversation that was rendered, () for a prompt given as ids.
        prepare_s: what checking and rendering took.
    """

    prompt: tuple[int, ...]
    max_new: int
    config: SamplerConfig
    is_thinking: bool
    has_tools: bool
    stops: tuple[str, ...]
    eos: frozenset[int]
    messages: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    prepare_s: float = 0.0


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
    started = time.monotonic()
    config = sampler_config(options, limits.sampler)
    stops = _stops(options.stop)
    max_new = MAX_NEW if options.max_new is None else _integer("max_new", options.max_new, low=0)
    source = _one_of(prompt=prompt, messages=messages, prompt_ids=prompt_ids)
    rendered: list[dict[str, Any]] = []
    if source == "prompt_ids":
        assert prompt_ids is not None
        ids = _given_ids(prompt_ids, options, limits.vocab_size)
    else:
        rendered = conversation(prompt, messages, options)
        segments = segments_of(rendered, options, limits.revision)
        ids = tokens.encode_segments(segments, trust_text=_flag("trust_text", options.trust_text))
    return Request(
        prompt=tuple(ids),
        max_new=budget(len(ids), max_new, limits.max_seq),
        config=config,
        is_thinking=ids[-1] == tokens.id_of(THINK_OPEN),
        has_tools=any(message.get("tools") for message in rendered),
        stops=stops,
        eos=frozenset({tokens.eos_id}),
        messages=tuple(rendered),
        prepare_s=time.monotonic() - started,
    )


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
    if options.system is not None:
        if not isinstance(options.system, str):
            raise RequestError(f"system is {type(options.system).__name__}; it must be text", param="system")
        if isinstance(given, str) and given:
            given = [{"role": "user", "content": given}]
        if isinstance(given, list | tuple):  # anything else is refused below
            if given and isinstance(given[0], Mapping) and given[0].get("role") in ("system", "developer"):
                raise RequestError("messages begin with a system message; leave out system=", param="system")
            given = [{"role": "system", "content": options.system}, *given]
    return normalize(given, tools=options.tools)


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
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(options, name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise RequestError(f"{name} is {value!r}; it must be a number", param=name)
            given[name] = float(value)
    if options.top_k is not None:
        given["top_k"] = _integer("top_k", options.top_k, low=0)
    # 32 bits are enough to tell runs apart and short enough to be typed again
    given["seed"] = secrets.randbits(32) if options.seed is None else _integer("seed", options.seed, low=0)
    return replace(defaults, **given)


def override(options: Options, given: Mapping[str, Any], where: str) -> Options:
    """Return `options` with the values of `given`; a name that is no option is refused."""
    known = [f.name for f in fields(Options)]
    refuse_unknown({name: value for name, value in given.items() if name not in known}, known, where)
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
    for name in ("system", "tools", "effort"):
        if getattr(options, name) is not None:
            raise RequestError(f"{name} has no place in prompt_ids; render it, or pass messages", param=name)
    for name in ("thinking", "trust_text"):
        if getattr(options, name):
            raise RequestError(f"{name} changes nothing in prompt_ids; leave it out, or pass messages", param=name)
    try:
        ids = [operator.index(token) for token in prompt_ids]
    except TypeError:
        raise RequestError("prompt_ids must be a sequence of integers", param="prompt_ids") from None
    if not ids:
        raise PromptEmpty("prompt_ids")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"prompt_ids has {token}; ids are 0 to {vocab_size - 1}", param="prompt_ids")
    return ids


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
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
