"""How the next tokens are chosen, as controls: what is set here holds for the next message, and is refused here.

Comm handlers may run on a subshell's thread, so they only leave a job to the pump; everything that the page is told
comes from the pump's thread. The values are one small trait, so that any number of views agree.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import traitlets

from dsv4nb.errors import Dsv4Error, RequestError
from dsv4nb.events import Done
from dsv4nb.session.request import Limits, Options
from dsv4nb.stream.frames import Ended, News, Pollable, Pump, Watch
from dsv4nb.widgets import protocol
from dsv4nb.widgets.panel import Panel
from dsv4nb.widgets.sampler_controls import (
    GROUPS,
    PRESETS,
    Control,
    code,
    controls,
    current_preset,
    defaults,
    given,
    notes,
    preset,
)
from dsv4nb.widgets.sampler_saved import SavedSampler, rows_of
from dsv4nb.widgets.ticks import Ticks

_STATIC = Path(__file__).parent / "static"

SAVE_S = 1.0  # after a change, so that a slider that moves does not write the saved form at every step

_RESET: dict[str, Any] = {"thinking": False, "stop": ()}  # everything else is None


class Settable(Protocol):
    """What the panel asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    @property
    def limits(self) -> Limits | None: ...
    @property
    def options(self) -> Options: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def ticket(self) -> Any: ...
    def set(self, **options: Any) -> None: ...
    def check(self, **options: Any) -> Options: ...
    def on_submit(self, callback: Callable[[str, Any], None]) -> Callable[[], None]: ...
    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]: ...


@runtime_checkable
class Model(Protocol):
    """What the panel asks of a model."""

    @property
    def limits(self) -> Limits: ...
    def prepare(self, prompt: str | None = None, **options: Any) -> Any: ...
    def generate(self, prompt: str | None = None, **options: Any) -> Any: ...


class Held:
    """Options of a model's requests, which a model itself does not keep."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.limits = model.limits
        self.options = Options()
        self.is_busy, self.ticket = False, None
        self._callbacks: list[Callable[[], None]] = []

    def set(self, **options: Any) -> None:
        """Change options; see `Chat.set`."""
        self.options = self.check(**options)
        for callback in tuple(self._callbacks):
            callback()

    def check(self, **options: Any) -> Options:
        """Return what the options would be; see `Chat.check`."""
        chosen = replace(self.options, **options)
        asked = given(chosen, self.limits) | {
            name: value for name, value in options.items() if value is not None and value != _RESET.get(name)
        }
        self._model.prepare("?", **asked)
        return chosen

    def on_submit(self, callback: Callable[[str, Any], None]) -> Callable[[], None]:
        """Requests of a model are nobody's turns."""
        return lambda: None

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after `set`."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)


