"""The turns of a chat's branch as a widget shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsv4nb.session.tree import Branches
from dsv4nb.stream.transcript import Entry, TurnLike, entry_of


class Chat(Protocol):
    """What is asked of a chat."""

    @property
    def branches(self) -> Branches: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A turn that is over, as it is shown.

    Attributes:
        turn: what the chat remembers; None when it had gone elsewhere before its end was seen.
        siblings: numbers of the turns in its place, its own among them.
    """

    turn: TurnLike | None
    entry: Entry
    number: int = 0
    siblings: tuple[int, ...] = ()

    def jsonable(self) -> dict[str, Any]:
        """Return what a page shows."""
        return self.entry.jsonable() | {"number": self.number, "siblings": list(self.siblings)}


def shown_of(chat: Chat, known: Sequence[Shown] = ()) -> list[Shown]:
    """Return the turns of the chat's branch; what is known of them already is not written again."""
    shown = []
    for i, (node, siblings) in enumerate(chat.branches.path()):
        old = known[i] if i < len(known) and known[i].turn is node.turn else None
        entry = old.entry if old else entry_of(node.turn)
        shown.append(Shown(turn=node.turn, entry=entry, number=node.number, siblings=tuple(siblings)))
    return shown
