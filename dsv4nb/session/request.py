"""What a person asks for → a checked request. Every refusal happens here, before an engine is called."""

from __future__ import annotations

import difflib
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from dsv4nb.config import SamplerConfig
from dsv4nb.encoding.constants import THINK_OPEN, Revision
from dsv4nb.encoding.policy import normalize, reasoning
from dsv4nb.encoding.render import Segment, render
from dsv4nb.errors import EncodingError, PromptEmpty, RequestError
from dsv4nb.session.limits import budget

MAX_NEW = 1024  # tokens of a reply when nobody says otherwise

Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]


class RequestOptions(TypedDict, total=False):
    """The keywords of every request; what is left out or None takes its default.

    Attributes:
        messages: a conversation, OpenAI-shaped, in the place of a prompt.
        prompt_ids: token ids, in the place of a prompt; nothing is added to them.
        system: what the model is told about its task.
        thinking: reason before answering; follows `effort` when left out.
        effort: how hard to think: low, medium, high, max, …; "none" is not at all.
        tools: functions the model may call, OpenAI-shaped.
        max_new: at most this many tokens.
        temperature: 0 is greedy; the model's own default when left out, as for top_p.
        top_k, top_p, min_p: filters, see `SamplerConfig`.
        seed: the same seed gives the same reply.
        stop: text that ends the reply, one string or several; it is not part of the reply.
        stop_token_ids: ids that end the reply, beside the model's own.
    """

    messages: Messages | None
    prompt_ids: Sequence[int] | None
    system: str | None
    thinking: bool | None
    effort: str | None
    tools: Sequence[Mapping[str, Any]] | None
    max_new: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None


OPTIONS = tuple(RequestOptions.__annotations__)

_CHAT_ONLY = ("system", "thinking", "effort", "tools")


