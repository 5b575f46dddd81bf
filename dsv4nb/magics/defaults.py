"""What a `%%dsv4` cell asks for that does not say: `%dsv4 set`, below it `%config Dsv4nb`, below it the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from dsv4nb.errors import Dsv4Error
from dsv4nb.magics.arguments import COMMANDS, Parser, given, near, words_of
from dsv4nb.magics.options import CELL, Option, each
from dsv4nb.magics.shown import Setting, Settings

if TYPE_CHECKING:
    from dsv4nb.session.request import Limits

_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_WHERE = "%dsv4 set"


class Defaults:
    """The defaults of one notebook's cells.

    Args:
        configured: what `%config Dsv4nb` says, by the names of `Model.generate`.
    """

    def __init__(self, configured: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._configured = configured
        self._chosen: dict[str, Any] = {}

    def obey(self, rest: str, model: Any) -> Settings:
        """Carry out the line of `%dsv4 set`.

        Args:
            model: says what it refuses; None checks what every model refuses.

        Raises:
            UsageError, Dsv4Error: something is not understood or refused; nothing was changed.
        """
        parser = COMMANDS["set"].parser()
        args = parser.parse_words(_as_options(words_of(rest, _WHERE), parser))
        kept = dict(self._chosen)
        if args.reset is not None:
            for name in [_named(word).field for word in args.reset] or list(kept):
                kept.pop(name, None)
        kept |= given(args, CELL)
        check({**self._configured(), **kept}, model)
        self._chosen = kept
        return self.settings(model)

    def settings(self, model: Any) -> Settings:
        """Return what later cells ask for, and who says so."""
        sampler = None if model is None else model.limits.sampler
        known = []
        for option in each(CELL):
            for values, origin in ((self._chosen, "set"), (self._configured(), "%config")):
                if option.field in values:
                    known.append(Setting(name=_word(option), value=_told(values[option.field]), origin=origin))
                    break
            else:
                if sampler is not None and option.field != "seed" and hasattr(sampler, option.field):
                    value = _told(getattr(sampler, option.field))
                    known.append(Setting(name=_word(option), value=value, origin="model"))
        return Settings(settings=tuple(known))

    def under(
        self, line: Mapping[str, Any], *, is_thinking: bool = False, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the options of a request whose line says `line`; what the line makes void is left out.

        Args:
            is_thinking: whether the request thinks if nobody says anything.
            without: defaults that have no place in it.
        """
        below = {name: value for name, value in {**self._configured(), **self._chosen}.items() if name not in without}
        if not {"thinking": is_thinking, **below, **line}["thinking"]:
            below.pop("effort", None)
        if line.get("spec") is False:
            below = {name: value for name, value in below.items() if not name.startswith("spec")}
        elif any(name.startswith("spec_") for name in line):
            below.pop("spec", None)
        return {**below, **line}

    def origin(self, name: str | None, line: Mapping[str, Any]) -> str:
        """Return where a refused value came from if not from the line, as a sentence; "" if from the line."""
        if name is None or name in line:
            return ""
        if name in self._chosen:
            return f"%dsv4 set said so; %dsv4 set --reset {name} takes it back."
        return f"%config Dsv4nb.{name} says so." if name in self._configured() else ""


def check(options: Mapping[str, Any], model: Any = None) -> None:
    """Refuse what a request with these options would be refused for.

    Args:
        model: that would run it; None checks what every model refuses.

    Raises:
        Dsv4Error: in the words of the request.
    """
    from dsv4nb.session.request import Options, check_options, override

    check_options(override(Options(), options, _WHERE), _any_limits() if model is None else model.limits)


def _any_limits() -> Limits:
    """Return limits that refuse nothing which some model may take."""
    from dsv4nb.config import SamplerConfig, SpecConfig
    from dsv4nb.session.request import Limits

    widest = 1 << 40
    return Limits(
        max_seq=widest,
        vocab_size=1,
        revision="v0731",
        sampler=SamplerConfig(),
        spec=SpecConfig(),
        block_size=widest,
    )


def refusal(name: str, value: object) -> str:
    """Return why no model takes a value, "" when one may."""
    try:
        check({name: value})
    except Dsv4Error as refused:
        return str(refused)
    return ""


def _as_options(words: Sequence[str], parser: Parser) -> list[str]:
    """Return NAME VALUE pairs as options; a line that begins with an option has its options already."""
    if not words or words[0].startswith("-"):
        return list(words)
    if len(words) % 2:
        raise UsageError(f"{_WHERE}: {words[-1]!r} has no value; pass NAME VALUE pairs, or options such as --seed 7.")
    found = []
    for name, value in zip(words[::2], words[1::2], strict=True):
        option = _named(name)
        if option.type is not bool:
            found.append(f"{option.flag}={value}")
            continue
        if value.lower() not in _SWITCH:
            raise UsageError(f"{_WHERE}: {name} is {value!r}; it must be on or off.")
        found.append(option.flag if _SWITCH[value.lower()] else option.flag.replace("--", "--no-", 1))
    return found


def _named(name: str) -> Option:
    """Return the option that a person means, whichever way the name is spelt."""
    word = name.removeprefix("--").replace("_", "-")
    options = {_word(option): option for option in each(CELL)}
    if word not in options:
        raise UsageError(f"{_WHERE}: {name!r} is unknown{near(word, options)} Valid: {', '.join(options)}.")
    return options[word]


def _word(option: Option) -> str:
    return option.flag.removeprefix("--")


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):  # a window
        return ":".join(map(str, value))
    return ", ".join(map(repr, value)) if isinstance(value, list) else str(value)
