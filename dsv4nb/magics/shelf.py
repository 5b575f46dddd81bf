"""The loaded models of a notebook, each in a variable."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

from IPython.core.error import UsageError

from dsv4nb.magics.arguments import given
from dsv4nb.magics.options import LOAD
from dsv4nb.magics.shown import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that `%dsv4 load` made, and how."""

    path: str
    options: Mapping[str, Any]
    model: Any


def is_model(value: object) -> bool:
    """Whether a value is a model; its class is asked, so that no property of a person's object is run."""
    return hasattr(type(value), "submit") and hasattr(type(value), "is_closed")


class Shelf:
    """The loaded models of one notebook, by the variable that holds them.

    Args:
        names: the notebook's variables.
        load: makes a model from a path.
        usual: the variable that `%config Dsv4nb` names for a model, None when it names none.
    """

    def __init__(
        self, names: MutableMapping[str, Any], load: Callable[..., Any], usual: Callable[[], str | None] = lambda: None
    ) -> None:
        self._names = names
        self._load_model = load
        self._usual = usual
        self._loaded: dict[str, Loaded] = {}

    def find(self, name: str | None, magic: str = "%%dsv4") -> Any:
        """Return the model in variable `name`, or the usual or only one; `magic` is named where there is none."""
        name = name or self._usual()
        if name is not None:
            model = self._names.get(name)
            if is_model(model):
                return model
            met = f"{name!r} holds no model" if name in self._names else f"there is no variable {name!r}"
            raise UsageError(f"{magic}: {met}; {self._way_out(magic)}")
        models = self._open()
        if len(models) == 1:
            return next(iter(models.values()))
        what = "several models are loaded" if models else "no model is loaded"
        raise UsageError(f"{magic}: {what}; {self._way_out(magic)}")

    @property
    def is_empty(self) -> bool:
        """Whether no variable holds an open model, and none is meant by a default."""
        return self._usual() is None and not self._open()

    def only(self) -> Any:
        """Return the open model that a cell would ask, None when that is not clear."""
        try:
            model = self.find(None)
        except UsageError:
            return None
        return None if model.is_closed else model

    def called(self, name: str) -> Any:
        """Return an open model with this name of its own, None when no variable holds one."""
        return next((model for model in self._open().values() if getattr(model, "name", None) == name), None)

    def load(self, args: Namespace) -> object:
        """Load a checkpoint into a variable, and return its card."""
        name, options = args.name or self._usual() or "m", given(args, LOAD)
        loaded, held = self._loaded.get(name), cast(Any, self._names.get(name))
        if loaded is not None and loaded.model is held and not held.is_closed:
            if (loaded.path, loaded.options) == (args.path, options):
                return held.info  # a cell that is run again loads nothing twice
            raise UsageError(
                f"%dsv4 load: {name!r} already holds {loaded.path}; "
                f"%dsv4 unload {name} frees it, --as NAME takes another variable."
            )
        model = self._load_model(args.path, **options)
        self._names[name] = model
        self._loaded[name] = Loaded(path=args.path, options=options, model=model)
        return model.info

    def unload(self, args: Namespace) -> None:
        """Close a model and forget its variable."""
        name = args.name
        if name is None:
            names = list(self._open())
            if len(names) != 1:
                raise UsageError(
                    f"%dsv4 unload: name one of {', '.join(names)}." if names else "%dsv4 unload: no model is loaded."
                )
            name = names[0]
        model = self._names.get(name)
        if model is None or not is_model(model):
            raise UsageError(f"%dsv4 unload: {name!r} holds no model.")
        model.close()
        del self._names[name]
        self._loaded.pop(name, None)

    def status(self, args: Namespace) -> Status:
        """Return the models that are loaded."""
        return Status(models=self._open())

    def _way_out(self, magic: str) -> str:
        names = list(self._open())
        option = "--model " if magic in ("%%dsv4", "%dsv4 replay") else ""
        return f"pass {option}{' or '.join(names)}." if names else "%dsv4 load PATH loads one."

    def _open(self) -> dict[str, Any]:
        """The models that can be asked, by their variable; each once."""
        found: dict[str, Any] = {}
        for name, value in self._names.items():
            if name.startswith("_") or not is_model(value) or value.is_closed:  # _ and _12 are IPython's
                continue
            if not any(value is other for other in found.values()):
                found[name] = value
        return found