class Tokenizer(Protocol):
    """What a session needs of a tokenizer; `encoding.tokens.ChatTokenizer` is one."""

    @property
    def eos_id(self) -> int: ...
    def id_of(self, control: str, /) -> int: ...
    def encode_segments(self, segments: Iterable[Segment], /) -> list[int]: ...
    def encode_plain(self, text: str, /) -> list[int]: ...
    def encode_trusted(self, text: str, /) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def token_bytes(self, token: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that can run.

    Attributes:
        prompt: token ids, at least one.
        budget: tokens the reply may have, at least one.
        thinking: the reply begins with reasoning.
        tools: calls in the reply are taken as calls.
        stops: strings that end the content.
        stop_ids: ids that end the reply, the model's own included.
        messages: what was rendered, () for a prompt of ids.
        composed_s: time that checking and rendering took.
    """

    prompt: tuple[int, ...]
    budget: int
    sampler: SamplerConfig
    thinking: bool
    tools: bool
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    messages: tuple[Message, ...]
    composed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Composer:
    """Turns keywords into requests for one model.

    Attributes:
        sampler: the model's defaults.
    """

    tokenizer: Tokenizer
    revision: Revision
    vocab_size: int
    max_seq: int
    sampler: SamplerConfig

    def request(self, prompt: str | None, options: Mapping[str, Any]) -> Request:
        """Check and render.

        Raises:
            RequestError: a keyword is unknown or its value is refused; of several faults, the first in the order
                names, input, stops, rendering, length, sampler.
            EncodingError: the messages cannot be rendered.
        """
        started = time.perf_counter()
        given = given_options(options)
        source = _one_input(prompt, given)
        stops = _stops(given.get("stop"))
        stop_ids = self._stop_ids(given.get("stop_token_ids"))
        if source == "prompt_ids":
            ids, messages = self._ids(given), []
            thinking = ids[-1] == self.tokenizer.id_of(THINK_OPEN)
        else:
            messages, segments, thinking = self._rendered(prompt, given)
            ids = self.tokenizer.encode_segments(segments)
        n_new = budget(len(ids), _max_new(given.get("max_new", MAX_NEW)), self.max_seq)
        return Request(
            prompt=tuple(ids),
            budget=n_new,
            sampler=self._sampler(given),
            thinking=thinking,
            tools=bool(given.get("tools")),
            stops=stops,
            stop_ids=stop_ids,
            messages=tuple(messages),
            composed_s=time.perf_counter() - started,
        )

    def text(self, prompt: str | None, options: Mapping[str, Any]) -> str:
        """Return the prompt of a request as the model reads it, control tokens spelt out."""
        given = given_options(options)
        if _one_input(prompt, given) == "prompt_ids":
            return self.tokenizer.decode(self._ids(given))
        return "".join(segment.text for segment in self._rendered(prompt, given)[1])

    def _rendered(self, prompt: str | None, given: Mapping[str, Any]) -> tuple[list[Message], list[Segment], bool]:
        messages: list[Mapping[str, Any]]
        if prompt is not None:
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = given["messages"]
        if (system := given.get("system")) is not None:
            messages = _with_system(messages, system)
        wants = given.get("thinking")
        if wants is not None and not isinstance(wants, bool):
            raise RequestError(f"thinking is {wants!r}; it must be True or False", param="thinking")
        effort = given.get("effort")
        how = reasoning(effort, revision=self.revision, thinking=effort is not None if wants is None else wants)
        checked = normalize(messages, tools=given.get("tools"))
        segments = render(checked, revision=self.revision, thinking=how.thinking, effort=how.effort)
        return checked, segments, how.thinking

    def _ids(self, given: Mapping[str, Any]) -> list[int]:
        ids = _integers("prompt_ids", given["prompt_ids"])
        if not ids:
            raise PromptEmpty("prompt_ids")
        for name in _CHAT_ONLY:
            if name in given:
                raise RequestError(f"{name} has no place in a prompt of ids; pass a prompt or messages", param=name)
        self._require_known("prompt_ids", ids)
        return ids

    def _stop_ids(self, value: object) -> frozenset[int]:
        ids = [] if value is None else _integers("stop_token_ids", value)
        self._require_known("stop_token_ids", ids)
        return frozenset((self.tokenizer.eos_id, *ids))

    def _require_known(self, name: str, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{name} holds {token}; this model has the ids 0 … {self.vocab_size - 1}", param=name)

    def _sampler(self, given: Mapping[str, Any]) -> SamplerConfig:
        """The model's defaults with what was given in their place."""
        own = self.sampler
        return SamplerConfig(
            temperature=_real("temperature", given.get("temperature", own.temperature)),
            top_k=_integer("top_k", given.get("top_k", own.top_k)),
            top_p=_real("top_p", given.get("top_p", own.top_p)),
            min_p=_real("min_p", given.get("min_p", own.min_p)),
            seed=_integer("seed", given.get("seed", own.seed)),
        )


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given a value.

    Raises:
        RequestError: a name is none of ours; it names the nearest.
    """
    refuse_unknown(options, OPTIONS)
    return {name: value for name, value in options.items() if value is not None}


def refuse_unknown(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse the first name that is not known, naming the nearest that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(known)}."
            raise RequestError(f"the keyword {name!r} is unknown; {hint}", param=name)


def _one_input(prompt: str | None, given: Mapping[str, Any]) -> str:
    inputs = [name for name in ("messages", "prompt_ids") if name in given]
    if prompt is not None:
        inputs.insert(0, "prompt")
    if not inputs:
        raise RequestError("nothing to answer; pass a prompt, messages or prompt_ids", param="prompt")
    if len(inputs) > 1:
        raise RequestError(f"{' and '.join(inputs)} were both given; pass one of them", param=inputs[1])
    if prompt is not None and not isinstance(prompt, str):
        raise RequestError(f"the prompt is of type {type(prompt).__name__}; it must be text", param="prompt")
    if prompt is not None and not prompt.strip():
        raise PromptEmpty("prompt")
    return inputs[0]


def _with_system(messages: Sequence[Mapping[str, Any]], system: object) -> list[Mapping[str, Any]]:
    if not isinstance(system, str):
        raise RequestError(f"system is of type {type(system).__name__}; it must be text", param="system")
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise EncodingError(f"messages must be a list, not {type(messages).__name__}")
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer"):
        raise RequestError("messages begin with a system message, and system was given too; pass one", param="system")
    return [{"role": "system", "content": system}, *messages]


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"stop is {value!r}; it must be text that is not empty, or a list of such", param="stop")
    return tuple(stops)


def _max_new(value: object) -> int:
    n = _integer("max_new", value)
    if n < 0:
        raise RequestError(f"max_new is {n}; it must be 0 or more (a reply has at least one token)", param="max_new")
    return n


def _integers(name: str, value: object) -> list[int]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is of type {type(value).__name__}; it must be a list of token ids", param=name)
    return [_integer(name, item) for item in value]


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}; it must be a whole number", param=name) from None


def _real(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name} is {value!r}; it must be a number", param=name) from None
    if math.isnan(number):
        raise RequestError(f"{name} is {value!r}; it must be a number", param=name)
    return number
