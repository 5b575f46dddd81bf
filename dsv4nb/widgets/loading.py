"""A load as a person sees it in a notebook: how far it is, a way to stop it, and the card of what was loaded.

The cell that loads blocks the main thread, so the panel is fed by the pump and Cancel is noted where its message comes
in; where that is the blocked thread itself, the page interrupts the kernel.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import traitlets

from dsv4nb.errors import RequestError
from dsv4nb.stream.frames import Pump
from dsv4nb.stream.loading import PHASES, Figures, Loading
from dsv4nb.widgets import protocol
from dsv4nb.widgets.loading_saved import SavedLoad
from dsv4nb.widgets.panel import Panel
from dsv4nb.widgets.ticks import Ticks

_STATIC = Path(__file__).parent / "static"

PERIOD_S = 0.25


class Card(Protocol):
    """Facts of a model; `LoadInfo` is one."""

    @property
    def name(self) -> str: ...
    @property
    def load_s(self) -> float: ...
    def rows(self) -> list[tuple[str, str]]: ...


class LoadPanel(Panel):
    """Shows loads in any number of views, one after the other: `dsv4nb.load(path, progress=panel)`.

    Args:
        model: one that is loaded, whose card is shown; None waits for a load.
        title: stands above; says what is loaded when "".
        is_brief: fold the card, where the model is going to be shown beside it.
        pump: delivers, the kernel's own if None.

    Raises:
        RequestError: `model` is none.
    """

    _esm = _STATIC / "load.js"
    _css = _STATIC / "load.css"

    state = traitlets.Dict().tag(sync=True)

    from_page = protocol.LOAD_FROM_PAGE
    saved_class, name = "dsv4-load-saved", "Load"

    def __init__(self, model: Any = None, *, title: str = "", is_brief: bool = False, pump: Pump | None = None) -> None:
        info = None if model is None else getattr(model, "info", None)
        if model is not None and not callable(getattr(info, "rows", None)):
            raise RequestError(f"model is a {type(model).__name__}; it must be a model", param="model")
        self._info: Card | None = info
        self._is_brief = is_brief
        self._loading: Loading | None = None
        self._is_main = False
        self._lock = threading.Lock()
        super().__init__(pump, title=title, state=self._told())
        self._obey({"cancel": self._do_cancel})

    def follow(self, loading: Loading) -> None:
        """Show a load; called on its thread after each step, which costs it next to nothing."""
        if self._loading is not loading:
            with self._lock:
                self._loading, self._info = loading, None
                self._is_main = threading.current_thread() is threading.main_thread()
            self._pump.call(partial(self._begin, loading))
        elif loading.is_over:
            self._pump.call(self._end)

    def _take(self, command: dict[str, Any]) -> None:
        """The load must not wait for the pump."""
        loading = self._loading
        if loading is not None:
            loading.cancel()
        super()._take(command)

    # everything below runs on the pump's thread

    def _begin(self, loading: Loading) -> None:
        if self._refresh():
            self._pump.watch(Ticks(PERIOD_S, self._refresh))

    def _end(self) -> None:
        self._refresh()

    def _refresh(self) -> bool:
        """Tell how things stand; return whether the load goes on."""
        if self.comm is None:
            return False
        loading = self._loading
        is_over = loading is None or loading.is_over  # before the figures are read
        told = self._told()
        if told != self.state:
            self.state = told
            if is_over:
                self._refresh_saved()
        return not is_over

    def _do_cancel(self, command: dict[str, Any]) -> None:
        if self._loading is None or (self._loading.is_over and self._loading.info is not None):
            raise RequestError("nothing is being loaded; m.close() frees a model", param="load")
        self._refresh()

    def _told(self) -> dict[str, Any]:
        loading, info = self._loading, self._info
        if loading is None:
            return _card(info, is_brief=self._is_brief) if info is not None else _blank("waiting")
        told = loading.figures()
        if told.state == "loaded":
            return _card(loading.info, is_brief=self._is_brief) | {"elapsed": round(told.elapsed_s, 2)}
        return _going(told) | {"path": loading.path, "interrupts": self._is_main}

    def saved(self) -> SavedLoad:
        """Return what is shown, as a value that can be read without a kernel."""
        return SavedLoad(title=self.title, state=dict(self._told()))


def _blank(state: str) -> dict[str, Any]:
    return {
        **{"state": state, "name": "", "path": "", "phase": "", "done": 0, "total": 0, "rate": None, "eta": None},
        **{"elapsed": 0.0, "shard": "", "n_shard": 0, "n_shards": 0, "placed": [], "error": "", "facts": []},
        **{"brief": False, "interrupts": False},
    }


def _card(info: Card, *, is_brief: bool) -> dict[str, Any]:
    facts = [list(row) for row in info.rows()]
    return _blank("loaded") | {"name": info.name, "facts": facts, "elapsed": round(info.load_s, 2), "brief": is_brief}


def _going(told: Figures) -> dict[str, Any]:
    step = told.step
    return _blank(told.state) | {
        "name": told.name,
        "phase": PHASES[step.phase],
        "done": step.done_bytes,
        "total": step.total_bytes,
        "rate": None if told.rate is None else round(told.rate),
        "eta": None if told.eta_s is None else round(told.eta_s, 1),
        "elapsed": round(told.elapsed_s, 1),
        "shard": step.shard,
        "n_shard": step.n_shard,
        "n_shards": step.n_shards,
        "placed": [list(one) for one in step.placed],
        "error": told.error,
    }
