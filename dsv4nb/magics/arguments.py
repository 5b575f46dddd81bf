"""The words of `%dsv4` and `%%dsv4`; a mistake is answered in one line that names what is valid."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError

from dsv4nb.magics.options import CELL, LOAD, Option

Table = Mapping[str, Sequence[Option]]


class HelpAsked(Exception):
    """The line asked for `--help`; the message is the help."""


class Parser(argparse.ArgumentParser):
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

    def take(self, table: Table) -> None:
        """Take the words of a table; one that is not on the line is no attribute of what `parse` returns."""
        places = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *places, "[options]"])  # all of them would be a dozen lines
        for heading, options in table.items():
            group = self.add_argument_group(heading)
            for option in options:
                how: dict[str, Any] = {"action": "store_const", "const": option.value}
                if option.type is not None:
                    action = "append" if option.is_list else "store"
                    how = {"action": action, "type": option.type, "metavar": option.metavar}
                told = option.help.replace("%", "%%")  # argparse puts values in
                group.add_argument(option.flag, dest=option.field, default=argparse.SUPPRESS, help=told, **how)


def given(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Return what was given on the line, by the names that Python uses."""
    fields = [option.field for options in table.values() for option in options]
    return {field: getattr(args, field) for field in fields if hasattr(args, field)}


def cell_parser() -> Parser:
    """Return the parser of `%%dsv4`."""
    parser = Parser("%%dsv4", "Ask the model the text of this cell; the reply streams into the cell.")
    parser.add_argument("--model", metavar="NAME", help="the variable that holds the model; the loaded one if left out")
    parser.add_argument("--as", dest="name", metavar="NAME", type=_name, help="also keep the result in this variable")
    parser.add_argument("--no-stream", action="store_true", help="show the reply once it is complete")
    parser.take(CELL)
    return parser


def load_parser() -> Parser:
    """Return the parser of `%dsv4 load`."""
    parser = Parser("%dsv4 load", "Load a checkpoint into a variable.")
    parser.add_argument("path", metavar="PATH", help="the checkpoint's folder, or toy for the bundled model")
    parser.add_argument(
        "--as", dest="name", metavar="NAME", type=_name, default="m", help="its variable, m if left out"
    )
    parser.take(LOAD)
    return parser


def unload_parser() -> Parser:
    """Return the parser of `%dsv4 unload`."""
    parser = Parser("%dsv4 unload", "Close a model and free its memory.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="its variable; may be left out if only one is loaded")
    return parser


def status_parser() -> Parser:
    """Return the parser of `%dsv4 status`."""
    return Parser("%dsv4 status", "List the loaded models.")


def about_parser(command: str, description: str) -> Parser:
    """Return the parser of a command that tells something about one model."""
    parser = Parser(f"%dsv4 {command}", description)
    parser.add_argument("name", nargs="?", metavar="NAME", help="its variable; may be left out if only one is loaded")
    return parser


def doctor_parser() -> Parser:
    """Return the parser of `%dsv4 doctor`."""
    parser = about_parser("doctor", "Check on this machine what is promised of a model.")
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no comparison after so many")
    return parser


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no variable name")
    return text
