"""What a load shows while it goes on: a panel in a notebook, one line in a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from dsv4nb.errors import RequestError
from dsv4nb.info import size
from dsv4nb.stream.loading import PHASES, Figures, Loading

logger = logging.getLogger(__name__)

GONE_S = LEFT_S = 0.5  # of reading over and to come before anything is shown: no flash in front of a quick load
LINE_S = 0.1  # between two states of the line
WIDTH = 24  # of the bar


class Screen(Protocol):
    """Shows a load that goes on."""

    def show(self, loading: Loading) -> None:
        """Show how it stands; called on the loading thread, after each step and at the end."""


@contextlib.contextmanager
def shown(name: str, path: str, progress: object) -> Iterator[Loading]:
    """Show a load inside the block, and tell its screen how it ends.

    Args:
        progress: None shows a load that takes long, True any, False none; or a `LoadPanel`, or a function of each
            `LoadStep`, which may raise to stop the load.

    Raises:
        RequestError: `progress` is none of these.
    """
    loading = Loading(name, path, _listener(progress))
    try:
        yield loading
    except BaseException as error:
        # a notebook keeps the last traceback, and its frames would keep the weights read so far
        traceback.clear_frames(error.__traceback__)
        loading.fail(error)
        raise


def _listener(progress: object) -> Callable[[Loading], None]:
    if progress is False:
        return lambda loading: None
    if progress is None or progress is True:
        return _Opener(at_once=progress is True)
    if callable(getattr(progress, "follow", None)):
        return lambda loading: progress.follow(loading)  # type: ignore[attr-defined]
    if callable(progress):
        call = progress
        return lambda loading: None if loading.is_over else call(loading.step)
    what = "None, True, False, a LoadPanel or a function"
    raise RequestError(f"progress is {progress!r}; it must be {what}", param="progress")


class _Opener:
    """Opens a screen when a load takes long, or at once."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._screen: Screen | None = None
        self._first: float | None = None  # seconds from the start to the first tensor

    def __call__(self, loading: Loading) -> None:
        try:
            if self._screen is None and self._is_due(loading):
                self._screen = open_screen(always=self._at_once)
            if self._screen is not None:
                self._screen.show(loading)
        except Exception:  # a screen that fails must not stop a load
            logger.exception("a load cannot be shown")
            self._screen = _Nowhere()

    def _is_due(self, loading: Loading) -> bool:
        if self._at_once:
            return True
        step, elapsed = loading.step, loading.figures().elapsed_s
        if step.phase == "warming" and not loading.is_over:  # where kernels have to be compiled it takes a minute
            return elapsed > GONE_S + LEFT_S
        if loading.is_over or step.phase != "weights" or not step.done_bytes:
            return False
        if self._first is None:
            self._first = elapsed
        gone = elapsed - self._first
        return gone > GONE_S and gone * (step.total_bytes / step.done_bytes - 1) > LEFT_S


class _Nowhere:
    def show(self, loading: Loading) -> None:
        """There is nobody who looks."""


class Line:
    """One line that is replaced; in a file, a line at the end alone.

    Args:
        out: where it is written.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._due, self._width = out, 0.0, 0

    def show(self, loading: Loading) -> None:
        """Write the line when it is due."""
        told = loading.figures()
        if not loading.is_over and (told.elapsed_s < self._due or not self._out.isatty()):
            return
        self._due = told.elapsed_s + LINE_S
        text = line(told)
        self._out.write(f"\r{text:<{self._width}}" if self._out.isatty() else text)
        self._width = len(text)
        if loading.is_over:
            self._out.write("\n")
        self._out.flush()


class Text:
    """The same line in a notebook without widgets."""

    def __init__(self) -> None:
        from dsv4nb.stream.output import Output

        self._output, self._due = Output({"text/plain": "loading"}), 0.0

    def show(self, loading: Loading) -> None:
        """Replace the line when it is due."""
        told = loading.figures()
        if loading.is_over or told.elapsed_s >= self._due:
            self._due = told.elapsed_s + 2 * LINE_S
            self._output.update({"text/plain": line(told)})


def open_screen(*, always: bool) -> Screen:
    """Return what suits this place.

    Args:
        always: write into a file too.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if hasattr(shell, "kernel"):
        try:
            from dsv4nb.widgets.loading import LoadPanel
        except ImportError:  # the jupyter extra is not installed
            return Text()
        return _Panel(LoadPanel(is_brief=not always))
    return Line(sys.stderr) if always or sys.stderr.isatty() else _Nowhere()


class _Panel:
    """A panel that is displayed when it first has something to show."""

    def __init__(self, panel: Any) -> None:
        self._panel, self._is_displayed = panel, False

    def show(self, loading: Loading) -> None:
        """Let the panel follow; it reads for itself from there on."""
        self._panel.follow(loading)
        if not self._is_displayed:
            self._is_displayed = True
            self._panel._ipython_display_()


def line(told: Figures) -> str:
    """Return how a load stands, in one line."""
    step = told.step
    if told.state == "loaded":
        return f"loaded {told.name} in {told.elapsed_s:.1f} s"
    if told.state in ("cancelled", "failed"):
        return told.error
    parts = [f"loading {told.name}"]
    if step.phase == "weights" and step.total_bytes:
        part = step.done_bytes / step.total_bytes
        bar = "█" * round(WIDTH * part)
        parts.append(f"{bar:░<{WIDTH}} {int(100 * part)} %")
        parts.append(f"{size(step.done_bytes)} of {size(step.total_bytes)}")
        if told.rate is not None:
            parts.append(f"{size(round(told.rate))}/s")
        if told.eta_s is not None:
            parts.append(f"{told.eta_s:.0f} s left")
        parts.append(f"file {step.n_shard} of {step.n_shards}")
    else:
        parts.append(PHASES[step.phase])
    if told.state == "cancelling":
        parts.append("cancelling")
    return "  ".join(parts)
