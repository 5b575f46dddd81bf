"""`%dsv4 COMMAND`: each command is a word of `COMMANDS`, and a method or function that gives what is shown."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.error import UsageError

from dsv4nb.magics.arguments import COMMANDS, near
from dsv4nb.magics.defaults import Defaults
from dsv4nb.magics.measuring import bench, doctor
from dsv4nb.magics.replies import replay, rounds, show
from dsv4nb.magics.shelf import Shelf
from dsv4nb.magics.shown import Queue, Timeline


class Line:
    """Carries out the lines of one notebook.

    Args:
        names: the notebook's variables.
        replaces: whether what is shown can be replaced, as in a notebook's cell.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        shelf: Shelf,
        defaults: Defaults,
        *,
        replaces: Callable[[], bool] = lambda: False,
    ) -> None:
        self._names = names
        self._shelf = shelf
        self._defaults = defaults
        self._replaces = replaces
        self._run: Mapping[str, Callable[[Namespace], object]] = {
            "load": shelf.load,
            "unload": shelf.unload,
            "status": shelf.status,
            "caps": self._telling("caps", lambda model: model.caps),
            "spec": self._telling("spec", lambda model: model.spec),
            "cache": self._telling("cache", lambda model: model.cache.stats()),
            "queue": self._telling("queue", lambda model: Queue(waiting=tuple(model.queue))),
            "timings": self._telling("timings", lambda model: Timeline(timings=model.timings)),
            "rounds": lambda args: rounds(args, names, shelf, has_widgets=replaces()),
            "replay": lambda args: replay(args, names, shelf),
            "show": lambda args: show(args, names),
            "bench": lambda args: bench(args, shelf.find(args.name, "%dsv4 bench"), replaces=replaces()),
            "doctor": self._doctor,
        }

    def obey(self, line: str) -> object:
        """Carry out a line; return what is to be shown, None when there is nothing.

        Raises:
            UsageError: it is not understood; the message is one line and names what is valid.
            Dsv4Error: a model refuses it.
        """
        word, _, rest = line.strip().partition(" ")
        if word not in COMMANDS:
            met = f"{word!r} is unknown{near(word, COMMANDS)}" if word else "a command is missing."
            raise UsageError(f"%dsv4: {met} Valid: {', '.join(COMMANDS)}; and %%dsv4 asks the text of a cell.")
        if word == "set":  # its words may be pairs
            return self._defaults.obey(rest, self._shelf.only())
        return self._run[word](COMMANDS[word].parser().parse(rest))

    def _doctor(self, args: Namespace) -> object:
        """Without any model there are still the machine and the notebook to tell of."""
        shelf = self._shelf
        model = None if args.name is None and shelf.is_empty else shelf.find(args.name, "%dsv4 doctor")
        return doctor(args, model, replaces=self._replaces())

    def _telling(self, word: str, tell: Callable[[Any], object]) -> Callable[[Namespace], object]:
        """Return a command that tells something about one model."""
        return lambda args: tell(self._shelf.find(args.name, f"%dsv4 {word}"))
