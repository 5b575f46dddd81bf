"""Tab completion of `%dsv4` and `%%dsv4`: commands, options, their values, and variables of the right kind."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from dsv4nb.magics.arguments import COMMANDS, Parser, cell_parser
from dsv4nb.magics.options import CELL, LOAD, NOTEBOOK, Option, each
from dsv4nb.magics.prompt import own_names
from dsv4nb.magics.shelf import is_model

_LINE = re.compile(r"\s*(%%?)dsv4\s(.*)", re.DOTALL)
_MODEL = Option("--model", str, "NAME", "", kind="model")


def completer(names: Mapping[str, Any]) -> Any:
    """Return a matcher for `IPCompleter.custom_matchers`.

    Args:
        names: the notebook's variables.
    """

    @context_matcher(identifier="dsv4nb")  # type: ignore[untyped-decorator]
    def match(context: CompletionContext) -> SimpleMatcherResult:
        found = _LINE.fullmatch(context.text_until_cursor)
        if found is None or (found[1] == "%%" and context.cursor_line != 0):
            return {"completions": []}
        fragment, texts = complete(found[2], names, is_cell=found[1] == "%%")
        return {
            "completions": [SimpleCompletion(text, type="dsv4") for text in texts],
            "matched_fragment": fragment,
            "suppress": True,  # what Python could go on with is no answer here
        }

    return match


def complete(line: str, names: Mapping[str, Any], *, is_cell: bool) -> tuple[str, list[str]]:
    """Return the words that the last one of a line can become.

    Args:
        line: what stands between the magic and the cursor.

    Returns:
        The part of the line that they replace, and the words.
    """
    *before, fragment = re.split(r"\s+", line.lstrip())
    if not is_cell and not before:
        return fragment, _beginning(fragment, COMMANDS)
    if not is_cell and before[0] not in COMMANDS:
        return fragment, []
    parser = cell_parser() if is_cell else COMMANDS[before[0]].parser()
    kind = "" if is_cell else COMMANDS[before[0]].kind
    words = before if is_cell else before[1:]
    option = _open_option(words, parser)
    if option is not None and not fragment.startswith("--"):
        *_, fragment = fragment.split(",")  # of names with commas between them
        return fragment, _beginning(fragment, [*option.choices, *_variables(option.kind, names)])
    if fragment.startswith("-"):
        return fragment, _beginning(
            fragment, [flag for flag in parser.flags() if flag not in words or flag == "--with"]
        )
    if kind == "word":
        return fragment, _beginning(fragment, _set_words(words, parser))
    if kind == "path":
        return fragment, [] if words else [*_beginning(fragment, ["toy"]), *_folders(fragment)]
    is_named = any(not word.startswith("-") for word in words)
    found = [] if is_named else _beginning(fragment, _variables(kind, names))
    return fragment, found if found or fragment else parser.flags()


def _open_option(words: Sequence[str], parser: Parser) -> Option | None:
    """Return the option whose value comes next, None when none does."""
    if not words or not parser.takes_value(words[-1]):
        return None
    known = {option.flag: option for table in (LOAD, CELL, NOTEBOOK) for option in each(table)} | {"--model": _MODEL}
    return known.get(words[-1])


def _set_words(words: Sequence[str], parser: Parser) -> list[str]:
    """Return what `%dsv4 set` goes on with: an option, a name, or a value of the name before it."""
    options = {option.flag.removeprefix("--"): option for option in each(CELL)}
    if words and words[0].startswith("-") and words[0] != "--reset":
        return parser.flags()
    if words and words[0] != "--reset" and len(words) % 2:
        option = options.get(words[-1].replace("_", "-"))
        return [] if option is None else ["on", "off"] if option.type is bool else list(option.choices)
    return [name for name in options if name not in words]


def _variables(kind: str, names: Mapping[str, Any]) -> list[str]:
    """Return the variables of a kind."""
    if kind not in _KINDS:
        return []
    fits = _KINDS[kind]
    return sorted(name for name in own_names(names) if fits(names[name]))


def _is_chat(value: object) -> bool:
    from dsv4nb.magics.ask import is_chat

    return is_chat(value)


def _is_reply(value: object) -> bool:
    from dsv4nb.magics.replies import has_recipe, has_rounds

    return has_rounds(value) or has_recipe(value)


def _is_value(value: object) -> bool:
    return not isinstance(value, ModuleType | FunctionType)


_KINDS: Mapping[str, Callable[[object], bool]] = {
    "model": is_model,
    "chat": _is_chat,
    "reply": _is_reply,
    "function": lambda value: isinstance(value, FunctionType),
    "variable": _is_value,
}


def _folders(fragment: str) -> list[str]:
    home = os.path.expanduser("~")
    found = sorted(glob.glob(f"{glob.escape(os.path.expanduser(fragment))}*{os.sep}"))
    return [f"~{path.removeprefix(home)}" if fragment.startswith("~") else path for path in found if " " not in path]


def _beginning(fragment: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(fragment)]
