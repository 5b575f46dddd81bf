"""Chats of a model: new ones and saved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dsv4nb.encoding.policy import normalize
from dsv4nb.errors import RequestError
from dsv4nb.handle.base import Handle
from dsv4nb.session.chat import Chat
from dsv4nb.session.gauge import Gauge
from dsv4nb.session.loop import MAX_ROUNDS, Approve
from dsv4nb.session.request import (
    Options,
    Tool,
    check_options,
    override,
    toolset,
)
from dsv4nb.session.saving import read_chat, save_chat
from dsv4nb.stream.turns import Turns


class Chatting(Handle):
    """Starts conversations."""

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
