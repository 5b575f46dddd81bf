"""What a chat asks of whoever runs its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dsv4nb.events import Event, Generation
from dsv4nb.session.continuing import Given
from dsv4nb.session.desk import Desk
from dsv4nb.session.live import Ledger
from dsv4nb.session.log import OnEnd
from dsv4nb.session.request import Options


class Ticket(Protocol):
    """A turn on its way; `dsv4nb.stream.ticket.Ticket` is one."""

    @property
    def state(self) -> str: ...
    @property
    def text(self) -> str: ...
    def poll(self, start: int) -> tuple[list[Event], bool]: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def result(self, timeout: float | None = None) -> Generation: ...
    async def aresult(self) -> Generation: ...
    def cancel(self) -> None: ...


class Start(Protocol):
    """Starts a turn; `on_end` is called before anybody sees that it ended.

    Functions are called on a thread of their own; with `inline` on that of whoever asks the ticket for its result.
    With a desk their calls wait there. The first reply begins with what is given.
    """

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Options,
        on_end: OnEnd,
        *,
        inline: bool,
        ledger: Ledger,
        desk: Desk | None,
        given: Given | None,
    ) -> Ticket: ...
