"""The words of `%dsv4` and `%%dsv4`; a mistake is answered in one line that names what is valid."""

from __future__ import annotations

import argparse
import difflib
import shlex
from typing import NoReturn

from IPython.core.error import UsageError


class HelpAsked(Exception):
    """The line asked for `--help`; the message is the help."""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and leave."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. Valid: {self._valid()}.")

    def print_help(self, file: object = None) -> None:
        raise HelpAsked(self.format_help())

    def parse(self, line: str) -> argparse.Namespace:
        """Parse the rest of a magic's line."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{self.prog}: {error} in {line.strip()!r}.") from None
        found, unknown = self.parse_known_args(words)
        if unknown:
            near = difflib.get_close_matches(unknown[0].split("=")[0], self._options(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UsageError(f"{self.prog}: {unknown[0]!r} is unknown{hint} Valid: {self._valid()}.")
        return found

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def _valid(self) -> str:
        places = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
        return ", ".join([*places, *self._options()])


def cell_parser() -> _Parser:
    """Return the parser of `%%dsv4`."""
    parser = _Parser("%%dsv4", "Ask the model the text of this cell; the reply streams into the cell.")
    parser.add_argument("--model", metavar="NAME", help="the variable that holds the model; the loaded one if left out")
    parser.add_argument("--as", dest="name", metavar="NAME", type=_name, help="also keep the result in this variable")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the shortest prefix with this mass")
    parser.add_argument("--max-new", type=int, metavar="N", help="at most this many tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same reply")
    parser.add_argument("--thinking", action="store_true", help="reason before answering")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told about its task")
    parser.add_argument("--no-stream", action="store_true", help="show the reply once it is complete")
    return parser


def load_parser() -> _Parser:
    """Return the parser of `%dsv4 load`."""
    parser = _Parser("%dsv4 load", "Load a checkpoint into a variable.")
    parser.add_argument("path", metavar="PATH", help="the checkpoint's folder, or toy for the bundled model")
    parser.add_argument(
        "--as", dest="name", metavar="NAME", type=_name, default="m", help="its variable, m if left out"
    )
    parser.add_argument("--max-seq", type=int, metavar="N", help="the longest sequence, prompt and reply together")
    return parser


def unload_parser() -> _Parser:
    """Return the parser of `%dsv4 unload`."""
    parser = _Parser("%dsv4 unload", "Close a model and free its memory.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="its variable; may be left out if only one is loaded")
    return parser


def status_parser() -> _Parser:
    """Return the parser of `%dsv4 status`."""
    return _Parser("%dsv4 status", "List the loaded models.")


def about_parser(command: str, description: str) -> _Parser:
    """Return the parser of a command that tells something about one model."""
    parser = _Parser(f"%dsv4 {command}", description)
    parser.add_argument("name", nargs="?", metavar="NAME", help="its variable; may be left out if only one is loaded")
    return parser


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no variable name")
    return text
