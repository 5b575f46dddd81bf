"""Going on from a token of a reply, and what a reply's tokens were worth: the part of a chat that reads ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dsv4nb.errors import RequestError
from dsv4nb.events import Generation, TokenLogprob
from dsv4nb.session.continuing import Given, beginning, refuse_another_prompt
from dsv4nb.session.request import Options, override
from dsv4nb.session.tree import Node, Tree


class Reader(Protocol):
    """What a chat asks of its model besides turns; `dsv4nb.handle.Model` is one."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def prompt_of(self, messages: Sequence[Mapping[str, Any]], options: Options) -> tuple[int, ...]: ...
    def score(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        n: int = 5,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[TokenLogprob, ...]: ...


class FromToken:
    """For a chat, which sets the attributes.

    Attributes:
        model: reads and scores token ids; None where there is none to ask.
    """

    model: Reader | None
    _tree: Tree

    @property
    def options(self) -> Options:
        """What the next turns ask for."""
        raise NotImplementedError

    def continue_from(
        self,
        turn: int,
        token: int,
        alternative: int | None = None,
        *,
        scores: Sequence[TokenLogprob] = (),
        **options: Any,
    ) -> Generation:
        """Go on from the middle of a reply, as a new branch, and wait; the reply's beginning is not computed again.

        The history then holds that beginning and what the model made of it.

        Args:
            turn: index of the turn, as in `turns`; negative counts from the end.
            token: of its reply, counted from 0: it and what follows are left out.
            alternative: the id that takes its place; the model chooses again when None.
            scores: log-probabilities of the reply, from `score`, if the turn has none of its own.
            options: of this turn only; where it does not say, those that the reply was asked with. What changes the
                prompt is refused.

        Raises:
            RequestError: there is no such turn or token, or the turn made calls or is constrained.
            Dsv4Error: as `send`.
        """
        result: Generation = self._continue(turn, token, alternative, scores, options, inline=True).result()
        return result

    def submit_from(
        self,
        turn: int,
        token: int,
        alternative: int | None = None,
        *,
        scores: Sequence[TokenLogprob] = (),
        **options: Any,
    ) -> Any:
        """Start what `continue_from` does and return its ticket at once."""
        return self._continue(turn, token, alternative, scores, options, inline=False)

    def score(
        self, turn: int = -1, n: int = 5, *, should_stop: Callable[[], bool] | None = None
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of a reply that was made without them, with `n` alternatives each.

        It is read again through the engine, behind the requests that are in the queue; its prompt mostly is cached.

        Args:
            should_stop: see `Model.score`.

        Raises:
            RequestError: there is no such turn, or its ids are not known.
        """
        node = self._tree.nth(turn)
        if not node.turn.ids:
            raise RequestError("the token ids of this turn are not known: it came as text", param="turn")
        model, prompt = self._reader(), self._prompt_of(node)
        return model.score(prompt, node.turn.ids, n, should_stop=should_stop)

    def ids(self, turn: int = -1) -> tuple[int, ...]:
        """Return prompt and reply of a turn as ids, of its last run where it made calls; `Model.inspect` reads them.

        Raises:
            RequestError: there is no such turn, or its ids are not known.
        """
        node = self._tree.nth(turn)
        if not node.turn.ids:
            raise RequestError("the token ids of this turn are not known: it failed, or came as text", param="turn")
        return (*self._prompt_of(node), *node.turn.ids)

    def _continue(
        self,
        turn: int,
        token: int,
        alternative: int | None,
        scores: Sequence[TokenLogprob],
        options: Mapping[str, Any],
        *,
        inline: bool,
    ) -> Any:
        node = self._tree.nth(turn)
        refuse_another_prompt(options)
        given = beginning(node.turn, token, alternative, scores)
        chosen = override(node.turn.options or self.options, options, "chat.continue_from()")
        if chosen.logprobs is not None and len(given.logprobs) < len(given.ids):
            given = replace(given, logprobs=self._reader().score(self._prompt_of(node), given.ids, chosen.logprobs))
        return self._start_given(node, chosen, given, inline=inline)

    def _start_given(self, node: Node, options: Options, given: Given, *, inline: bool) -> Any:
        """Start the turn of `node` again, with the beginning of its reply."""
        raise NotImplementedError

    def _prompt_of(self, node: Node) -> tuple[int, ...]:
        """Return the ids that a turn's reply answered."""
        before = node.parent.path() if node.parent else ()
        sent = [*(m for one in before for m in one.messages), *node.messages[:-1]]
        return self._reader().prompt_of(sent, node.turn.options or self.options)

    def _reader(self) -> Reader:
        if self.model is None:
            raise RequestError("this chat has no model to read token ids with", param="model")
        return self.model
