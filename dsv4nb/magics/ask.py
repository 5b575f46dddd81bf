"""`%%dsv4`: from a line and a cell to a run, and from its end to the variables that keep it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from IPython.core.error import UsageError

from dsv4nb.errors import PromptEmpty, PromptOverCeiling, PromptTooLong, RequestError
from dsv4nb.magics.arguments import cell_parser, given
from dsv4nb.magics.cell import CellScreen, Interrupted, Screen, TerminalScreen, follow
from dsv4nb.magics.defaults import Defaults
from dsv4nb.magics.forms import Form, Parsed, form_of
from dsv4nb.magics.options import CELL
from dsv4nb.magics.prompt import attached, filled
from dsv4nb.magics.shelf import Shelf
from dsv4nb.session.attachments import Attachment, message_with

RESULT = "_dsv4"  # the variable of the last result

# what makes a conversation; the other options of a cell are of its turn alone
_OF_CHAT = ("system", "tools")


def is_chat(value: object) -> bool:
    """Whether a value is a chat; its class is asked, so that no property of a person's object is run."""
    return hasattr(type(value), "submit") and hasattr(type(value), "turns")


class Asker:
    """Carries out the cells of one notebook.

    Args:
        names: the notebook's variables.
        replaces: whether what is shown can be replaced, as in a notebook's cell.
        streams: whether a reply is shown while it grows if the line does not say.
    """

    def __init__(
        self,
        names: MutableMapping[str, Any],
        shelf: Shelf,
        defaults: Defaults,
        *,
        replaces: Callable[[], bool],
        streams: Callable[[], bool],
    ) -> None:
        self._names = names
        self._shelf = shelf
        self._defaults = defaults
        self._replaces = replaces
        self._streams = streams

    def ask(self, line: str, cell: str) -> None:
        """Ask the text of a cell, show the reply, and keep it.

        Raises:
            UsageError, Dsv4Error: the line or the request is refused; nothing was changed.
            Interrupted: the person did; what there was is kept.
        """
        args = cell_parser().parse(line)
        text = cell.strip()
        if hasattr(args, "fill"):
            text = filled(text, self._names)
        if not text:
            raise PromptEmpty("prompt")
        form = form_of(args, self._names)
        values = [attached(name, self._names) for name in getattr(args, "context", ())]
        ticket = self._start(args, text, form, values)
        is_live = getattr(args, "stream", self._streams())
        screen: Screen = CellScreen(is_live=is_live) if self._replaces() else TerminalScreen(is_live=is_live)
        result, is_interrupted = follow(ticket, screen)
        result = form.parse(result)
        for name in filter(None, (RESULT, getattr(args, "name", None))):
            self._names[name] = result
        if is_interrupted:
            raise Interrupted(f"Stopped. The text so far is in {RESULT}.")
        if isinstance(result, Parsed) and result.problem:
            print(f"{RESULT}.value is None: {result.problem}.")

    def _start(self, args: Namespace, text: str, form: Form, values: Sequence[Attachment]) -> Any:
        """Put the request in the queue; where that is refused nothing was changed."""
        name, line = getattr(args, "chat", None), given(args, CELL)
        chat = None if name is None else self._chat(name)
        if chat is not None and hasattr(args, "model"):
            raise UsageError(f"%%dsv4: {name!r} goes on with its own model; leave out --model.")
        model = self._shelf.find(getattr(args, "model", None)) if chat is None else self._shelf.called(chat.name)
        is_known, is_thinking = chat is not None, chat is not None and chat.thinking
        options = self._defaults.under(line, is_thinking=is_thinking, without=_OF_CHAT if is_known else ())
        options |= form.options
        if chat is None and (name is not None or "tools" in options):
            chat = model.chat(**{key: options.pop(key) for key in _OF_CHAT if key in options})
        costs = [] if model is None else [(one.name, len(model.encode(f"{one.block}\n\n"))) for one in values]
        prompt = message_with(tuple(values), text)
        try:
            ticket = (model if chat is None else chat).submit(prompt, **options)
        except (PromptTooLong, PromptOverCeiling) as refused:
            told = f" Of them, {_told(costs)}." if costs else ""
            raise UsageError(f"%%dsv4: {refused}{told}") from None
        except RequestError as refused:
            said = str(refused).rstrip(".")
            if origin := self._defaults.origin(refused.param, line):
                raise UsageError(f"%%dsv4: {said}. {origin}") from None
            raise
        if name is not None:
            self._names[name] = chat
        if costs:
            print(f"Tokens of the prompt: {_told(costs)}.")
        return ticket

    def _chat(self, name: str) -> Any:
        """Return the chat in a variable, None when there is no variable of this name."""
        held = self._names.get(name)
        if held is not None and not is_chat(held):
            raise UsageError(f"%%dsv4: {name!r} holds no chat; pass --chat with another name.")
        return held


def _told(costs: Sequence[tuple[str, int]]) -> str:
    """Return what variables cost, in words."""
    return ", ".join(f"{name} has {n:,}" for name, n in costs)
