"""The lines of `%dsv4` and `%%dsv4`; a mistake is answered in one line that names what is valid."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from IPython.core.error import UsageError

from dsv4nb.magics.options import CELL, LOAD, NOTEBOOK, Table, each, variable


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
        return self.parse_words(words_of(line, self.prog))

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a line that is split into words."""
        found, unknown = self.parse_known_args(words)
        if unknown:
            hint = near(unknown[0].split("=")[0], self.flags())
            raise UsageError(f"{self.prog}: {unknown[0]!r} is unknown{hint} Valid: {self._valid()}.")
        return found

    def flags(self) -> list[str]:
        """Return the options that may be given."""
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def takes_value(self, flag: str) -> bool:
        """Whether a value may follow `flag`."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs != 0

    def _valid(self) -> str:
        places = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
        return ", ".join([*places, *self.flags()])

    def place(self, metavar: str, told: str, **how: Any) -> None:
        """Take a word without an option before it."""
        self.add_argument(metavar.lower(), metavar=metavar, help=told, **how)

    def take(self, table: Table) -> None:
        """Take the words of a table; one that is not on the line is no attribute of what `parse` returns."""
        places = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *places, "[options]"])  # all of them would be a dozen lines
        for heading, options in table.items():
            group = self.add_argument_group(heading)
            for option in options:
                how: dict[str, Any] = {"action": "store_const", "const": True}
                if option.type is bool:
                    how = {"action": argparse.BooleanOptionalAction}
                elif option.type is not None:
                    how = {"type": option.type, "metavar": option.metavar}
                    how |= {"action": "append"} if option.is_list else {}
                    how |= {"nargs": "?", "const": option.bare} if option.bare else {}
                told = option.help.replace("%", "%%")  # argparse puts values in
                group.add_argument(option.flag, dest=option.field, default=argparse.SUPPRESS, help=told, **how)


def near(word: str, known: Iterable[str]) -> str:
    """Return what ends the sentence that a word is unknown."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else "."


def words_of(line: str, where: str) -> list[str]:
    """Split a line as a shell does.

    Raises:
        UsageError: a quotation does not end.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{where}: {error} in {line.strip()!r}.") from None


def given(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Return what was given on the line, by the names that Python uses."""
    return {option.field: getattr(args, option.field) for option in each(table) if hasattr(args, option.field)}


def cell_parser() -> Parser:
    """Return the parser of `%%dsv4`."""
    parser = Parser("%%dsv4", "Ask the model the text of this cell; the reply streams into the cell.")
    parser.take(NOTEBOOK)
    parser.take(CELL)
    return parser


def _load() -> Parser:
    parser = Parser("%dsv4 load", "Load a checkpoint into a variable.")
    parser.place("PATH", "the checkpoint's folder, or toy for the bundled model")
    parser.add_argument(
        "--as", dest="name", metavar="NAME", type=variable, help="its variable, m if left out; see %%config Dsv4nb"
    )
    parser.take(LOAD)
    return parser


def _about(command: str, description: str) -> Callable[[], Parser]:
    """Return what makes the parser of a command about one model."""

    def make() -> Parser:
        parser = Parser(f"%dsv4 {command}", description)
        parser.place("NAME", "its variable; may be left out if only one is loaded", nargs="?")
        return parser

    return make


def _status() -> Parser:
    return Parser("%dsv4 status", "List the loaded models.")


def _set() -> Parser:
    parser = Parser(
        "%dsv4 set",
        "Set what later %%dsv4 cells ask for that do not say: NAME VALUE ..., or the options of a cell. Alone it shows "
        "what is set.",
    )
    parser.add_argument("--reset", nargs="*", metavar="NAME", help="forget these, everything if none is named")
    parser.take(CELL)
    parser.usage = "%(prog)s [NAME VALUE ... | options]"
    return parser


def _rounds() -> Parser:
    parser = Parser("%dsv4 rounds", "Show the rounds of speculation of a reply.")
    parser.place("NAME", "the variable of a result or a chat; the last reply if left out", nargs="?")
    return parser


def _show() -> Parser:
    parser = Parser("%dsv4 show", "Show a chat here, live.")
    parser.place("NAME", "its variable; may be left out if there is only one", nargs="?")
    return parser


def _replay() -> Parser:
    parser = Parser("%dsv4 replay", "Make a reply again from its recipe, and tell whether it is the same.")
    parser.place("NAME", "the variable of a result or a recipe, or a file with one; _dsv4 if left out", nargs="?")
    parser.add_argument("--model", metavar="NAME", type=variable, help="the variable that holds the model")
    return parser


def _bench() -> Parser:
    parser = _about("bench", "Measure how fast a loaded model answers, plainly and by speculation.")()
    parser.add_argument("--new", type=_at_least(2), default=32, metavar="N", help="tokens of a reply")
    parser.add_argument("--runs", type=_at_least(1), default=3, metavar="N", help="of each measurement")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the speculated replies")
    return parser


def _doctor() -> Parser:
    parser = _about("doctor", "Check on this machine what is promised of a model, and tell what the machine is.")()
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no comparison after so many")
    return parser


def _at_least(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {low}")
        return number

    return read


@dataclass(frozen=True, slots=True)
class Command:
    """A word behind `%dsv4`.

    Attributes:
        kind: of variable that it may be about, to complete it; "word" for the names that `set` takes.
    """

    parser: Callable[[], Parser]
    kind: str = ""


COMMANDS: Mapping[str, Command] = {
    "load": Command(_load, "path"),
    "unload": Command(_about("unload", "Close a model and free its memory."), "model"),
    "status": Command(_status),
    "set": Command(_set, "word"),
    "caps": Command(_about("caps", "Tell what requests may ask for."), "model"),
    "spec": Command(_about("spec", "Tell how a model speculates, and what that costs."), "model"),
    "cache": Command(_about("cache", "Tell what is known of earlier runs."), "model"),
    "queue": Command(_about("queue", "List the requests that have not ended."), "model"),
    "timings": Command(_about("timings", "Show when what happened in the last request."), "model"),
    "rounds": Command(_rounds, "reply"),
    "replay": Command(_replay, "reply"),
    "show": Command(_show, "chat"),
    "bench": Command(_bench, "model"),
    "doctor": Command(_doctor, "model"),
}
