"""Faults at every step of a turn: the chat has its old or its new history, whole, and answers as a fresh process does.

    python tests/contracts/faults.py --model toy --seed 0
    python tests/contracts/faults.py --model tiny --seed 1 --cases 100

Of the tiny models those with a seed of 1 or 2 modulo 4 have a drafter.

For each kind of turn the calls of each place (places.py) are counted. Then the turn is run again and again, and each
time one of these calls fails, before it did anything or when it had done all, or the turn is cancelled there. After
each:

- the history is the one before, or that with the whole new turn; no turn of the tree was changed;
- every snapshot that was there is there, and no block of entries is held by anything else;
- the next turn gives the ids that another engine gives for the same messages, cold, greedy and by a seed;
- all caches have the digest of a cold run on that engine;
- with the chats and the caches gone, no block is left.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from models import KINDS, WORDS, opened, printable
from places import PLACES, Fault, Gate, When, gated

from dsv4nb.engine.blocks import BlockTable
from dsv4nb.errors import Dsv4Error, EngineError, Overloaded
from dsv4nb.events import Generation
from dsv4nb.model import Model
from dsv4nb.session.chat import Chat
from dsv4nb.session.reuse import Policy

EAGER = Policy(suffix_limit=0, prefix_floor=1, host_floor=8)  # takes every prefix, however short
HOST = Policy(suffix_limit=0, prefix_floor=1, host_floor=8, anchors=False, live=False)

INDICES = 6  # calls of one place that fail in one kind of turn, at most: the first, the last, and others at random
LATE = ("dump", "release of a state", "release of a snapshot")  # fail when what the turn leaves is kept already
LONG = {"toy": 520, "tiny": 110}  # words that take three chunks


def words(n: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def batch(model: Model, chat: Chat, long: int) -> list[Generation]:
    """Three prompts of one beginning: it is captured on the way."""
    return model.generate_batch([f"{words(30, 5)} {name}" for name in WORDS[:3]], max_new=3, temperature=0)


# what is done to a chat of two turns; only the first five change it
TURNS: dict[str, Callable[[Model, Chat, int], list[Generation]]] = {
    "next": lambda model, chat, long: [chat.send(words(5, 2))],
    "long": lambda model, chat, long: [chat.send(words(long, 3), max_new=2)],
    "regenerate": lambda model, chat, long: [chat.regenerate()],
    "edit": lambda model, chat, long: [chat.edit(0, words(12, 3))],
    "from host": lambda model, chat, long: [chat.edit(1, words(12, 4))],
    "fork": lambda model, chat, long: [chat.fork().send(words(5, 4))],
    "batch": batch,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of one place in one kind of turn, and how it fails."""

    turn: str
    place: str
    at: int
    when: When
    fault: Fault


