"""A handle on a loaded model: its facts, what it knows and queues, and how a request comes into the queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from dsv4nb.engine.free_memory import free_host_bytes, largest_session
from dsv4nb.engine.memory import Roomy
from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import ModelClosed, RequestError
from dsv4nb.events import Timings, TokenLogprob
from dsv4nb.info import Capabilities, LoadInfo, SpecInfo
from dsv4nb.session import scoring
from dsv4nb.session.log import OnEnd
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.request import (
    ChatTokens,
    Limits,
    Options,
    Request,
    conversation,
    override,
    prepare,
    refuse_unknown,
    segments_of,
)
from dsv4nb.session.server import Server
from dsv4nb.session.waiting import Past, Waiting
from dsv4nb.stream.ticket import Ticket

if TYPE_CHECKING:
    from dsv4nb.session.inspecting import Inspecting


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a handle is made of; handles of the same checkpoint share them."""

    engine: Engine
    tokens: ChatTokens
    server: Server
    limits: Limits
    info: LoadInfo
    caps: Capabilities


NAMES = ("prompt", "messages", "prompt_ids", *Options.__slots__)


class Handle:
    """What every part of a handle stands on; see `dsv4nb.handle.Model`."""

    def __init__(self, parts: Parts, release: Callable[[], None]) -> None:
        self._parts = parts
        self._release = end = weakref.finalize(self, release)
        self._watching: Inspecting | None = None
        self._is_over: Callable[[], bool] = lambda: not end.alive

    @property
    def _inside(self) -> Inspecting:
        """Inspections and taps, made on first use."""
        if self._watching is None:
            from dsv4nb.session.inspecting import Inspecting  # brings torch

            parts = self._parts
            self._watching = Inspecting(parts.engine, parts.server, parts.tokens, parts.info.name, self._is_over)
        return self._watching

    def _refuse_taps(self, what: str) -> None:
        if self._watching is not None:
            self._watching.refuse_reuse(what)

    @property
    def name(self) -> str:
        return self._parts.info.name

    @property
    def info(self) -> LoadInfo:
        """The facts of the model; shows as a table."""
        return self._parts.info

    @property
    def engine(self) -> Engine:
        """The engine; only the serving thread may run it."""
        return self._parts.engine

    @property
    def caps(self) -> Capabilities:
        """What requests may ask for; shows as a table."""
        return self._parts.caps

    @property
    def spec(self) -> SpecInfo:
        """How this model speculates, and what that costs as far as it was measured; shows as a table."""
        limits, speculator = self.limits, self._parts.server.speculator
        return SpecInfo(
            config=limits.spec,
            note=limits.no_drafter if limits.spec is None else speculator.fault,
            block_size=limits.block_size,
            draft_ms=None if speculator.costs is None else speculator.costs.draft,
            verify_ms=() if speculator.costs is None else speculator.costs.verify,
            plain_ms=speculator.plain_ms,
        )

    def measure_spec(self) -> SpecInfo:
        """Measure what drafting and verifying cost, behind the requests that are in the queue; then return `spec`.

        Raises:
            RequestError: there is no drafter.
        """
        self._require_open()
        if self.limits.spec is None:
            raise RequestError(f"there is nothing to measure: {self.limits.no_drafter}", param="spec")
        self._parts.server.do(lambda engine, prefixes: self._parts.server.speculator.measured())
        return self.spec

    @property
    def max_seq(self) -> int:
        """Tokens of the longest sequence, prompt, reply and the reserved positions together."""
        return self.limits.max_seq

    @property
    def eos(self) -> int:
        """The id that ends a reply."""
        return self._parts.tokens.eos_id

    @property
    def limits(self) -> Limits:
        """Room, vocabulary, encoding and the default sampler values."""
        return self._parts.limits

    @property
    def is_closed(self) -> bool:
        return not self._release.alive

    def prepare(self, prompt: str | None = None, **options: Any) -> Request:
        """Check a request as `submit` does, and run nothing."""
        return self._prepare("prepare()", prompt, options)

    def start(self, request: Request, on_end: OnEnd | None = None, *, in_step: bool = False) -> Ticket:
        """Put a checked request in the queue.

        Args:
            in_step: wait after every round until `Ticket.taken` says that its events were dealt with.
        """
        self._require_open()
        server = self._parts.server
        taps = None if self._watching is None else self._watching.armed
        if taps is not None:
            request = replace(request, spec=None)  # what a tap does may depend on which rows run together
        journal = server.submit(request, on_end, in_step=in_step, taps=taps)
        return Ticket(journal, owner=self, place=lambda: server.place(journal))

    @property
    def cache(self) -> Prefixes:
        """What is known of earlier runs: its numbers, its contents, and the policy of reuse."""
        return self._parts.server.prefixes

    def largest_session(self) -> int:
        """Return how many positions one more session can have in the memory that is free now, at most `max_seq`."""
        engine = self.engine
        if isinstance(engine, Roomy):
            return engine.largest_session()
        return largest_session(engine.state_bytes, self.max_seq, free_host_bytes())

    @property
    def queue(self) -> list[Waiting]:
        """The requests that have not ended, in the order in which they run."""
        return self._parts.server.queue()

    def queue_head(self, most: int) -> tuple[list[Waiting], int]:
        """Return the first `most` requests of `queue`, and how many there are in all; a batch may have thousands."""
        server = self._parts.server
        return server.queue(most), server.queue_length()

    @property
    def past(self) -> list[Past]:
        """The last requests that have ended, the latest first."""
        return self._parts.server.past()

    def cancel(self, id: int) -> None:
        """Cancel the request that `queue` lists with this id.

        Raises:
            RequestError: it has ended, or there never was one.
        """
        self._parts.server.cancel(id)

    def on_queue_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after a request came or ended, on the thread where it did; it must not block.

        Returns:
            A function that ends this.
        """
        return self._parts.server.on_change(callback)

    @property
    def timings(self) -> Timings | None:
        """When what happened in the last request that ended well; None before the first."""
        return self._parts.server.timings

    def render(self, prompt: str | None = None, **options: Any) -> str:
        """Return the text that the model would read, control tokens included; options as of `generate`."""
        options = dict(options)
        messages = options.pop("messages", None)
        chosen = override(Options(), options, "render()")
        rendered = conversation(prompt, messages, chosen)
        return "".join(segment.text for segment in segments_of(rendered, chosen, self.limits.revision))

    def tokenize(self, prompt: str | None = None, **options: Any) -> list[int]:
        """Return the ids that the model would read; options as of `generate`."""
        return list(self._prepare("tokenize()", prompt, options).prompt)

    def prompt_of(self, messages: Sequence[Mapping[str, Any]], options: Options) -> tuple[int, ...]:
        """Return the ids that a chat's turn with these options reads."""
        return prepare(None, messages, None, options, self._parts.tokens, self.limits).prompt

    def score(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        n: int = 5,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[TokenLogprob, ...]:
        """Return how likely the model finds `ids` behind a prompt: one entry each, with `n` alternatives.

        It runs behind the requests that are in the queue; what of the prompt is cached is not computed again.

        Args:
            should_stop: asked between two forwards; True ends it early, with the entries so far.

        Raises:
            RequestError: an id is outside the vocabulary, there is no prompt, or they do not fit.
        """
        self._require_open()
        prompt, reply = scoring.checked(prompt_ids, ids, n, self.limits)
        stop = should_stop or (lambda: False)
        return self._parts.server.do(lambda engine, prefixes: scoring.score(engine, prefixes, prompt, reply, n, stop))

    def encode(self, text: str) -> list[int]:
        """Return the ids of text that is nothing but text: no template around it, no control tokens in it."""
        return self._parts.tokens.encode_plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included; broken characters become U+FFFD."""
        return b"".join(map(self._parts.tokens.token_bytes, ids)).decode("utf-8", errors="replace")

    def close(self) -> None:
        """End this handle; the last one of an engine stops its runs and frees it. Idempotent."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.name}{', closed' if self.is_closed else ''}>"

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    def _prepare(self, where: str, prompt: str | None, options: Mapping[str, Any]) -> Request:
        self._require_open()
        options = dict(options)
        messages, prompt_ids = options.pop("messages", None), options.pop("prompt_ids", None)
        refuse_unknown({name: value for name, value in options.items() if name not in NAMES}, NAMES, where)
        chosen = override(Options(), options, where)
        return prepare(prompt, messages, prompt_ids, chosen, self._parts.tokens, self.limits)

    def _require_turns(self) -> None:
        self._require_open()
        self._refuse_taps("chats")

    def _require_open(self) -> None:
        if self.is_closed:
            raise ModelClosed(self.name)
