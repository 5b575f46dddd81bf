"""`%dsv4 load | unload | status | caps | timings`: models as variables of the notebook."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.core.error import UsageError

from dsv4nb.events import Timings
from dsv4nb.magics.arguments import about_parser, load_parser, status_parser, unload_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that `%dsv4 load` made, and how."""

    name: str
    path: str
    max_seq: int | None
    model: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The models that are loaded, as a person reads them."""

    models: tuple[Loaded, ...]

    def __repr__(self) -> str:
        if not self.models:
            return "no model is loaded; %dsv4 load PATH loads one"
        return "\n\n".join(f"{loaded.name}\n{loaded.model.info}" for loaded in self.models)

    def _repr_html_(self) -> str:
        if not self.models:
            return f"<p>{escape(repr(self))}</p>"
        return "".join(f"<p><code>{escape(m.name)}</code></p>{_html(m.model.info)}" for m in self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The marks of a request, each with a bar from the mark before it."""

    timings: Timings | None

    def __repr__(self) -> str:
        if self.timings is None:
            return "no request has ended yet"
        marks = self.timings.marks
        total = marks[-1][1] or 1.0
        lines, before = [], 0.0
        for label, at in marks:
            start, end = round(40 * before / total), round(40 * at / total)
            lines.append(f"{label:<16}{1e3 * at:10.1f} ms  {' ' * start}{'█' * max(1, end - start)}")
            before = at
        return "\n".join(lines)


class Shelf:
    """The loaded models of one notebook, by the variable that holds them.

    Args:
        names: the notebook's variables.
        load: makes a model from a path.
    """

    def __init__(self, names: MutableMapping[str, Any], load: Callable[..., Any]) -> None:
        self._names = names
        self._load_model = load
        self._loaded: dict[str, Loaded] = {}

    def obey(self, line: str) -> object:
        """Carry out the line of `%dsv4`; return what is to be shown."""
        commands: dict[str, Callable[[str], object]] = {
            "load": self._load,
            "unload": self._unload,
            "status": self._status,
            "caps": self._caps,
            "timings": self._timings,
        }
        word, _, rest = line.strip().partition(" ")
        if word in commands:
            return commands[word](rest)
        met = f"{word!r} is unknown" if word else "a command is missing"
        raise UsageError(f"%dsv4: {met}. Valid: {', '.join(commands)}; and %%dsv4 asks the text of a cell.")

    def find(self, name: str | None, magic: str = "%%dsv4") -> Any:
        """Return the model in variable `name`, or the only one that is loaded; `magic` is named where there is none."""
        if name is not None:
            model = self._names.get(name)
            if hasattr(model, "submit"):
                return model
            met = f"{name!r} holds no model" if name in self._names else f"there is no variable {name!r}"
            raise UsageError(f"{magic}: {met}; {self._way_out(magic)}")
        present = self._present()
        if len(present) == 1:
            return present[0].model
        if not present and hasattr(self._names.get("m"), "submit"):
            return self._names["m"]  # made by dsv4nb.load, under the name that everybody uses
        what = "no model is loaded" if not present else "several models are loaded"
        raise UsageError(f"{magic}: {what}; {self._way_out(magic)}")

    def _way_out(self, magic: str) -> str:
        names = [loaded.name for loaded in self._present()]
        option = "--model " if magic == "%%dsv4" else ""
        return f"pass {option}{' or '.join(names)}." if names else "%dsv4 load PATH loads one."

    def _present(self) -> list[Loaded]:
        """The open models whose variable still holds them."""
        held = [loaded for name, loaded in self._loaded.items() if self._names.get(name) is loaded.model]
        return [loaded for loaded in held if not loaded.model.is_closed]

    def _load(self, rest: str) -> object:
        args = load_parser().parse(rest)
        for loaded in self._present():
            if loaded.name != args.name:
                continue
            if (loaded.path, loaded.max_seq) == (args.path, args.max_seq):
                return loaded.model.info  # a cell that is run again loads nothing twice
            raise UsageError(
                f"%dsv4 load: {args.name!r} already holds {loaded.path}; "
                f"%dsv4 unload {args.name} frees it, --as NAME takes another variable."
            )
        options = {} if args.max_seq is None else {"max_seq": args.max_seq}
        model = self._load_model(args.path, **options)
        self._names[args.name] = model
        self._loaded[args.name] = Loaded(name=args.name, path=args.path, max_seq=args.max_seq, model=model)
        return model.info

    def _unload(self, rest: str) -> object:
        name = unload_parser().parse(rest).name
        if name is None:
            names = [loaded.name for loaded in self._present()]
            if len(names) != 1:
                raise UsageError(
                    f"%dsv4 unload: name one of {', '.join(names)}." if names else "%dsv4 unload: no model is loaded."
                )
            name = names[0]
        model = self._names.get(name)
        if not hasattr(model, "submit"):
            raise UsageError(f"%dsv4 unload: {name!r} holds no model.")
        model.close()  # type: ignore[union-attr]
        del self._names[name]
        self._loaded.pop(name, None)
        return None

    def _caps(self, rest: str) -> object:
        return self.find(about_parser("caps", "Tell what requests may ask for.").parse(rest).name, "%dsv4 caps").caps

    def _timings(self, rest: str) -> Timeline:
        name = about_parser("timings", "Show when what happened in the last request.").parse(rest).name
        return Timeline(timings=self.find(name, "%dsv4 timings").timings)

    def _status(self, rest: str) -> Status:
        status_parser().parse(rest)
        return Status(models=tuple(self._present()))


def _html(info: object) -> str:
    show = getattr(info, "_repr_html_", None)
    return str(show()) if show is not None else f"<pre>{escape(str(info))}</pre>"
