"""Another answer, another message, another place to go on from: the part of a chat that makes and changes branches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.events import Generation
from dsv4nb.session.starting import Ticket
from dsv4nb.session.tree import Node, Tree, Turn


class Branching:
    """For a chat, which sets the attributes and starts turns."""

    _tree: Tree
    _lock: threading.Lock
    _is_busy: bool

    def regenerate(self, **options: Any) -> Generation:
        """Answer the last message again, as a new branch, and wait; what was computed for the prompt is used again.

        Raises:
            RequestError: there is no turn yet.
            Dsv4Error: as `send`.
        """
        return self.edit(-1, None, **options)

    def edit(self, i: int, text: str | None, **options: Any) -> Generation:
        """Send another text in place of turn `i` of this branch, as a new branch, and wait for the answer.

        Args:
            i: index of the turn, as in `turns`; negative counts from the end.
            text: None sends the same again.

        Raises:
            RequestError: there is no such turn, or it has no text of its own.
            Dsv4Error: as `send`.
        """
        return self._edit(i, text, options, inline=True).result()

    def submit_edit(self, i: int, text: str | None = None, **options: Any) -> Ticket:
        """Start what `edit` does, or `regenerate` for the last turn without text, and return at once."""
        return self._edit(i, text, options, inline=False)

    def _edit(self, i: int, text: str | None, options: Mapping[str, Any], *, inline: bool) -> Ticket:
        node = self._tree.nth(i)
        if text is None and not node.turn.user:
            raise RequestError("this turn answered calls and has no text; edit the turn before it", param="turn")
        return self._submit(node.turn.user if text is None else text, options, inline=inline, after=node.parent)

    def rewind(self, turn: int | None = None, *, round: int | None = None) -> None:
        """Go back; what is left behind stays in `branches`.

        Args:
            turn: the next message follows the first `turn` turns of this branch; all of them when None.
            round: of the last turn that is kept, counted from 0: it is kept as if it had been stopped before this
                round of speculation, as a new branch.

        Raises:
            ChatBusy: a turn is still running.
            RequestError: there are not that many turns or rounds, or the turn made calls.
        """
        if turn is None and round is None:
            raise RequestError("pass turn=, round= or both", param="turn")
        node = self._last_of(turn)
        if round is None:
            self._go_to(node)
            return
        if node is None:
            raise RequestError(f"round is {round!r}; there is no turn that it could be of", param="round")
        turn_before = node.turn.before(round)
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._tree.head = node.parent
            self._tree.add(turn_before, [*node.messages[:-1], _cut(node.messages[-1], turn_before)])
        self._changed()

    def switch(self, turn: int, *, where_left: bool = False) -> None:
        """Go on from the turn with this number in `branches`, on whatever branch.

        Args:
            where_left: go on along the turns behind it to where they were left last.

        Raises:
            ChatBusy: a turn is still running.
            RequestError: there is no such turn.
        """
        node = self._tree.node(turn)
        self._go_to(self._tree.left_at(node) if where_left else node)

    def _go_to(self, node: Node | None) -> None:
        with self._lock:
            if self._is_busy:
                raise ChatBusy
            self._tree.head = node
        self._changed()

    def _last_of(self, turn: int | None) -> Node | None:
        """Return the last of the first `turn` turns of this branch, of all when None; None before the first turn."""
        path = self._tree.path
        kept = len(path) if turn is None else turn
        if isinstance(kept, bool) or not isinstance(kept, int) or not 0 <= kept <= len(path):
            raise RequestError(f"turn is {turn!r}; this branch has {len(path)} turns to keep, or 0", param="turn")
        return path[kept - 1] if kept else None

    def _submit(self, text: str, options: Mapping[str, Any], *, inline: bool, after: Node | None) -> Ticket:
        """Start a turn behind another one."""
        raise NotImplementedError

    def _changed(self) -> None:
        """The chat's turns are others."""
        raise NotImplementedError


def _cut(message: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return a reply with the text that is left of it."""
    cut = {name: value for name, value in message.items() if name != "reasoning_content"}
    cut["content"] = turn.text
    if turn.reasoning:
        cut["reasoning_content"] = turn.reasoning
    return cut
