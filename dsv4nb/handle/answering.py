"""Requests by themselves: one, many, and again from a recipe."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.events import Event, Generation, Recipe, Token
from dsv4nb.handle.base import NAMES, Handle
from dsv4nb.session.batch import filled, rows_of, shared_beginnings
from dsv4nb.session.recipe import check, request_of
from dsv4nb.session.request import (
    Tool,
    refuse_unknown,
)
from dsv4nb.stream.iterate import aiterate, iterate
from dsv4nb.stream.ticket import Ticket


class Answering(Handle):
    """Answers requests that belong to no chat."""

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
        given = {name: value for name, value in locals().items() if name in NAMES and name != "prompt"}
        refuse_unknown(unknown, [*NAMES, "on_token"], "generate()")
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

    def _submit(self, where: str, prompt: str | None, options: Mapping[str, Any]) -> Ticket:
        return self.start(self._prepare(where, prompt, options))