class SamplerPanel(Panel):
    """Sets what the next messages ask for, in any number of views.

    A value is checked as a request checks it before it is set; what is refused changes nothing. A reply that is
    running keeps what it began with.

    Args:
        source: a chat, whose `options` follow the panel and the other way round; or a model, whose requests then take
            `**panel.options`.
        title: stands above the controls.
        pump: delivers, the kernel's own if None.

    Raises:
        RequestError: `source` is neither.
    """

    _esm = _STATIC / "sampler.js"
    _css = _STATIC / "sampler.css"

    controls: Any = traitlets.List().tag(sync=True)  # what there is to set
    presets = traitlets.Dict().tag(sync=True)
    groups = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)  # what is set

    from_page = protocol.SAMPLER_FROM_PAGE
    saved_class, name = "dsv4-sampler-saved", "Sampling"

    def __init__(self, source: Settable | Model, *, title: str = "Sampling", pump: Pump | None = None) -> None:
        self._source, self._call = _source(source)
        assert self._source.limits is not None
        self._limits = self._source.limits
        self._controls: list[Control] = controls(self._limits)
        self._seed: int | None = None  # of the last reply
        self._watch: Watch | None = None
        self._is_saving = False
        super().__init__(
            pump,
            title=title,
            controls=[control.jsonable() for control in self._controls],
            presets={name: label for name, (label, _) in PRESETS.items()},
            groups=dict(GROUPS),
            state=self._told(),
        )
        self._obey({"set": self._do_set, "preset": self._do_preset, "reset": self._do_reset, "lock": self._do_lock})
        self._unwatch = self._source.on_submit(self._submitted), self._source.on_set(self._changed)
        if self._source.is_busy and self._source.ticket is not None:
            self._pump.call(partial(self._begin, self._source.ticket))

    @property
    def options(self) -> dict[str, Any]:
        """What is set to something else than the model's default: `model.generate(prompt, **panel.options)`."""
        return given(self._source.options, self._limits)

    # on any thread

    def _submitted(self, _user: str, ticket: Pollable) -> None:
        """The chat started a turn, on whatever thread asked for it."""
        self._pump.call(partial(self._begin, ticket))

    def _changed(self) -> None:
        """The options became others, on whatever thread changed them."""
        self._pump.call(self._refresh)

    # everything below runs on the pump's thread

    def _begin(self, ticket: Pollable) -> None:
        if self.comm is None:
            return
        self._watch = Watch(0, ticket, partial(self._heard, ticket))
        self._pump.watch(self._watch)
        self._refresh()

    def _heard(self, ticket: Pollable, news: News) -> None:
        """The seed is known when the turn is over; the news that ended it comes last."""
        if not isinstance(news, Ended):
            return
        done = ticket.poll(0)[0][-1]
        if isinstance(done, Done):
            self._seed = done.config.seed
        if self._watch is not None and self._watch.ticket is ticket:
            self._watch = None
        self._refresh()

    def _refresh(self) -> None:
        if self.comm is None:
            return
        told = self._told()
        if told == self.state:
            return
        self.state = told
        if not self._is_saving:
            self._is_saving = True
            self._pump.watch(Ticks(SAVE_S, self._save))

    def _save(self) -> bool:
        self._is_saving = False
        self._refresh_saved()
        return False

    def _do_set(self, command: dict[str, Any]) -> None:
        asked = command["changes"]
        try:
            self._source.set(**{str(name): self._value(str(name), value) for name, value in asked.items()})
        except Dsv4Error as error:
            name = str(next(iter(asked), ""))
            self.send(
                protocol.message(
                    "refused", declared=protocol.SAMPLER_FROM_KERNEL, id=command["id"], name=name, error=str(error)
                )
            )
            raise
        self._refresh()

    def _do_preset(self, command: dict[str, Any]) -> None:
        if command["name"] not in PRESETS:
            raise RequestError(f"there is no preset {command['name']!r}; there are {', '.join(PRESETS)}", param="name")
        values = preset(command["name"])
        self._source.set(**{name: self._value(name, value) for name, value in values.items()})
        self._refresh()

    def _do_reset(self, command: dict[str, Any]) -> None:
        names = [control.name for control in self._controls if control.name in command["names"] or not command["names"]]
        self._source.set(**{name: _RESET.get(name) for name in names})
        self._refresh()

    def _do_lock(self, command: dict[str, Any]) -> None:
        seed = None
        if command["value"]:
            seed = secrets.randbits(32) if self._seed is None else self._seed
        self._source.set(seed=seed)
        self._refresh()

    def _value(self, name: str, value: Any) -> Any:
        """Return a value of the page as an option; what is the default anyway is not asked for."""
        if name not in {control.name for control in self._controls}:
            raise RequestError(f"the panel has no control {name!r}", param=name)
        if name == "seed" and isinstance(value, str) and value.strip().isdecimal():
            value = int(value)  # travels as text: a page's numbers end at 2**53
        if isinstance(value, list):
            value = tuple(value)
        if name == "stop":
            return value or ()
        return _RESET.get(name) if value == "" or value == defaults(self._limits)[name] else value

    # what the page is told

    def _told(self) -> dict[str, Any]:
        chosen = given(self._source.options, self._limits)
        usual = defaults(self._limits)
        return {
            "values": {name: _sent(name, value) for name, value in (usual | chosen).items()},
            "changed": sorted(chosen),
            "preset": current_preset(chosen, self._limits),
            "blocked": self._blocked(),
            "notes": notes(chosen, self._limits),
            "code": [code(call, chosen) for call in self._call],
            "seed": "" if self._seed is None else str(self._seed),
            "busy": self._watch is not None,
        }

    def _blocked(self) -> dict[str, dict[str, str]]:
        """Return what would be refused as things stand: control -> choice -> the refusal."""
        tried: dict[str, list[Any]] = {
            control.name: [value for value, _ in control.choices if value] for control in self._controls
        }
        tried |= {"thinking": [True], "spec": [True], "spec_depth": [1]}
        now = self._source.options
        found: dict[str, dict[str, str]] = {}
        for name, values in tried.items():
            for value in values:
                if getattr(now, name) != value and (refusal := self._refusal({name: value})):
                    found.setdefault(name, {})[str(value).lower()] = refusal
        return found

    def _refusal(self, changes: Mapping[str, Any]) -> str:
        try:
            self._source.check(**changes)
        except Dsv4Error as error:
            return str(error)
        return ""

    def saved(self) -> SavedSampler:
        """Return what is set, as a value that can be read without a kernel."""
        chosen = given(self._source.options, self._limits)
        return SavedSampler(
            title=self.title,
            rows=rows_of(self._controls, chosen, defaults(self._limits)),
            code=code(self._call[0], chosen),
        )


def _source(source: object) -> tuple[Settable, tuple[str, ...]]:
    """Return what holds the options, and the calls that take them."""
    if isinstance(source, Model):
        return Held(source), ("m.generate(prompt",)
    if isinstance(getattr(source, "limits", None), Limits) and callable(getattr(source, "check", None)):
        return source, ("chat.set(", "m.generate(prompt")  # type: ignore[return-value]
    raise RequestError(f"source is a {type(source).__name__}; it must be a chat or a model", param="source")


def _sent(name: str, value: Any) -> Any:
    """Return a value as it travels."""
    if name == "seed" and value is not None:
        return str(value)
    return list(value) if isinstance(value, tuple) else value