@dataclass(slots=True)
class Bench:
    """A model to break, and another one of the same weights to compare with.

    Attributes:
        known: what the fresh one said; it says the same every time.
    """

    kind: str
    model: Model
    fresh: Model
    options: dict[str, Any]
    known: dict[Any, Any] = field(default_factory=dict)

    def cases(self, rng: random.Random) -> Iterator[Case]:
        """Count the calls of each place in each kind of turn, and say which are to fail; each place in every way."""
        for turn in TURNS:
            chat, gates = self.begin(turn), {name: Gate() for name in PLACES}
            with ExitStack() as stack:
                for name, gate in gates.items():
                    stack.enter_context(gated(PLACES[name], self.model, gate))
                TURNS[turn](self.model, chat, LONG[self.kind])
                self.wait()
            for name, gate in gates.items():
                place, n = PLACES[name], gate.calls
                spots = list({0, n - 1, *rng.sample(range(n), min(n, INDICES - 2))}) if n else []
                ways = list(itertools.product(place.whens, place.faults))
                rng.shuffle(spots)
                for i in range(max(len(spots), len(ways)) if n else 0):
                    when, fault = ways[i % len(ways)]
                    yield Case(turn=turn, place=name, at=spots[i % len(spots)], when=when, fault=fault)

    def begin(self, turn: str) -> Chat:
        """Return a chat of two turns; nothing but it is known."""
        self.forget()
        self.model.cache.policy = EAGER
        chat = self.model.chat(**self.options)
        chat.send(words(30, 0))
        chat.send(words(3, 1))
        if turn == "from host":
            self.model.cache.policy = HOST
        return chat

    def forget(self) -> None:
        """Forget every run: no snapshots, nothing in host memory, no block in use, none in store, no broken drafter."""
        self.model.cache.clear()
        self.model._parts.server.speculator.fault = ""
        gc.collect()
        for pool in self.model.engine._pools:  # type: ignore[attr-defined]
            assert pool.in_use == 0, "blocks were left"
            pool.__init__(pool.width)

    def run(self, case: Case) -> str:
        """Break a turn, check what is left, and return how the turn ended."""
        chat, gate = self.begin(case.turn), Gate(case.at, case.when, case.fault)
        branches, messages = chat.branches, chat.messages
        anchors = {anchor.ids for anchor in self.model.cache._anchors.committed}
        with gated(PLACES[case.place], self.model, gate):
            try:
                replies = TURNS[case.turn](self.model, chat, LONG[self.kind])
                outcome = "cancelled" if "cancelled" in {reply.stop_reason for reply in replies} else "done"
            except Overloaded:
                outcome = "no memory"
            except EngineError:
                outcome = "failed"
            self.wait()
        assert gate.is_hit, "the place was not reached"
        check_tree(branches, messages, chat)
        known = {anchor.ids for anchor in self.model.cache._anchors.committed}
        assert anchors <= known, "a snapshot is gone"
        is_late = case.place in LATE or (case.place, case.when) == ("kept", "after")
        if outcome in ("failed", "no memory") and case.turn != "batch" and not is_late:
            assert known == anchors, "a snapshot of a failed turn is there"
        self.check_blocks()
        self.check_next(chat)
        self.forget()
        return outcome

    def wait(self) -> None:
        """Wait until the serving thread has let go of the last run."""
        self.model._parts.server.do(lambda engine, prefixes: None)

    def check_blocks(self) -> None:
        """Entries are held by the anchors' snapshots alone; these are whole, and none is pending."""
        gc.collect()
        anchors = self.model.cache._anchors
        assert anchors.pending == (), "a snapshot is pending"
        held = defaultdict(set)
        for anchor in anchors.committed:
            assert not anchor.snapshot.is_released and anchor.snapshot.pos == len(anchor.ids)  # type: ignore[attr-defined]
            for _, part in anchor.snapshot.parts:  # type: ignore[attr-defined]
                if isinstance(part, BlockTable):
                    held[id(part.pool)].update(part.blocks)
        for pool in self.model.engine._pools:  # type: ignore[attr-defined]
            assert pool.in_use == len(held[id(pool)]), "something else holds blocks"

    def check_next(self, chat: Chat) -> None:
        """The next turn, and all caches that are there then, are those of a cold run."""
        self.model.cache.policy = EAGER
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
            reply = chat.fork().send("And then?", **options)
            assert reply.ids == self.cold(chat.messages, options).ids, options
        self.wait()
        for anchor in self.model.cache._anchors.committed:
            assert self.digest(self.model, anchor.ids, anchor.snapshot) == self.digest(self.fresh, anchor.ids)

    def cold(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Generation:
        """Return what the fresh model says to the same messages, from nothing."""
        key = repr((messages, options))
        if key not in self.known:
            self.fresh.cache.clear()
            self.known[key] = self.fresh.chat(messages=messages, **self.options).send("And then?", **options)
        reply: Generation = self.known[key]
        assert reply.done.n_cached == 0
        return reply

    def digest(self, model: Model, ids: tuple[int, ...], snapshot: Any = None) -> str:
        """Return the digest of a snapshot, or of a cold run of `ids`."""
        key = ids if snapshot is None else None
        if key not in self.known:

            def digest(engine: Any, prefixes: object) -> str:
                state = engine.new_state() if snapshot is None else engine.restore(snapshot)
                if snapshot is None:
                    engine.prefill(state, ids)
                found: str = state.digest()
                engine.release(state)
                return found

            found = model._parts.server.do(digest)
            if key is None:
                return found
            self.known[key] = found
        said: str = self.known[key]
        return said


def check_tree(branches: Any, messages: list[dict[str, Any]], chat: Chat) -> None:
    """Every turn that was there is there, and one new turn at most: whole, or a failed one without messages."""
    now = chat.branches
    new = now.nodes[len(branches.nodes) :]
    assert now.nodes[: len(branches.nodes)] == branches.nodes and len(new) <= 1 and not chat.is_busy
    if not new:
        assert now.head is branches.head and chat.messages == messages
        return
    (node,) = new
    assert now.head is node and chat.messages == [dict(m) for n in node.path() for m in n.messages]
    is_told = node.turn.error is None  # a turn that was stopped is told, with the text that it had
    assert [m["role"] for m in node.messages] == ["user", "assistant"] * is_told, node
    assert is_told or node.parent is not branches.head or chat.messages == messages


def table(outcomes: dict[tuple[str, str, str], Counter[str]]) -> str:
    """Return the outcomes as text, a row for each place and fault."""
    lines = [f"{'place':<38}{'when':<8}{'fault':<11}{'times':>5}  how the turn ended"]
    places, faults = list(PLACES), get_args(Fault)
    for (place, when, fault), counts in sorted(
        outcomes.items(), key=lambda row: (places.index(row[0][0]), row[0][1] == "after", faults.index(row[0][2]))
    ):
        ended = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        lines.append(f"{place:<38}{when:<8}{fault:<11}{sum(counts.values()):5}  {ended}")
    return "\n".join(lines)


def run(kind: str, seed: int, most: int) -> tuple[dict[tuple[str, str, str], Counter[str]], int]:
    """Break turns; return how they ended by place, moment and fault, and how many cases there were to choose from.

    Args:
        most: cases, drawn from all; 0 runs all.
    """
    rng = random.Random(seed)
    outcomes: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(kind, Path(folder), seed, name="broken", host_cache_mib=64) as model,
        opened(kind, Path(folder), seed, name="fresh") as fresh,
    ):
        options: dict[str, Any] = {"max_new": 4, "temperature": 0}
        if kind == "tiny":
            options["logit_bias"] = printable(model)
        bench = Bench(kind, model, fresh, options)
        cases = list(bench.cases(rng))
        for case in rng.sample(cases, most) if most else cases:
            try:
                outcomes[case.place, case.when, case.fault][bench.run(case)] += 1
            except (AssertionError, Dsv4Error):
                sys.stderr.write(f"{case} of seed {seed}\n")
                raise
    return outcomes, len(cases)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Break turns at every step.")
    parser.add_argument("--model", choices=KINDS, default="toy")
    parser.add_argument("--cases", type=int, default=0, help="so many, drawn at random; all by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    outcomes, n_cases = run(args.model, args.seed, args.cases)
    print(table(outcomes))
    n_run = sum(sum(counts.values()) for counts in outcomes.values())
    print(
        f"{n_run} of {n_cases} cases on {args.model}, seed {args.seed}, {time.monotonic() - started:.0f} s: all whole"
    )


if __name__ == "__main__":
    main()
