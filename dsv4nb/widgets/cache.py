"""The caches of a model as a person sees them: what is committed, why a prefix was reused or not, what is kept, what it
takes, and what a token read of it.

Small facts are a trait. Texts and arrays are pulled for what is on the screen, by messages with an id and binary
buffers. Comm handlers only leave a job to the pump; what waits for the engine runs on a thread of the panel's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import traitlets

from dsv4nb.errors import ModelClosed, RequestError
from dsv4nb.session.live import Ledger
from dsv4nb.stream.frames import Pump
from dsv4nb.widgets import protocol
from dsv4nb.widgets.cache_facts import Chat, Model, Strip, facts_of, page_of
from dsv4nb.widgets.cache_inside import Answer, Errands, Inside
from dsv4nb.widgets.cache_saved import SavedCache
from dsv4nb.widgets.panel import Panel

_STATIC = Path(__file__).parent / "static"

MOST_TEXT = 4096  # tokens whose texts travel in one message


class CachePanel(Panel):
    """Shows the caches of a model in any number of views.

    Args:
        model: whose caches.
        chat: whose committed ids are shown; those of the anchors alone when None.
        title: stands above them.
        pump: delivers, the kernel's own if None.

    Raises:
        RequestError: `model` is no model, or `chat` no chat.
    """

    _esm = _STATIC / "cache.js"
    _css = _STATIC / "cache.css"

    state = traitlets.Dict().tag(sync=True)

    from_page = protocol.CACHE_FROM_PAGE
    saved_class, name = "dsv4-cache-saved", "Caches"

    def __init__(
        self, model: Model, chat: Chat | None = None, *, title: str = "Caches", pump: Pump | None = None
    ) -> None:
        for name, value, method in (("model", model, "on_queue_change"), ("chat", chat, "on_change")):
            if value is not None and not callable(getattr(value, method, None)):
                raise RequestError(f"{name} is a {type(value).__name__}; it must be a {name}", param=name)
        self._model, self._chat, self._shown = model, chat, ""
        self._facts = facts_of(model, self._ledger())
        super().__init__(pump, title=title, state=self._page())
        self._is_due = False
        self._errands, self._inside = Errands("dsv4nb-cache-panel"), Inside(model)
        self._obey(
            {
                "choose": self._do_choose,
                "text": self._do_text,
                "reads": partial(self._do_look, self._reads),
                "experts": partial(self._do_look, self._experts),
                "pin": partial(self._do_change, self._pin),
                "delete": partial(self._do_change, self._delete),
                "move": partial(self._do_change, self._move),
            }
        )
        self._unwatch = (model.on_queue_change(self._changed),)
        if chat is not None:
            self._unwatch += (chat.on_change(self._changed),)

    def refresh(self) -> None:
        """Look at the caches again; the panel does by itself when a request comes or ends."""
        self._changed()

    def saved(self) -> SavedCache:
        """Return what is shown."""
        return SavedCache(title=self.title, model=self._model.name, facts=self._facts, shown=self._shown)

    # on any thread

    def _changed(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._pump.call(self._refresh)

    # on the pump's thread

    def _refresh(self) -> None:
        self._is_due = False
        if self.comm is None:
            return
        self._facts = facts_of(self._model, self._ledger())
        page = self._page()
        if page != self.state:
            self.state = page
            self._refresh_saved()

    def _ledger(self) -> Ledger | None:
        return None if self._chat is None else self._chat.ledger

    def _page(self) -> dict[str, Any]:
        page = page_of(self._facts, self._model.decode, self._shown)
        is_busy = self._chat is not None and self._chat.is_busy
        return page | {"model": self._model.name, "busy": is_busy, "closed": self._model.is_closed}

    def _strip(self, key: str) -> Strip:
        for strip in self._facts.strips:
            if strip.key == key:
                return strip
        raise RequestError("these tokens are no longer in the caches; the panel shows those that are", param="key")

    def _do_choose(self, command: dict[str, Any]) -> None:
        self._shown = self._strip(command["key"]).key
        self._refresh()

    def _do_text(self, command: dict[str, Any]) -> None:
        strip, first, last = self._strip(command["key"]), command["first"], command["last"]
        if not 0 <= first < last <= len(strip.ids) or last - first > MOST_TEXT:
            raise RequestError(f"tokens {first} to {last - 1} of {len(strip.ids)} cannot be had", param="first")
        pieces = [self._model.decode([token]) for token in strip.ids[first:last]]
        self._tell("text", id=command["id"], key=strip.key, first=first, pieces=pieces)

    def _do_look(self, look: Callable[[Strip, dict[str, Any]], Answer], command: dict[str, Any]) -> bool:
        """Answer when the engine had time to."""
        strip = self._strip(command["key"])
        self._errands.run(partial(self._attempt, command, lambda: look(strip, command)))
        return False

    def _reads(self, strip: Strip, command: dict[str, Any]) -> Answer:
        return self._inside.reads(strip, command["token"], command["layer"])

    def _experts(self, strip: Strip, command: dict[str, Any]) -> Answer:
        return self._inside.experts(strip, command["first"], command["last"])

    def _do_change(self, change: Callable[[dict[str, Any]], None], command: dict[str, Any]) -> bool:
        self._errands.run(partial(self._attempt, command, lambda: change(command)))
        return False

    def _pin(self, command: dict[str, Any]) -> None:
        cache = self._model.cache
        (cache.pin_anchor if command["store"] == "anchor" else cache.pin)(command["entry"], command["value"])

    def _delete(self, command: dict[str, Any]) -> None:
        cache = self._model.cache
        (cache.delete_anchor if command["store"] == "anchor" else cache.delete)(command["entry"])

    def _move(self, command: dict[str, Any]) -> None:
        """Copy an anchor to host memory, or a prefix from there to the device."""
        cache = self._model.cache
        (cache.store if command["store"] == "anchor" else cache.restore)(command["entry"])

    # on the panel's own thread

    def _attempt(self, command: dict[str, Any], job: Callable[[], Answer | None]) -> None:
        answer: Answer | None = None
        error: Exception | None = None
        try:
            if self._model.is_closed:
                raise ModelClosed(self._model.name)
            answer = job()
        except Exception as failed:  # whatever it is, the command has an answer
            error = failed
        self._pump.call(partial(self._answer, command, answer, error))

    # on the pump's thread

    def _answer(self, command: dict[str, Any], answer: Answer | None, error: Exception | None) -> None:
        if self.comm is None:
            return
        if answer is not None:
            fields = {name: command[name] for name in protocol.CACHE_FROM_KERNEL[command["kind"]] if name in command}
            fields.pop("kind", None)
            buffers = [array.tobytes() for array in answer.buffers]
            self._tell(command["kind"], buffers, **fields, told=answer.facts)
        elif error is None:
            self._refresh()
        self._orders.answer(command["id"], error or "")

    def _tell(self, kind: str, buffers: list[bytes] | None = None, **fields: Any) -> None:
        self.send(protocol.message(kind, declared=protocol.CACHE_FROM_KERNEL, **fields), buffers)
