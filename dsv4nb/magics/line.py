"""`%dsv4 load | unload | status | …`: models as variables of the notebook, and what they tell of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.core.error import UsageError

from dsv4nb.events import Timings
from dsv4nb.magics.arguments import about_parser, doctor_parser, given, load_parser, status_parser, unload_parser
from dsv4nb.magics.options import LOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that `%dsv4 load` made, and how."""

    name: str
    path: str
    options: Mapping[str, Any]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The requests that have not ended, in the order in which they run."""

    waiting: Sequence[Any]

    def __repr__(self) -> str:
        if not self.waiting:
            return "no request is waiting or running"
        lines = [f"{'state':<10}{'prompt':>8}{'since':>10}"]
        lines += [f"{one.state:<10}{one.n_prompt:>8,}{one.waited_s:>8.1f} s" for one in self.waiting]
        return "\n".join(lines)


class Shelf:
    """The loaded models of one notebook, by the variable that holds them.

    Args:
        names: the notebook's variables.
        load: makes a model from a path.
        replaces: whether what is shown can be replaced, as in a notebook's cell.
    """

    def __init__(
        self,
        names: MutableMapping[str, Any],
        load: Callable[..., Any],
        *,
        replaces: Callable[[], bool] = lambda: False,
    ) -> None:
        self._names = names
        self._load_model = load
        self._replaces = replaces
        self._loaded: dict[str, Loaded] = {}

    def obey(self, line: str) -> object:
        """Carry out the line of `%dsv4`; return what is to be shown."""
        commands: dict[str, Callable[[str], object]] = {
            "load": self._load,
            "unload": self._unload,
            "status": self._status,
            "caps": self._caps,
            "spec": self._spec,
            "cache": self._cache,
            "queue": self._queue,
            "timings": self._timings,
            "doctor": self._doctor,
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
        options = given(args, LOAD)
        for loaded in self._present():
            if loaded.name != args.name:
                continue
            if (loaded.path, loaded.options) == (args.path, options):
                return loaded.model.info  # a cell that is run again loads nothing twice
            raise UsageError(
                f"%dsv4 load: {args.name!r} already holds {loaded.path}; "
                f"%dsv4 unload {args.name} frees it, --as NAME takes another variable."
            )
        model = self._load_model(args.path, **options)
        self._names[args.name] = model
        self._loaded[args.name] = Loaded(name=args.name, path=args.path, options=options, model=model)
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
        return self._about("caps", "Tell what requests may ask for.", rest).caps

    def _spec(self, rest: str) -> object:
        return self._about("spec", "Tell how a model speculates, and what that costs.", rest).spec

    def _cache(self, rest: str) -> object:
        return self._about("cache", "Tell what is known of earlier runs.", rest).cache.stats()

    def _queue(self, rest: str) -> Queue:
        return Queue(waiting=tuple(self._about("queue", "List the requests that have not ended.", rest).queue))

    def _timings(self, rest: str) -> Timeline:
        return Timeline(timings=self._about("timings", "Show when what happened in the last request.", rest).timings)

    def _about(self, command: str, description: str, rest: str) -> Any:
        """Return the model that a command is about."""
        return self.find(about_parser(command, description).parse(rest).name, f"%dsv4 {command}")

    def _doctor(self, rest: str) -> object:
        """Return the report; where it can be replaced it is shown as it grows, and nothing is returned."""
        args = doctor_parser().parse(rest)
        model = self.find(args.name, "%dsv4 doctor")
        from dsv4nb.doctor import SECONDS, Report, examine
        from dsv4nb.magics.cell import Interrupted
        from dsv4nb.stream.output import Output

        output = Output({"text/plain": "…"}) if self._replaces() else None

        def show(report: Report) -> None:
            if output is not None:
                output.update({"text/plain": str(report), "text/html": report._repr_html_()})

        try:
            report = examine(model, seconds=SECONDS if args.seconds is None else args.seconds, on_check=show)
        except KeyboardInterrupt:
            raise Interrupted("Stopped; the model can be used on.") from None
        return report if output is None else None

    def _status(self, rest: str) -> Status:
        status_parser().parse(rest)
        return Status(models=tuple(self._present()))


def _html(info: object) -> str:
    show = getattr(info, "_repr_html_", None)
    return str(show()) if show is not None else f"<pre>{escape(str(info))}</pre>"
