"""The handle on a loaded model: everything a person calls."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from dsv4nb.encoding.policy import normalize
from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import ModelClosed, RequestError
from dsv4nb.events import Event, Generation, Recipe, Timings, Token, TokenLogprob
from dsv4nb.info import Capabilities, LoadInfo, SpecInfo
from dsv4nb.session import scoring
from dsv4nb.session.batch import filled, rows_of, shared_beginnings
from dsv4nb.session.chat import Chat
from dsv4nb.session.gauge import Gauge
from dsv4nb.session.inspection import Inspection
from dsv4nb.session.log import OnEnd
from dsv4nb.session.loop import MAX_ROUNDS, Approve
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.recipe import check, request_of
from dsv4nb.session.request import (
    ChatTokens,
    Limits,
    Options,
    Request,
    Tool,
    check_options,
    conversation,
    override,
    prepare,
    refuse_unknown,
    segments_of,
    toolset,
)
from dsv4nb.session.room import free_host_bytes, largest_session
from dsv4nb.session.saving import read_chat, save_chat
from dsv4nb.session.server import Server
from dsv4nb.session.waiting import Past, Waiting
from dsv4nb.stream.iterate import aiterate, iterate
from dsv4nb.stream.ticket import Ticket

if TYPE_CHECKING:
    from dsv4nb.session.inspecting import Change, HasIds, Inspecting
from dsv4nb.stream.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a handle is made of; handles of the same checkpoint share them."""

    engine: Engine
    tokens: ChatTokens
    server: Server
    limits: Limits
    info: LoadInfo
    caps: Capabilities


