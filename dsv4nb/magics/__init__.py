"""`%dsv4` and `%%dsv4`, registered by `%load_ext dsv4nb`."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from dsv4nb.errors import CheckpointError, EncodingError, ModelClosed, NotEnoughMemory, RequestError
from dsv4nb.magics.arguments import HelpAsked, cell_parser, given
from dsv4nb.magics.line import Shelf
from dsv4nb.magics.options import CELL


@magics_class
class Dsv4Magics(Magics):
    """The magics of one shell and the models that they loaded."""

    def __init__(self, shell: InteractiveShell, **options: Any) -> None:
        super().__init__(shell, **options)
        self._names = shell.user_ns
        self._shelf = Shelf(shell.user_ns, _load, replaces=self._is_kernel)

    @no_var_expand  # braces in a prompt are text
    @line_cell_magic
    def dsv4(self, line: str, cell: str | None = None) -> None:
        """Load a model, or ask it the text of a cell.

        %dsv4 load PATH [--as NAME] [--max-seq N] [--no-drafter] …
        %dsv4 unload [NAME]
        %dsv4 status
        %dsv4 caps | spec | cache | queue | timings [NAME]
        %dsv4 doctor [NAME] [--seconds N]
        %%dsv4 [--model NAME] [--as NAME] [--temperature T] [--max-new N] [--seed N] [--thinking] [--no-stream] …

        Every one of them tells all its options with --help. The result of a cell is kept in `_dsv4`. A kernel
        interrupt stops the reply and keeps its text.
        """
        try:
            if cell is None:
                shown = self._shelf.obey(line)
                if shown is not None:
                    display(shown)  # type: ignore[no-untyped-call]
            else:
                self._ask(line, cell)
        except HelpAsked as help_:
            display({"text/plain": str(help_)}, raw=True)  # type: ignore[no-untyped-call]
        except (CheckpointError, EncodingError, ModelClosed, NotEnoughMemory, RequestError) as refused:
            raise UsageError(str(refused)) from None

    def _ask(self, line: str, cell: str) -> None:
        from dsv4nb.magics.cell import CellScreen, Interrupted, Screen, TerminalScreen, follow

        args = cell_parser().parse(line)
        model = self._shelf.find(args.model)
        ticket = model.submit(cell.strip(), **given(args, CELL))
        is_live = not args.no_stream
        screen: Screen = CellScreen(is_live=is_live) if self._is_kernel() else TerminalScreen(is_live=is_live)
        result, is_interrupted = follow(ticket, screen)
        for name in filter(None, ("_dsv4", args.name)):
            self._names[name] = result
        if is_interrupted:
            raise Interrupted("Stopped. The text so far is in _dsv4.")

    def _is_kernel(self) -> bool:
        """Whether outputs can be replaced."""
        return hasattr(self.shell, "kernel")


def _load(path: str, **options: Any) -> Any:
    from dsv4nb.model import load  # brings torch

    return load(path, **options)


def load_ipython_extension(ip: InteractiveShell) -> None:
    """Register the magics; a second time changes nothing."""
    if Dsv4Magics.__name__ not in ip.magics_manager.registry:
        ip.register_magics(Dsv4Magics(ip, parent=ip))


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """Remove the magics; loaded models stay as they are."""
    manager = ip.magics_manager
    manager.registry.pop(Dsv4Magics.__name__, None)
    for kind in ("line", "cell"):
        manager.magics[kind].pop("dsv4", None)
