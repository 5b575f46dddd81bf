"""What every panel does: a view, and beside it an output that stays readable when the view is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol

import anywidget
import traitlets

from dsv4nb.stream.frames import Pump, Watch, shared_pump
from dsv4nb.stream.output import Output
from dsv4nb.widgets import protocol
from dsv4nb.widgets.orders import Do, Orders

_VIEW = "application/vnd.jupyter.widget-view+json"
KEPT_OUTPUTS = 8  # outputs whose saved form is refreshed; older ones keep what they show


class Saved(Protocol):
    """A panel as a value that can be read without a kernel."""

    def bundle(self) -> dict[str, str]: ...


class Panel(anywidget.AnyWidget):
    """A panel with a saved form, which carries out commands of its page.

    Args:
        pump: delivers, the kernel's own if None.
        traits: of the widget.

    Attributes:
        from_page: the messages that a page may send.
        saved_class: of the element around the saved form; the style sheet hides it while a view is beside it.
        name: what stands for the view in plain text when there is no title.
    """

    title = traitlets.Unicode("").tag(sync=True)

    from_page: ClassVar[protocol.Messages]
    saved_class: ClassVar[str]
    name: ClassVar[str]

    _unwatch: tuple[Callable[[], None], ...] = ()  # ends what it listens to; a panel that was refused is closed too

    def __init__(self, pump: Pump | None, **traits: Any) -> None:
        super().__init__(**traits)
        self._pump = pump or shared_pump()
        self._outputs: deque[Output] = deque(maxlen=KEPT_OUTPUTS)
        keep_reply_route(self.comm)

    def close(self) -> None:
        """Stop following, and remove all views."""
        self._deaf()
        super().close()

    def _deaf(self) -> None:
        for end in self._unwatch:
            end()
        self._unwatch = ()

    def _obey(self, do: Mapping[str, Do]) -> None:
        """Begin to carry out commands, each once, on the pump's thread; see `Orders`."""
        self._orders = Orders(self.send, do)
        self.on_msg(self._received)

    def _received(self, _widget: object, content: object, _buffers: object) -> None:
        """A message came, maybe on a subshell's thread."""
        command = protocol.parse(content, self.from_page)
        if command is not None:
            self._take(command)

    def _take(self, command: dict[str, Any]) -> None:
        """Leave a command to the pump; on the thread that it came on."""
        self._pump.call(partial(self._orders.obey, command))

    def saved(self) -> Saved:
        """Return what is shown."""
        raise NotImplementedError

    def _refresh_saved(self) -> None:
        for output in self._outputs:
            output.update(self._saved_bundle())

    def _saved_bundle(self) -> dict[str, str]:
        bundle = self.saved().bundle()
        bundle["text/html"] = f'<div class="{self.saved_class}">{bundle["text/html"]}</div>'
        return bundle

    def _repr_mimebundle_(self, **_options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle: dict[str, Any] = dict(self.saved().bundle())
        bundle[_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return bundle, {}

    def _ipython_display_(self) -> None:
        """Show a view, and below it the saved form.

        They are two outputs because updating an output rebuilds every view in it.
        """
        view, _ = self._repr_mimebundle_()
        del view["text/html"]
        view["text/plain"] = self.title or self.name
        Output(view)
        self._outputs.append(Output(self._saved_bundle()))


def finish(watch: Watch | None, pump: Pump, job: Callable[[], None]) -> bool:
    """Tell the rest of a run that has ended, and return True; when it is not yet over, leave `job` for later.

    A chat writes a turn down just before its ticket says so.
    """
    if watch is None:
        return True
    for news in watch.news():
        watch.sink(news)
    if not watch.over:
        pump.call(job)
    return watch.over


def keep_reply_route(comm: object) -> None:
    """Answer a comm where its message came in.

    ipykernel 7.4.0 answers on the subshell of the last publisher, which after a page reload may no longer exist; every
    later click is then lost. Other versions lack the attribute.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
