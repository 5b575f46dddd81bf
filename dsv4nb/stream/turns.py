"""Starts the turns of a chat: a run, or a loop of runs with calls of functions between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4nb.session.continuing import Given, continued
from dsv4nb.session.desk import Desk
from dsv4nb.session.journal import Journal
from dsv4nb.session.live import Ledger
from dsv4nb.session.log import OnEnd
from dsv4nb.session.loop import MAX_ROUNDS, Approve, Loop, Rules
from dsv4nb.session.request import ChatTokens, Limits, Options, prepare, toolset
from dsv4nb.session.server import Server
from dsv4nb.stream.ticket import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Starts turns of one chat after the other.

    Attributes:
        owner: kept alive as long as a ticket is; `name` is its name, for threads.
        require: called first; it raises when no turn can be taken.
        approve, max_rounds: as of `Rules`; a desk goes before `approve`.
    """

    owner: object
    name: str
    require: Callable[[], None]
    server: Server
    tokens: ChatTokens
    limits: Limits
    approve: Approve | None = None
    max_rounds: int = MAX_ROUNDS

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Options,
        on_end: OnEnd,
        *,
        inline: bool,
        ledger: Ledger,
        desk: Desk | None = None,
        given: Given | None = None,
    ) -> Ticket:
        """Start a turn, with calls when there are functions to call; its first reply may begin with given ids.

        Raises:
            Dsv4Error: the turn is refused; nothing was run.
        """
        self.require()
        server, tools = self.server, toolset(options)
        opening = [given] if given else []

        def start(conversation: Sequence[Mapping[str, Any]], on_end: OnEnd | None = None) -> Journal:
            request = prepare(None, conversation, None, options, self.tokens, self.limits)
            if opening:
                request = continued(request, opening.pop())
            # another id in the place of the last one given then costs one row
            keep_at = [len(request.prompt) + len(request.given) - 1] if request.given else ()
            return server.submit(request, on_end, may_reuse=True, ledger=ledger, keep_at=keep_at)

        if not tools.functions or options.tool_choice == "none":
            journal = start(messages, on_end)
            return Ticket(journal, owner=self.owner, place=lambda: server.place(journal))

        def go_on(conversation: Sequence[Mapping[str, Any]]) -> Journal:
            # what the conversation has in front, the options put there
            return start([message for message in conversation if message["role"] != "system"])

        rules = Rules(toolset=tools, approve=desk or self.approve, max_rounds=self.max_rounds)
        loop = Loop(go_on, messages, rules, on_end)
        if not inline:
            threading.Thread(target=loop.drive, name=f"dsv4nb-tools-{self.name}", daemon=True).start()
        return Ticket(loop, owner=self.owner)
