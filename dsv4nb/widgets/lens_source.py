"""What a lens can be made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from dsv4nb.errors import RequestError
from dsv4nb.events import Generation, TokenLogprob
from dsv4nb.session.tree import Turn
from dsv4nb.stream.frames import Pollable
from dsv4nb.widgets import following
from dsv4nb.widgets.lens_reply import Reply, Texts, reply_of_result, reply_of_turn


class Model(Texts, Protocol):
    """What the lens asks of a model; `dsv4nb.handle.Model` is one."""

    def score(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        n: int = 5,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[TokenLogprob, ...]: ...


@runtime_checkable
class Chat(following.Chat, Protocol):
    """What the lens asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    forks: list[Any]

    @property
    def model(self) -> Any: ...
    @property
    def turns(self) -> Sequence[Turn]: ...
    def fork(self) -> Any: ...
    def submit_from(self, turn: int, token: int, alternative: int | None = None, **options: Any) -> Any: ...
    def score(
        self, turn: int = -1, n: int = 5, *, should_stop: Callable[[], bool] | None = None
    ) -> tuple[TokenLogprob, ...]: ...


def parts_of(source: object) -> tuple[Chat | None, Reply, Pollable | None]:
    """Return the chat of a source, the reply that it shows first, and the run that it follows.

    Raises:
        RequestError: it is no source.
    """
    match source:
        case Generation():
            return None, reply_of_result(source), None
        case Chat():
            turns = source.turns
            return source, reply_of_turn(turns[-1]) if turns else Reply(), None
        case _ if callable(getattr(source, "poll", None)):
            return None, Reply(is_live=True), source  # type: ignore[return-value]
    what = "a chat, a ticket or a generation"
    raise RequestError(f"source is a {type(source).__name__}; it must be {what}", param="source")
