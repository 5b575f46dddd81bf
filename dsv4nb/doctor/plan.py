"""A check as a list of comparisons, carried out as far as the time goes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsv4nb.doctor.report import Check, Outcome
from dsv4nb.engine.protocol import Cancelled, Engine
from dsv4nb.errors import PromptTooLong
from dsv4nb.handle import Model

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One comparison.

    Attributes:
        counts: how much was compared, by its name in the singular.
        difference: the first one, with its place; "" when there is none.
    """

    counts: Mapping[str, int]
    difference: str = ""


Comparison = Callable[[], Compared]


class Skip(Exception):
    """There is nothing to compare; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A check before it is carried out.

    Attributes:
        told: what is held against what.
        weight: its share of the time.
        comparisons: lists them for a model; nothing is run. It raises `Skip` when there is nothing to compare. Those
            that come first say most, since the last ones may fall to the clock.
    """

    name: str
    told: str
    weight: int
    comparisons: Callable[[Model], Sequence[Comparison]]


def carry_out(plan: Plan, model: Model, until: float) -> Check:
    """Compare until all is compared or the time is over; errors become part of the check, an interrupt is raised.

    Args:
        until: reading of the monotonic clock after which no comparison is started.
    """
    began = time.monotonic()
    counts: Counter[str] = Counter()
    differences: list[str] = []
    done, total, is_over = 0, 0, False

    def check(result: Outcome, detail: str) -> Check:
        numbers = ", ".join(counted(n, noun) for noun, n in counts.items() if n)
        told = [f"{plan.told}: {numbers}" if numbers else plan.told]
        if 0 < done < total:
            told.append(f"{done} of {total} comparisons{' in the time there was' if is_over else ''}")
        seconds = time.monotonic() - began
        return Check(name=plan.name, compared="; ".join(told), result=result, detail=detail, seconds=seconds)

    try:
        comparisons = plan.comparisons(model)
        total = len(comparisons)
        for compare in comparisons:
            is_over = time.monotonic() >= until
            if is_over:
                break
            found = compare()
            counts.update(found.counts)
            done += 1
            differences += [found.difference] if found.difference else []
    except (Skip, PromptTooLong) as skipped:
        return check("skipped", str(skipped))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return check("failed", f"{said} (after a difference: {differences[0]})" if differences else said)
    if differences:
        return check("failed", f"{len(differences)} of {done} comparisons differ; the first: {differences[0]}")
    if not done:
        return check("skipped", "no time was left; give it more seconds")
    return check("ok", "")


def on_engine(model: Model, job: Callable[[Engine, Callable[[], None]], Result]) -> Result:
    """Run `job` on the serving thread, behind the requests that are in the queue; an interrupt ends it and is raised.

    Args:
        job: gets the engine, and a function that it calls before each forward: it raises after an interrupt.
    """
    is_over = threading.Event()

    def go_on() -> None:
        if is_over.is_set():
            raise Cancelled

    try:
        return model._parts.server.do(lambda engine, prefixes: job(engine, go_on))
    except BaseException:
        is_over.set()
        raise


def counted(n: int, noun: str) -> str:
    """Return a number with what it counts."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun[:-1]}ies" if noun.endswith("ly") else f"{n:,} {noun}s"
