"""The queue of a model as a person sees it: who waits, how far who runs has come, who was here.

Nothing is asked while the queue is empty: the model tells when a request comes or ends, and in between, as long as
one is there, the pump looks four times a second. Comm handlers only leave a job to the pump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import traitlets

from dsv4nb.errors import RequestError
from dsv4nb.session.waiting import Past, Waiting
from dsv4nb.stream.frames import Pump
from dsv4nb.widgets import protocol
from dsv4nb.widgets.panel import Panel
from dsv4nb.widgets.queue_saved import SavedQueue
from dsv4nb.widgets.ticks import Ticks

_STATIC = Path(__file__).parent / "static"

PERIOD_S = 0.25
LISTED = 100  # requests that wait, the next ones; the others are counted
LISTED_PAST = 20


class Model(Protocol):
    """What the panel asks of a model; `dsv4nb.handle.Model` is one."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def past(self) -> Sequence[Past]: ...
    def queue_head(self, most: int) -> tuple[Sequence[Waiting], int]: ...
    def cancel(self, id: int) -> None: ...
    def on_queue_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class QueuePanel(Panel):
    """Shows the requests of a model in any number of views, and cancels them.

    Args:
        model: whose requests, those of all its handles, chats and batches.
        title: stands above them.
        pump: delivers, the kernel's own if None.

    Raises:
        RequestError: `model` is none.
    """

    _esm = _STATIC / "queue.js"
    _css = _STATIC / "queue.css"

    state = traitlets.Dict().tag(sync=True)

    from_page = protocol.QUEUE_FROM_PAGE
    saved_class, name = "dsv4-queue-saved", "Queue"

    def __init__(self, model: Model, *, title: str = "Queue", pump: Pump | None = None) -> None:
        if not callable(getattr(model, "on_queue_change", None)):
            raise RequestError(f"model is a {type(model).__name__}; it must be a model", param="model")
        self._model = model
        super().__init__(pump, title=title, state=self._told())
        self._ticks: Ticks | None = None
        self._obey({"cancel": self._do_cancel})
        self._unwatch = (model.on_queue_change(self._changed),)
        self._changed()

    def _changed(self) -> None:
        """A request came or ended, on whatever thread it did."""
        self._pump.call(self._follow)

    # everything below runs on the pump's thread

    def _follow(self) -> None:
        if self._ticks is None:
            self._refresh()
            # also when nothing is left: requests that come and go at once are told of together
            self._ticks = Ticks(PERIOD_S, self._tick)
            self._pump.watch(self._ticks)

    def _tick(self) -> bool:
        if self._refresh():
            return True
        self._ticks = None
        return False

    def _refresh(self) -> bool:
        """Tell how things stand; return whether there is anything to look at again."""
        if self.comm is None:
            return False
        before, self.state = self.state, self._told()
        if self.state["past"] != before["past"] or self.state["closed"] != before["closed"]:
            self._refresh_saved()
        return bool(self.state["waiting"])

    def _do_cancel(self, command: dict[str, Any]) -> None:
        self._model.cancel(command["request"])
        self._refresh()

    def _told(self) -> dict[str, Any]:
        waiting, count = self._model.queue_head(LISTED)
        return {
            "waiting": [_waiting(one) for one in waiting],
            "more": max(0, count - len(waiting)),
            "past": [_past(one) for one in self._model.past[:LISTED_PAST]],
            "closed": self._model.is_closed,
        }

    def saved(self) -> SavedQueue:
        """Return what is shown, as a value that can be read without a kernel."""
        waiting, count = self._model.queue_head(LISTED)
        return SavedQueue(
            title=self.title,
            waiting=tuple(waiting),
            more=max(0, count - len(waiting)),
            past=tuple(self._model.past[:LISTED_PAST]),
        )


def _waiting(one: Waiting) -> dict[str, Any]:
    return {
        "id": one.id,
        "state": one.state,
        "about": one.about,
        "n_prompt": one.n_prompt,
        "n_read": one.n_read,
        "n_tokens": one.n_tokens,
        "waited_s": round(one.waited_s, 1),
        "rate": None if one.tokens_per_s is None else round(one.tokens_per_s, 1),
    }


def _past(one: Past) -> dict[str, Any]:
    return {
        "id": one.id,
        "state": one.state,
        "about": one.about,
        "n_prompt": one.n_prompt,
        "n_cached": one.n_cached,
        "n_tokens": one.n_tokens,
        "queue_s": round(one.queue_s, 3),
        "run_s": round(one.run_s, 3),
        "rate": None if one.tokens_per_s is None else round(one.tokens_per_s, 1),
        "outcome": one.outcome,
    }
