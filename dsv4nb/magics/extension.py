"""What `%load_ext dsv4nb` registers: the magics, their completion, and `%config Dsv4nb`."""

from __future__ import annotations

import ast
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display
from traitlets import Bool, TraitError, TraitType, Unicode, validate

from dsv4nb.errors import Dsv4Error, EngineError
from dsv4nb.magics.arguments import HelpAsked
from dsv4nb.magics.cell import Interrupted
from dsv4nb.magics.complete import completer
from dsv4nb.magics.defaults import Defaults, refusal
from dsv4nb.magics.line import Line
from dsv4nb.magics.shelf import Shelf


class Default(TraitType[Any, Any]):
    """A keyword of `Model.generate`, refused as a request refuses it; None leaves it to the checkpoint."""

    default_value = None
    info_text = "a value that a request takes"

    def validate(self, obj: Any, value: Any) -> Any:
        """Return the value, or refuse it."""
        refused = "" if value is None else refusal(str(self.name), value)
        if refused:
            raise TraitError(f"Dsv4nb.{refused}")
        return value

    def from_string(self, s: str) -> Any:
        """Read what a command line says."""
        try:
            return ast.literal_eval(s)
        except (ValueError, SyntaxError):
            return s


@magics_class
class Dsv4nb(Magics):
    """The magics of one shell; their configuration stands under what %dsv4 set and the line of a cell say."""

    model = Unicode(
        None, allow_none=True, help="The variable that %dsv4 load binds and %%dsv4 asks when the line names none."
    ).tag(config=True)
    stream = Bool(True, help="Show a reply while it grows.").tag(config=True)
    temperature = Default(help="0 is greedy; the checkpoint's own when None.").tag(config=True)
    top_p = Default(help="Keep the shortest prefix with this mass; the checkpoint's own when None.").tag(config=True)
    max_new = Default(help="Tokens of a reply at most; all that fit when None.").tag(config=True)
    thinking = Default(help="Reason before answering.").tag(config=True)

    def __init__(self, shell: InteractiveShell, **options: Any) -> None:
        super().__init__(shell, **options)
        self._names = names = shell.user_ns
        self._shelf = Shelf(names, _load, usual=lambda: self.model)
        self._defaults = Defaults(self._configured)
        self._line = Line(names, self._shelf, self._defaults, replaces=self._is_kernel)
        self.completer = completer(names)

    @validate("model")
    def _variable(self, proposal: Any) -> Any:
        name = proposal["value"]
        if name is not None and not name.isidentifier():
            raise TraitError(f"Dsv4nb.model is {name!r}; it must be the name of a variable")
        return name

    @no_var_expand  # braces in a prompt are text
    @line_cell_magic
    def dsv4(self, line: str, cell: str | None = None) -> None:
        """Load a model and ask it, from cells.

        %dsv4 load PATH [--as NAME] [--max-seq N] [--no-drafter] …   a checkpoint's folder, or toy
        %dsv4 unload [NAME]
        %dsv4 status                           the loaded models
        %dsv4 set [NAME VALUE … | --reset]     what later cells ask for that do not say
        %dsv4 caps | spec | cache | queue | timings [NAME]
        %dsv4 rounds [NAME]                    the rounds of speculation of the last reply, or of a chat
        %dsv4 replay [NAME] [--model NAME]     make a reply again: the same, or not
        %dsv4 show [NAME]                      a chat, live
        %dsv4 bench [NAME] [--new N]           how fast a model answers
        %dsv4 doctor [NAME] [--seconds N]      check what is promised of a model

        %%dsv4 [options]                       the cell is the prompt, and the reply streams in below
          --chat [NAME]                        the next turn of a chat that lives in a variable
          --as NAME, --model NAME, --no-stream
          --with VAR, --fill                   variables in front of the prompt, {expressions} in it
          --json, --schema VAR, --tools A,B    JSON, JSON of a form, functions that the model may call
          --temperature T, --max-new N, --seed N, --thinking, …   as in Model.generate

        Every one of them tells all its options with --help. The result of a cell is kept in `_dsv4`. A kernel
        interrupt stops the reply and keeps its text. What the line does not say, %dsv4 set says, then
        %config Dsv4nb, then the checkpoint.
        """
        try:
            if cell is None:
                shown = self._line.obey(line)
                if shown is not None:
                    display(shown)  # type: ignore[no-untyped-call]
            else:
                self._ask(line, cell)
        except HelpAsked as help_:
            display({"text/plain": str(help_)}, raw=True)  # type: ignore[no-untyped-call]
        except EngineError:
            raise  # a fault, and its traceback tells where
        except Dsv4Error as refused:
            raise UsageError(str(refused)) from None
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted("Stopped.") from None

    def _ask(self, line: str, cell: str) -> None:
        from dsv4nb.magics.ask import Asker

        asker = Asker(
            self._names,
            self._shelf,
            self._defaults,
            replaces=self._is_kernel,
            streams=lambda: bool(self.stream),
        )
        asker.ask(line, cell)

    def _configured(self) -> dict[str, Any]:
        """What requests are to ask for by the configuration."""
        values = {
            name: getattr(self, name) for name, trait in self.traits(config=True).items() if isinstance(trait, Default)
        }
        return {name: value for name, value in values.items() if value is not None}

    def _is_kernel(self) -> bool:
        """Whether outputs can be replaced."""
        return hasattr(self.shell, "kernel")


def _load(path: str, **options: Any) -> Any:
    from dsv4nb.model import load  # brings torch

    return load(path, **options)


def load_ipython_extension(ip: InteractiveShell) -> None:
    """Register the magics; a second time changes nothing."""
    if Dsv4nb.__name__ in ip.magics_manager.registry:
        return
    magics = Dsv4nb(ip, parent=ip)
    ip.register_magics(magics)
    ip.Completer.custom_matchers.append(magics.completer)


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """Remove the magics; loaded models stay as they are."""
    manager = ip.magics_manager
    magics = manager.registry.pop(Dsv4nb.__name__, None)
    for kind in ("line", "cell"):
        manager.magics[kind].pop("dsv4", None)
    if magics is not None:
        ip.configurables.remove(magics)
        ip.Completer.custom_matchers.remove(magics.completer)
