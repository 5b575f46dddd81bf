"""`%dsv4 rounds | replay | show`: what is to be seen of a reply afterwards."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from dsv4nb.errors import ReplayMismatch
from dsv4nb.magics.arguments import near
from dsv4nb.magics.ask import RESULT, is_chat
from dsv4nb.magics.cell import Interrupted
from dsv4nb.magics.options import DEFAULT_CHAT
from dsv4nb.magics.prompt import own_names
from dsv4nb.magics.shelf import Shelf
from dsv4nb.magics.shown import Table


def has_rounds(value: object) -> bool:
    """Whether `%dsv4 rounds` can show a value."""
    return is_chat(value) or hasattr(type(value), "rounds") or hasattr(type(value), "sweep")


def has_recipe(value: object) -> bool:
    """Whether `%dsv4 replay` can replay a value, for completion: text might be a recipe too."""
    return hasattr(type(value), "recipe") or hasattr(type(value), "ids_sha256")


def rounds(args: Namespace, names: Mapping[str, Any], shelf: Shelf, *, has_widgets: bool) -> object:
    """Return a panel of the rounds of a reply, or their text where there are no widgets.

    Raises:
        UsageError: there is no reply, or it has no rounds.
    """
    name = args.name or (DEFAULT_CHAT if RESULT not in names and is_chat(names.get(DEFAULT_CHAT)) else RESULT)
    source = _held(name, names, "%dsv4 rounds")
    if not has_rounds(source):
        raise UsageError(f"%dsv4 rounds: {name!r} holds no result or chat.")
    found, why = _rounds_of(source)
    if has_widgets and (found or is_chat(source)):
        try:
            from dsv4nb.widgets.acceptance import AcceptancePanel
        except ImportError:  # the jupyter extra is not installed
            return found
        model = shelf.called(source.name) if is_chat(source) else shelf.only()
        return AcceptancePanel(source, costs=None if model is None else model.spec.costs)
    if not found:
        raise UsageError(f"%dsv4 rounds: there are none in {name!r}: {why}.")
    return found


def replay(args: Namespace, names: Mapping[str, Any], shelf: Shelf) -> Table:
    """Make a reply again, and return whether it is the same.

    Raises:
        UsageError: there is no recipe of this name.
        ReplayMismatch: it is of another model; nothing was run.
        Interrupted: the person did.
    """
    recipe = _recipe_of(args.name or RESULT, names)
    model = shelf.find(args.model, "%dsv4 replay")
    facts = [("recipe", f"{args.name or RESULT}, of {recipe.model}, {len(recipe.prompt):,} prompt tokens")]
    try:
        reply = model.replay(recipe)
    except ReplayMismatch as mismatch:
        if mismatch.param is not None:  # of another model
            raise
        return Table(facts=[*facts, ("replay", f"differs: {mismatch}")])
    except KeyboardInterrupt:
        raise Interrupted("Stopped; nothing was compared, and the model can be used on.") from None
    n = len(reply.ids)
    same = f"the same, {n:,} token{'s' * (n != 1)} with SHA-256 {recipe.ids_sha256[:12]}…"
    return Table(facts=[*facts, ("replay", same), ("text", _shortened(reply.text))])


def show(args: Namespace, names: Mapping[str, Any]) -> object:
    """Return a chat, which shows itself.

    Raises:
        UsageError: it is not clear which.
    """
    if args.name is not None:
        chat = _held(args.name, names, "%dsv4 show")
        if not is_chat(chat):
            raise UsageError(f"%dsv4 show: {args.name!r} holds no chat.")
        return chat
    if is_chat(names.get(DEFAULT_CHAT)):
        return names[DEFAULT_CHAT]
    chats = {name: value for name, value in names.items() if not name.startswith("_") and is_chat(value)}
    if len({id(chat) for chat in chats.values()}) == 1:
        return next(iter(chats.values()))
    if chats:
        raise UsageError(f"%dsv4 show: there are several chats; name one of {', '.join(chats)}.")
    raise UsageError("%dsv4 show: there is no chat; %%dsv4 --chat begins one.")


def _held(name: str, names: Mapping[str, Any], where: str) -> Any:
    if name in names:
        return names[name]
    if name == RESULT:
        raise UsageError(f"{where}: there is no reply yet; a %%dsv4 cell makes one, or pass NAME.")
    raise UsageError(f"{where}: there is no variable {name!r}{near(name, own_names(names))}")


def _rounds_of(source: Any) -> tuple[Any, str]:
    """Return the rounds of a value, and why there may be none."""
    if is_chat(source):
        turns = source.turns
        return (turns[-1].rounds, "its last turn was not speculated") if turns else ((), "it has no turn yet")
    if hasattr(source, "sweep"):
        return source, "they are empty"
    done = getattr(source, "done", None)
    return source.rounds, getattr(done, "spec_note", "") or "the reply was not speculated"


def _recipe_of(name: str, names: Mapping[str, Any]) -> Any:
    """Return the recipe in a variable, or in a file when there is no such variable."""
    from dsv4nb.events import Recipe

    if name not in names and Path(name).expanduser().is_file():
        return Recipe.from_json(Path(name).expanduser().read_text(encoding="utf-8"))
    if name not in names and name != RESULT:
        raise UsageError(f"%dsv4 replay: there is no variable and no file {name!r}{near(name, own_names(names))}")
    value = _held(name, names, "%dsv4 replay")
    if isinstance(value, Recipe):
        return value
    if isinstance(recipe := getattr(value, "recipe", None), Recipe):
        return recipe
    if isinstance(value, str | Mapping):
        return Recipe.from_json(value if isinstance(value, str) else json.dumps(dict(value)))
    raise UsageError(f"%dsv4 replay: {name!r} holds no result or recipe.")


def _shortened(text: str, most: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}…"
