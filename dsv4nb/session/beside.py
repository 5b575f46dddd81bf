"""What stands beside the turns of a chat: attachments for the next one, calls that wait, the room that is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from dsv4nb.errors import RequestError
from dsv4nb.events import ToolCall
from dsv4nb.session.attachments import Attachment, attachment_of, message_with, named
from dsv4nb.session.desk import Desk
from dsv4nb.session.gauge import Gauge, Room
from dsv4nb.session.request import Options, toolset
from dsv4nb.session.tree import Tree

_F = TypeVar("_F")


class Beside:
    """Attachments, approvals and room. For a chat, which has the other attributes.

    Args:
        gauge: counts tokens; None where nobody can.
    """

    _tree: Tree

    def __init__(self, gauge: Gauge | None = None) -> None:
        self._gauge = gauge
        self._attached: tuple[Attachment, ...] = ()
        self._on_notice: list[Callable[[], None]] = []
        self._desk = Desk(partial(_tell, self._on_notice))  # not a method: a chat is forgotten without a collection

    @property
    def options(self) -> Options:
        """What the next turns ask for, without attached functions."""
        raise NotImplementedError

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Values that go along with the next message, and functions that the model may call."""
        return self._attached

    def attach(self, value: object, *, name: str | None = None) -> Attachment:
        """Let the next message bring a value along, as it is now, or let the model call a function from then on.

        Text, tables, arrays, dicts and lists stand in the message in a fence, under their name.

        Args:
            value: the object, or the name of a variable of the notebook.
            name: what the value is called, its variable's name when None; with it text is taken as it is. Another
                attachment of that name is replaced.

        Raises:
            RequestError: it has no name, is too large, or is nothing that can be attached; nothing was changed.
        """
        made = attachment_of(*named(value, name))
        others = tuple(one for one in self._attached if one.name != made.name)
        if made.function is None:
            made = replace(made, n_tokens=None if self._gauge is None else self._gauge.count(f"{made.block}\n\n"))
        else:
            before, after = self._with_tools(others), self._with_tools((*others, made))
            toolset(after)
            if self._gauge is not None:
                cost = self._gauge.room((), after).used - self._gauge.room((), before).used
                made = replace(made, n_tokens=cost)
        self._attached = (*others, made)
        self._noticed()
        return made

    def detach(self, name: str) -> None:
        """Take an attachment away.

        Raises:
            RequestError: there is none of that name.
        """
        kept = tuple(one for one in self._attached if one.name != name)
        if len(kept) == len(self._attached):
            has = ", ".join(one.name for one in self._attached) or "none"
            raise RequestError(f"nothing called {name!r} is attached; attached: {has}", param="name")
        self._attached = kept
        self._noticed()

    def room(self, text: str = "") -> Room:
        """Return how much of the room the next prompt takes, with its attachments and this text.

        Raises:
            RequestError: nobody can count this chat's tokens.
        """
        gauge = self._counter()
        room = gauge.room(self._tree.messages, self._with_tools(self._attached))
        return room.plus(gauge.count(message_with(self._attached, text)))

    def count(self, text: str) -> int:
        """Count the tokens of text in a message.

        Raises:
            RequestError: nobody can count this chat's tokens.
        """
        return self._counter().count(text)

    def _counter(self) -> Gauge:
        if self._gauge is None:
            raise RequestError("this chat has no model to count tokens with", param="model")
        return self._gauge

    @property
    def pending(self) -> list[ToolCall]:
        """The calls that wait for `approve` or `deny`, in their order."""
        return self._desk.waiting

    def approve(self, call: str | None = None, arguments: str | Mapping[str, Any] | None = None) -> None:
        """Run a call that waits.

        Args:
            call: its id; the first that waits when None.
            arguments: in place of the model's own: a mapping, or JSON of an object.

        Raises:
            RequestError: that call does not wait, or these are no arguments; it still waits.
        """
        self._desk.decide(call, True if arguments is None else _object(arguments))

    def deny(self, call: str | None = None) -> None:
        """Decline a call that waits; the model is told so.

        Raises:
            RequestError: that call does not wait.
        """
        self._desk.decide(call, False)

    def on_notice(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` whenever `attachments` or `pending` become others, on the thread that changed them.

        Returns:
            A function that ends this.
        """
        return listed(self._on_notice, callback)

    def _noticed(self) -> None:
        _tell(self._on_notice)

    def _with_tools(self, attached: tuple[Attachment, ...]) -> Options:
        """Return the options of the next turns with the attached functions among the tools."""
        options = self.options
        functions = [one.function for one in attached if one.function is not None]
        return replace(options, tools=[*(options.tools or ()), *functions]) if functions else options

    def _sent(self, attached: tuple[Attachment, ...]) -> None:
        """These went along with a message: values do so once."""
        if any(one.function is None for one in attached):
            self._attached = tuple(one for one in self._attached if one.function is not None or one not in attached)
            self._noticed()


def listed(callbacks: list[_F], callback: _F) -> Callable[[], None]:
    """Add a callback, and return what takes it away again."""
    callbacks.append(callback)

    def remove() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return remove


def _tell(callbacks: list[Callable[[], None]]) -> None:
    for callback in tuple(callbacks):
        callback()


def _object(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    value: object = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the arguments are no JSON: {error}", param="arguments") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"the arguments are a {type(value).__name__}; they must be an object", param="arguments")
    return value
