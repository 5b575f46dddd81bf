"""`%dsv4 bench | doctor`: what takes a while on a loaded model, shown as it grows."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from dsv4nb.magics.cell import Interrupted
from dsv4nb.magics.defaults import check
from dsv4nb.magics.shown import Table, html_of

if TYPE_CHECKING:
    from dsv4nb.bench.spec import Report

_PROMPTS = 3  # of the speculated replies; python -m dsv4nb.bench spec asks more


class Growing:
    """A value that is shown again and again while it becomes complete.

    Args:
        replaces: whether what is shown can be replaced; otherwise it is returned once, at the end.
    """

    def __init__(self, *, replaces: bool) -> None:
        from dsv4nb.stream.output import Output

        self._output = Output({"text/plain": "…"}) if replaces else None

    def show(self, value: object) -> None:
        """Show what there is so far."""
        if self._output is not None:
            self._output.update({"text/plain": str(value), "text/html": html_of(value)})

    def end(self, value: object) -> object:
        """Return what is still to be shown."""
        self.show(value)
        return value if self._output is None else None


def bench(args: Namespace, model: Any, *, replaces: bool) -> object:
    """Measure first token and decode speed, and what speculation makes of it where there is a drafter.

    Raises:
        RequestError: the model has no room for such replies, or refuses the temperature.
        Interrupted: the person did; what was measured is shown.
    """
    from dsv4nb.bench.decode import speed
    from dsv4nb.bench.spec import PROMPTS, compare

    check({"temperature": args.temperature}, model)
    growing = Growing(replaces=replaces)
    facts = [
        ("model", f"{model.name} on {model.info.device}"),
        ("asked", f"{args.new} tokens, {args.runs} run{'s' * (args.runs != 1)}"),
    ]
    try:
        growing.show(Table(facts=facts))
        first, rate = speed(model, new=args.new, runs=args.runs)
        facts += [("first token", f"{first} s"), ("decode", f"{rate} tok/s, plain")]
        growing.show(Table(facts=facts))
        if model.limits.spec is None:
            facts.append(("speculated", f"not: {model.limits.no_drafter}"))
        else:
            facts += _speculated(
                compare(model, PROMPTS[:_PROMPTS], temperature=args.temperature, new=args.new, runs=args.runs)
            )
    except KeyboardInterrupt:
        if len(facts) > 2 and not replaces:
            print(Table(facts=facts))
        done = "what was measured is shown" if len(facts) > 2 else "nothing was measured"
        raise Interrupted(f"Stopped; {done}, and the model can be used on.") from None
    return growing.end(Table(facts=facts))


def _speculated(report: Report) -> list[tuple[str, str]]:
    told = dict(report.rows())
    return [
        ("speculated", f"{told['speculated']} the {report.plain_tok_s.median:.3g} of the same prompts"),
        ("a round", f"{told['tokens a round']} tokens"),
        ("accepted", told["accepted"]),
        ("draft", told["draft"]),
        ("verify", told["verify"]),
    ]


def doctor(args: Namespace, model: Any | None, *, replaces: bool) -> object:
    """Return the report of the checks; where it can be replaced it is shown as it grows, and nothing is returned.

    Without a model it tells what the machine and the notebook are.

    Raises:
        Interrupted: the person did; the checks that ended stay shown where they can be replaced.
    """
    from dsv4nb.doctor import SECONDS, examine, facts

    if model is None:
        return Table(facts=[*facts(), ("model", "none is loaded; %dsv4 load toy, and the doctor checks its promises")])
    growing = Growing(replaces=replaces)
    try:
        seconds = SECONDS if args.seconds is None else args.seconds
        report = examine(model, seconds=seconds, on_check=growing.show)
    except KeyboardInterrupt:
        raise Interrupted("Stopped; the model can be used on.") from None
    return report if not replaces else None