class Model:
    """A handle on a loaded model. Handles of the same checkpoint share one engine.

    Args:
        release: called once, when the handle is closed or forgotten.
    """

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

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] | None = None,
        max_new: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        sampler: str | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        penalty_last_n: int | None = None,
        penalty_scope: str | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        thinking: bool = False,
        effort: str | None = None,
        system: str | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        regex: str | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        max_prompt_tokens: int | None = None,
        on_token: Callable[[Token], object] | None = None,
        trust_text: bool = False,
        spec: bool | None = None,
        spec_mode: str | None = None,
        spec_proposal: str | None = None,
        spec_depth: int | None = None,
        spec_window: str | Sequence[Any] | None = None,
        **unknown: object,
    ) -> Generation:
        """Answer, and wait for the end; an interrupt stops the run and is raised.

        The prompt is computed from its beginning: chats and batches go on from earlier runs, single requests do not.

        Args:
            prompt: one user message; or `messages`, or `prompt_ids` as they are, exactly one of the three.
            max_new: tokens at most; all that is left of the room when None.
            temperature, top_p: the checkpoint's own when None; a temperature of 0 or a top_k of 1 is greedy.
            top_k, min_p: 0 is off.
            seed: drawn when None; `result.config` tells it.
            sampler: gumbel or inverse_cdf, two draws of the same distribution.
            repetition_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 are off.
            penalty_last_n: tokens that the penalties look back on; 0 is the whole context.
            penalty_scope: all counts the prompt too, generated does not.
            logit_bias: id -> what is added to its logit; -inf bans it.
            logprobs: report each token's log-probability and this many alternatives, 0 to 20.
            effort: how long to think: none, low, medium, high, max.
            tools: declarations, or Python functions; `chat` calls them, `generate` returns the calls.
            tool_choice: auto, none, required, or {"type": "function", "function": {"name": ...}}.
            response_format: {"type": "json_schema", "json_schema": {"schema": ...}} and the like; it is kept to.
            regex: what the content matches as a whole; with + and * give max_new too, or it may never end.
            stop: strings that end the content and are not part of it.
            stop_token_ids: ids that end the reply like its own end token.
            max_prompt_tokens: refuse a longer prompt.
            on_token: called with every token on this thread, before the next one is made; False stops the run, and so
                does an error.
            trust_text: let text of messages become control tokens.
            spec: speculate; wherever there is a drafter when None. It changes the speed and never the text, but with
                spec_mode="rejection", which keeps the distribution alone.
            spec_mode, spec_proposal, spec_depth, spec_window: see `SpecConfig`; a window is off, auto, slot,
                (slot, tau) or (slot, tau, floor).

        Raises:
            RequestError, EncodingError: the request was refused; nothing was run.
            ModelClosed: after `close`.
            EngineError: the run failed.
        """
        given = {name: value for name, value in locals().items() if name in _NAMES and name != "prompt"}
        refuse_unknown(unknown, [*_NAMES, "on_token"], "generate()")
        request = self._prepare("generate()", prompt, given)
        ticket = self.start(request, in_step=on_token is not None)
        if on_token is not None:
            for n, event in enumerate(iterate(ticket), 1):
                if isinstance(event, Token) and on_token(event) is False:
                    ticket.cancel()
                    break
                ticket.taken(n)
        return ticket.result()

    def stream(self, prompt: str | None = None, **options: Any) -> Iterator[Event]:
        """Answer as events, `for event in model.stream(...)`; leaving the loop stops the run.

        Args:
            options: as of `generate`, without `on_token`.

        Raises:
            RequestError, EncodingError, ModelClosed: at the call.
            Dsv4Error: in the loop, after the `Failed` event of a run that failed.
        """
        return iterate(self._submit("stream()", prompt, options))

    def astream(self, prompt: str | None = None, **options: Any) -> AsyncGenerator[Event]:
        """Answer as events, `async for event in model.astream(...)`; see `stream`."""
        return aiterate(self._submit("astream()", prompt, options))

    def submit(self, prompt: str | None = None, **options: Any) -> Ticket:
        """Put a request in the queue and return at once; options as of `generate`, without `on_token`."""
        return self._submit("submit()", prompt, options)

    def chat(
        self,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        approve: Approve | Literal["ask"] | None = None,
        max_rounds: int = MAX_ROUNDS,
        **options: Any,
    ) -> Chat:
        """Start a conversation; displaying it shows a panel.

        Tools that are Python functions are called, and the model goes on with their results.

        Args:
            messages: a history to go on from, as `Chat.to_messages` gives it.
            approve: asked before each call, with its `ToolCall`: True runs it, False declines it, a mapping runs it
                with these arguments instead. "ask" lets calls wait for a person: in the panel, or for `Chat.approve`
                and `Chat.deny` of those in `Chat.pending`. None runs every call.
            max_rounds: runs with calls in one turn at most.
            options: of every turn, as of `generate`: thinking, system, tools, temperature, …
        """
        self._require_open()
        _require_approval(approve)
        if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
            raise RequestError(f"max_rounds is {max_rounds!r}; it must be an integer of at least 1", param="max_rounds")
        chosen = override(Options(), options, "chat()")
        check_options(chosen, self.limits)  # refused here, not at the first turn
        history, system = _history(messages)
        if system is not None:
            if chosen.system is not None:
                raise RequestError("messages begin with a system message; leave out system=", param="system")
            chosen = replace(chosen, system=system)
        return self._new_chat(chosen, approve, max_rounds, history)

    def open_chat(
        self,
        path: str | Path,
        *,
        tools: Sequence[Tool] | None = None,
        approve: Approve | Literal["ask"] | None = None,
        max_rounds: int = MAX_ROUNDS,
    ) -> Chat:
        """Go on from a chat that `Chat.save` wrote; its next turn computes nothing that was computed before.

        Args:
            tools: in place of the saved declarations: functions are not saved.
            approve, max_rounds: as of `chat`.

        Raises:
            ArchiveError: the file cannot be read, is not whole, or is of another model; it names both sides.
        """
        self._require_open()
        _require_approval(approve)
        options, thinking, tree, ledger = read_chat(path, self._parts.server, self.limits)
        if tools is not None:
            options = replace(options, tools=tools)
            toolset(options)
        chat = self._new_chat(options, approve, max_rounds, ())
        chat.resume(tree, ledger, thinking=thinking)
        return chat

    def _new_chat(
        self, options: Options, approve: Approve | str | None, max_rounds: int, history: Sequence[Mapping[str, Any]]
    ) -> Chat:
        return Chat(
            self._turns(approve if callable(approve) else None, max_rounds),
            name=self.name,
            options=options,
            show=_show,
            messages=history,
            save=self._save_chat,
            limits=self.limits,
            gauge=Gauge(tokens=self._parts.tokens, limits=self.limits),
            asks=approve == "ask",
            model=self,
        )

    def _turns(self, approve: Approve | None = None, max_rounds: int = MAX_ROUNDS) -> Turns:
        return Turns(
            owner=self,
            name=self.name,
            require=self._require_turns,
            server=self._parts.server,
            tokens=self._parts.tokens,
            limits=self.limits,
            approve=approve,
            max_rounds=max_rounds,
        )

    def _save_chat(self, chat: Chat, path: str | Path) -> int:
        self._require_open()
        return save_chat(chat, path, self._parts.server, self.limits)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        configs: Sequence[Mapping[str, Any]] | None = None,
        *,
        on_result: Callable[[int, Generation], None] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Answer many prompts; what they begin with in common is computed once. An interrupt cancels the rest.

        Args:
            prompts: texts, or lists of messages.
            configs: options of each prompt alone, as of `generate`; they win over `options`.
            on_result: called with (index, result) on this thread, in the order of the prompts.

        Returns:
            The results in the order of the prompts, each what `generate` gives for it alone.

        Raises:
            RequestError, EncodingError: a request was refused; nothing was run.
            Dsv4Error: a run failed; those behind it were cancelled.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RequestError(f"prompts is {type(prompts).__name__}; it must be a list", param="prompts")
        own = [{}] * len(prompts) if configs is None else list(configs)
        if len(own) != len(prompts):
            raise RequestError(f"configs has {len(own)} entries for {len(prompts)} prompts", param="configs")
        requests = [
            self._prepare(
                "generate_batch()",
                prompt if isinstance(prompt, str) else None,
                {**options, **config, **({} if isinstance(prompt, str) else {"messages": prompt})},
            )
            for prompt, config in zip(prompts, own, strict=True)
        ]
        self._refuse_taps("batches")
        marks = shared_beginnings([request.prompt for request in requests])
        tickets = [
            Ticket(self._parts.server.submit(request, may_reuse=True, keep_at=keep_at), owner=self)
            for request, keep_at in zip(requests, marks, strict=True)
        ]
        results = []
        try:
            for i, ticket in enumerate(tickets):
                results.append(ticket.result())
                if on_result is not None:
                    on_result(i, results[-1])
        finally:
            for ticket in tickets:
                ticket.cancel()  # changes nothing once a run has ended
        return results

    def map(self, rows: Any, template: str, *, column: str = "reply", **options: Any) -> Any:
        """Ask a question about each row of a table.

        Args:
            rows: a pandas data frame, or a list of mappings.
            template: the question, with {name} for the value of a column.
            column: where the replies go.
            options: as of `generate_batch`.

        Returns:
            A new table of the same kind, with `column` for the texts, and column + "_stop_reason".

        Raises:
            RequestError: the template names a column that there is not; and as `generate_batch`.
        """
        table = rows_of(rows)
        replies = self.generate_batch(filled(template, table), **options)
        new: dict[str, list[Any]] = {
            column: [reply.text for reply in replies],
            f"{column}_stop_reason": [reply.stop_reason for reply in replies],
        }
        if hasattr(rows, "assign"):
            return rows.assign(**new)
        return [{**row, **{name: values[i] for name, values in new.items()}} for i, row in enumerate(table)]

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

    def replay(self, recipe: Recipe | str) -> Generation:
        """Make a reply again from `Generation.recipe`, or its text, and check that it is the same.

        The result has neither `messages` nor log-probabilities: they are no part of a recipe.

        Raises:
            RequestError: the text is no recipe.
            ReplayMismatch: the recipe is of another model, or the replay has other ids.
        """
        recipe = Recipe.from_json(recipe) if isinstance(recipe, str) else recipe
        reply = self.start(request_of(recipe, self.limits)).result()
        check(recipe, reply.ids)
        return reply

    @property
    def tap_names(self) -> tuple[str, ...]:
        """The places inside the model that `tap` and `inspect(keep=...)` know, in the order of a forward.

        "embed", "layers.N.middle" and "layers.N.out" are residual streams, [HC, D] per token; the inputs and outputs
        of attention and experts are [D].
        """
        return self._inside.names

    def tap(
        self, place: str, change: Change | npt.ArrayLike, *, tokens: int | Iterable[int] | None = None
    ) -> AbstractContextManager[None]:
        """Change what stands at a place inside the model, for the runs that are started in a `with` block.

        `inspect`, `generate`, `stream` and `submit` go through it, without speculation. Chats and batches are refused:
        what they compute stays for later runs.

        Args:
            place: one of `tap_names`.
            change: is given the rows [n, ...] of a forward as a float32 tensor of its own, and returns as many; None
                leaves them as they are. It runs on the serving thread, once per chunk of the prompt and once per new
                token. Or the rows themselves, to be put there.
            tokens: positions of the rows, ascending; all when None, for an array those from 0 on.

        Raises:
            RequestError: there is no such place, or rows and tokens are not as many; in the block, when `change`
                fails or returns something of another shape.
        """
        return self._inside.tap(place, change, tokens)

    def inspect(
        self,
        source: Generation | Sequence[int] | HasIds,
        *,
        turn: int | None = None,
        layers: int | slice | Iterable[int] | None = None,
        tokens: int | slice | Iterable[int] | None = None,
        per_head: bool = False,
        keep: str | Sequence[str] = (),
        attention: bool = True,
        logits: bool = True,
        lens: bool = False,
    ) -> Inspection:
        """Run a sequence again, behind what is in the queue, and tell what happened in it; an interrupt ends it.

        Args:
            source: a result, a chat, or ids, such as those of `tokenize`.
            turn: of the chat, as in `chat.turns`; its last one when None.
            layers, tokens: to watch, all when None; negative numbers count from the end.
            per_head: keep the attention of each head, not only the mean.
            keep: places whose activations are kept, of `tap_names`.
            attention: keep what was read, which takes most of the memory.
            logits: keep those behind each watched token.
            lens: keep what the head makes of the streams behind each watched layer.

        Raises:
            RequestError: something is not understood, or does not fit into memory; nothing was run.
        """
        return self._inside.inspect(
            source,
            turn=turn,
            layers=layers,
            tokens=tokens,
            per_head=per_head,
            keep=keep,
            attention=attention,
            logits=logits,
            lens=lens,
        )

    @property
    def cache(self) -> Prefixes:
        """What is known of earlier runs: its numbers, its contents, and the policy of reuse."""
        return self._parts.server.prefixes

    def largest_session(self) -> int:
        """Return how many positions one more session can have in the memory that is free now, at most `max_seq`."""
        return largest_session(self.engine.state_bytes, self.max_seq, free_host_bytes())

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

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.name}{', closed' if self.is_closed else ''}>"

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    def _submit(self, where: str, prompt: str | None, options: Mapping[str, Any]) -> Ticket:
        return self.start(self._prepare(where, prompt, options))

    def _prepare(self, where: str, prompt: str | None, options: Mapping[str, Any]) -> Request:
        self._require_open()
        options = dict(options)
        messages, prompt_ids = options.pop("messages", None), options.pop("prompt_ids", None)
        refuse_unknown({name: value for name, value in options.items() if name not in _NAMES}, _NAMES, where)
        chosen = override(Options(), options, where)
        return prepare(prompt, messages, prompt_ids, chosen, self._parts.tokens, self.limits)

    def _require_turns(self) -> None:
        self._require_open()
        self._refuse_taps("chats")

    def _require_open(self) -> None:
        if self.is_closed:
            raise ModelClosed(self.name)


_NAMES = ("prompt", "messages", "prompt_ids", *Options.__slots__)


def _require_approval(approve: object) -> None:
    if approve is not None and approve != "ask" and not callable(approve):
        raise RequestError(f"approve is {approve!r}; it must be a function of a call, or 'ask'", param="approve")


def _history(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """Return a history that is over, in the encoder's form, and the text of its system message apart."""
    if not messages:
        return [], None
    checked = normalize(messages, expects_reply=False)
    system = checked.pop(0)["content"] if checked[0]["role"] == "system" else None
    return checked, system


def _show(chat: Chat) -> None:
    """Display a chat: a panel where there are widgets, text elsewhere."""
    try:
        from dsv4nb.widgets.chat import show
    except ImportError:  # the jupyter extra is not installed
        from IPython.display import display

        display({"text/plain": repr(chat)}, raw=True)  # type: ignore[no-untyped-call]
    else:
        show(chat)
