"""Soak of the server: requests from several threads, cancelled, failing and closed at random; everything is checked.

    python tests/session/soak.py --requests 10000 --seed 0

A server lives for a few dozen requests. Of each request is checked that it ends once, in one state, with one last
event that says so; of each server that its requests start in the order they came, one at a time, each on a state that
holds nothing of another, and that it leaves no thread; of all that they leave no memory. A plan is a function of the
seed, what threads make of it is not: a cancellation may come too late, which is counted and checked like any other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import queue
import random
import statistics
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import EngineDead, EngineError, ModelClosed
from dsv4nb.events import Done, Event, Failed, Generation, PromptUsage, Token, TokenSnapshot
from dsv4nb.session.journal import Journal
from dsv4nb.session.request import Limits, Options, prepare
from dsv4nb.session.server import Server
from dsv4nb.stream.ticket import Ticket
from dsv4nb.testing.fake_engine import FakeEngine, FakeState, FakeTokenizer

PATIENCE_S = 20.0  # nothing here takes a second
SUBMITTERS = 4
CHUNK, VOCABULARY, MAX_SEQ = 8, 512, 512
LONGEST_REPLY = 12
WINDOWS = 10
# left behind by each request, and by all together in late caches of the interpreter; a journal that is kept is 6,000
MOST_BYTES, MOST_CACHED = 32, 4096

Step = Literal["chunk", "forward_rows"]
Cancel = Literal["", "queued", "chunk", "forward_rows", "late"]
Ending = Literal["drained", "closed", "closed twice", "closed by its own thread"]


class Odd(BaseException):
    """An exception that is no Exception."""


# what an engine may raise, and the code of the error that a reader gets
FAULTS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "RuntimeError": (lambda: RuntimeError("the numbers broke"), "engine"),
    "BaseException": (lambda: Odd("odd"), "engine"),
    "Exception(object())": (lambda: Exception(object()), "engine"),
    "EngineError": (lambda: EngineError("told by the engine itself"), "engine"),
    "out of memory": (lambda: RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "overloaded"),
    "device lost": (lambda: RuntimeError("CUDA error: an illegal memory access was encountered"), "engine_dead"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will happen to one request, if nothing else happens to it before.

    Attributes:
        pause_s: before it is submitted.
        is_in_step: whether it waits for its reader after each token.
        cancel, cancel_at: when it is cancelled; the number of the chunk or forward.
        fault, fault_step, fault_at: what is raised, "" for nothing, and where.
    """

    number: int
    n_prompt: int
    max_new: int
    pause_s: float
    is_in_step: bool
    cancel: Cancel
    cancel_at: int
    fault: str
    fault_step: Step
    fault_at: int

    @property
    def prompt(self) -> list[int]:
        """Ids that begin with the number, so that an engine's state tells whose it is."""
        return [*(7 + (self.number >> 8 * i) % 256 for i in range(3)), *itertools.repeat(300, self.n_prompt)]


def number_of(state: FakeState) -> int:
    """Return the number of the plan whose prompt a state holds."""
    return sum((token - 7) << 8 * i for i, token in enumerate(state.prompt[:3]))


def reply(n: int) -> list[int]:
    """Return what the n-th sequence of an engine says: its number, and a little more."""
    letters = [7 + ord("a") + n // 26**i % 26 for i in range(2)]
    return [*letters, *itertools.repeat(7 + ord("."), LONGEST_REPLY - 2)]


def ids_of(events: Sequence[Event]) -> list[int]:
    """Return the ids that were said."""
    return [event.id for event in events if isinstance(event, Token) and event.id is not None]


def plans(n: int, seed: int) -> Iterator[Plan]:
    """Draw what will happen to `n` requests."""
    draw = random.Random(seed)
    steps: tuple[Step, Step] = ("chunk", "forward_rows")
    cancels: tuple[Cancel, ...] = ("", "queued", "late", *steps)
    for number in range(n):
        fails = draw.random() < 0.15
        yield Plan(
            number=number,
            n_prompt=draw.randint(0, 3 * CHUNK),
            max_new=draw.randint(1, LONGEST_REPLY + 2),
            pause_s=draw.choice((0.0, 0.0, 0.002, 0.02)),
            is_in_step=draw.random() < 0.05,
            cancel=draw.choices(cancels, (60, 10, 10, 10, 10))[0],
            cancel_at=draw.randint(0, 2),
            # a lost device ends its server, so it is rare
            fault=draw.choices(tuple(FAULTS), (10, 10, 10, 10, 10, 1))[0] if fails else "",
            fault_step=draw.choice(steps),
            fault_at=draw.randint(0, 2),
        )


@dataclass(slots=True)
class Submitted:
    """A request that a server took.

    Attributes:
        before, after: submitting it began and ended, nanoseconds.
        outcomes: what its listener heard.
    """

    plan: Plan
    before: int
    journal: Journal
    outcomes: list[Generation | Failed]
    after: int = 0


@dataclass(slots=True)
class Watch:
    """Sees every step of an engine: fails it as planned, and has requests cancelled as planned.

    Attributes:
        raised: fault by number of the request.
        wanted: numbers of requests to be cancelled, for another thread.
    """

    plans: dict[int, Plan]
    raised: dict[int, str] = field(default_factory=dict)
    wanted: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)

    def __call__(self, step: str, state: FakeState) -> None:
        plan = self.plans[number_of(state)]
        at = state.pos // CHUNK if step == "chunk" else state.pos - state.n_prompt
        if (plan.cancel, plan.cancel_at) == (step, at):
            self.wanted.put(plan.number)
        if plan.fault and (plan.fault_step, plan.fault_at) == (step, at):
            self.raised[plan.number] = plan.fault
            raise FAULTS[plan.fault][0]()


class Life:
    """One server, from its first request to its last thread."""

    def __init__(self, name: str, plans: Sequence[Plan], ending: Ending, close_after: int) -> None:
        self.watch = Watch({plan.number: plan for plan in plans})
        self.tokens = FakeTokenizer(VOCABULARY)
        self.limits = Limits(max_seq=MAX_SEQ, vocab_size=VOCABULARY, revision="v0731", sampler=SamplerConfig())
        self.engine = FakeEngine(
            *map(reply, range(len(plans))),
            eos=self.tokens.eos_id,
            vocab_size=VOCABULARY,
            max_seq=MAX_SEQ,
            chunk=CHUNK,
            chunk_delay_s=1e-4,
            on_step=self.watch,
        )
        self.server, self.thread_name = Server(self.engine, self.tokens, name), f"dsv4nb-serve-{name}"
        self.plans, self.ending, self.close_after = plans, ending, close_after
        self.submitted: dict[int, Submitted] = {}
        self.counts: Counter[str] = Counter()
        self.refusals: list[str] = []
        self.problems: list[BaseException] = []  # of helper threads

    def run(self) -> Counter[str]:
        """Live, check, and return what was counted."""
        threads = [self._thread(self._submit, self.plans[i::SUBMITTERS]) for i in range(SUBMITTERS)]
        canceller = self._thread(self._cancel)
        if (n_closers := {"closed": 1, "closed twice": 2}.get(self.ending, 0)) > 0:
            self._until(lambda: len(self.engine.states) >= self.close_after or not any(t.is_alive() for t in threads))
            threads += [self._thread(self.server.close) for _ in range(n_closers)]
        for thread in threads:
            self._join(thread)
        for one in self.submitted.values():
            assert one.journal.wait(None, PATIENCE_S), f"{one.plan} hangs {one.journal.state}"
        self.server.close()
        self.watch.wanted.put(None)
        self._join(canceller)
        if self.problems:
            raise self.problems[0]
        self._check()
        return self.counts

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        def kept() -> None:
            try:
                target(*arguments)
            except BaseException as problem:
                self.problems.append(problem)

        thread = threading.Thread(target=kept, daemon=True)
        thread.start()
        return thread

    def _join(self, thread: threading.Thread) -> None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} of {self.ending} hangs"

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"{self.ending} hangs"
            time.sleep(1e-4)

    def _submit(self, plans: Sequence[Plan]) -> None:
        """Submit what one thread submits, then watch a part of it to the end."""
        for plan in plans:
            options = Options(max_new=plan.max_new, temperature=1.0, seed=plan.number)
            request = prepare(None, None, plan.prompt, options, self.tokens, self.limits)
            outcomes: list[Generation | Failed] = []
            time.sleep(plan.pause_s)
            before = time.monotonic_ns()
            try:
                journal = self.server.submit(request, self._listener(outcomes), in_step=plan.is_in_step)
            except (ModelClosed, EngineDead) as refusal:
                self.refusals.append(refusal.code)
                continue
            self.submitted[plan.number] = Submitted(plan, before, journal, outcomes, time.monotonic_ns())
            if plan.cancel == "queued":
                journal.cancel()
        for plan in plans:
            one = self.submitted.get(plan.number)
            if one is not None and (plan.is_in_step or plan.number % 7 == 0):
                seen: list[Event] = []
                for event in Ticket(one.journal).events():
                    seen.append(event)
                    one.journal.taken(len(seen))
                assert seen == one.journal.poll(0)[0], plan

    def _listener(self, outcomes: list[Generation | Failed]) -> Callable[..., None]:
        def heard(outcome: Generation | Failed, events: Sequence[Event]) -> None:
            outcomes.append(outcome)
            if self.ending == "closed by its own thread" and len(self.engine.states) >= self.close_after:
                self.server.close()

        return heard

    def _cancel(self) -> None:
        while (number := self.watch.wanted.get()) is not None:
            self._until(partial(self.submitted.__contains__, number))  # it may run before submit() has returned
            self.submitted[number].journal.cancel()

    def _check(self) -> None:
        started = [number_of(state) for state in self.engine.states]
        assert len(set(started)) == len(started), "a request was started twice"
        self._check_order(started)
        intervals = self.engine.intervals
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(intervals)), "two ran at once"
        assert self.engine.threads <= {self.thread_name} and self.engine.calls["close"] == 1
        assert self.thread_name not in [thread.name for thread in threading.enumerate()]
        assert not self.server._open, "a request was not forgotten"
        for n, number in enumerate(started):
            self._check_state(self.engine.states[n], reply(n), self.submitted[number])
        is_lost = "device lost" in self.watch.raised.values()
        for one in self.submitted.values():
            self._check_end(one, is_lost=is_lost, has_started=one.plan.number in started)
        assert len(self.submitted) + len(self.refusals) == len(self.plans)
        self.counts += Counter(f"refused: {code}" for code in self.refusals)
        self.counts[f"servers {self.ending}"] += 1
        self.counts["servers whose device was lost"] += is_lost

    def _check_order(self, started: Sequence[int]) -> None:
        """Of two requests, one submitted before the other's submission began, the earlier starts first."""
        latest = 0
        for one in map(self.submitted.__getitem__, started):
            assert one.after >= latest, f"{one.plan} was overtaken"
            latest = max(latest, one.before)

    def _check_state(self, state: FakeState, says: list[int], one: Submitted) -> None:
        """A state holds the request's own prompt and reply, as far as they came."""
        prompt, (events, _) = one.plan.prompt, one.journal.poll(0)
        ids = ids_of(events)
        assert state.ledger[: state.n_prompt] == prompt[: state.n_prompt], one.plan
        assert ids == says[: len(ids)], one.plan
        assert state.ledger[state.n_prompt :] == ids[: state.pos - state.n_prompt], one.plan
        assert not ids or state.n_prompt == len(prompt), one.plan

    def _check_end(self, one: Submitted, *, is_lost: bool, has_started: bool) -> None:
        """One state, one last event, one outcome; another cancellation changes nothing."""
        events, is_finished = one.journal.poll(0)
        state = one.journal.state
        if one.plan.cancel == "late":
            one.journal.cancel()
            self.counts["then cancelled after the end"] += 1
        assert is_finished and (one.journal.state, one.journal.poll(0)) == (state, (events, True))
        *_, last = events
        assert has_started == any(isinstance(event, PromptUsage) for event in events), one.plan
        assert [event for event in events if isinstance(event, Done | Failed)] == [last], one.plan
        assert len(one.outcomes) == 1, one.plan
        if isinstance(last, Failed):
            self._check_failure(one, last, is_lost=is_lost)
            return
        assert isinstance(last, Done) and one.plan.number not in self.watch.raised
        ids, snapshots = ids_of(events), [event for event in events if isinstance(event, TokenSnapshot)]
        assert snapshots == [TokenSnapshot(ids=tuple(ids))] == [events[-2]] and last.n_tokens == len(ids), one.plan
        assert one.outcomes == [Ticket(one.journal).result(0)]
        assert has_started or len(events) == 2, one.plan
        if last.stop_reason == "cancelled":
            assert state == "cancelled" and one.journal.is_cancelled
            self.counts[f"cancelled {_phase(events)}"] += 1
        else:
            assert state == "done" and len(ids) == min(one.plan.max_new, LONGEST_REPLY)
            self.counts[f"done: {last.stop_reason}"] += 1

    def _check_failure(self, one: Submitted, last: Failed, *, is_lost: bool) -> None:
        """A request fails with what its own step raised, or because the device was lost before."""
        fault = self.watch.raised.get(one.plan.number)
        assert one.journal.state == "failed" and one.outcomes == [last]
        assert not any(isinstance(event, TokenSnapshot) for event in one.journal.poll(0)[0])
        error = one.journal.error
        assert error is not None and (error.code, str(error)) == (last.code, last.message)
        if fault is None:
            assert is_lost and last.code == "engine_dead", one.plan
            self.counts["failed: after the device was lost"] += 1
            return
        assert last.code == FAULTS[fault][1], (one.plan, last)
        where = "prefill" if one.plan.fault_step == "chunk" else "decode"
        self.counts[f"failed in {where}: {fault}"] += 1


def _phase(events: Sequence[Event]) -> str:
    if any(isinstance(event, Token) for event in events):
        return "in decode"
    return "in prefill" if any(isinstance(event, PromptUsage) for event in events) else "while queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a soak came to.

    Attributes:
        held_bytes: memory in use after each of `WINDOWS` equal parts.
    """

    counts: Counter[str]
    seconds: float
    held_bytes: tuple[int, ...]

    @property
    def requests(self) -> int:
        """How many there were."""
        return sum(n for what, n in self.counts.items() if what.startswith(("done", "cancelled", "failed", "refused")))

    @property
    def growth_per_request(self) -> float:
        """Bytes that a request left behind, the first part aside, in which caches are filled."""
        return (self.held_bytes[-1] - self.held_bytes[0]) / (self.requests * (1 - 1 / WINDOWS))

    def __str__(self) -> str:
        rows = [*((what, f"{n:,}") for what, n in sorted(self.counts.items()))]
        rows += [("requests", f"{self.requests:,}"), ("seconds", f"{self.seconds:.1f}")]
        rows += [("requests per second", f"{self.requests / self.seconds:.0f}")]
        rows += [("bytes left per request", f"{self.growth_per_request:.1f}")]
        held = " ".join(f"{held / 1024:.1f}" for held in self.held_bytes)
        return "\n".join([*(f"{what:<44}{n:>8}" for what, n in rows), f"KiB held after each tenth: {held}"])


def soak(requests: int, seed: int) -> Report:
    """Run `requests` requests and check what became of them.

    Raises:
        AssertionError: something does not hold.
    """
    draw = random.Random(f"lives {seed}")
    to_do = list(plans(requests, seed))
    n_threads, started = threading.active_count(), time.monotonic()
    counts: Counter[str] = Counter()
    held: list[int] = []
    done = lives = 0
    tracemalloc.start()
    try:
        for window in range(1, WINDOWS + 1):
            while done < requests * window // WINDOWS:
                size = min(draw.randint(1, 80), requests * window // WINDOWS - done)
                endings: tuple[Ending, ...] = ("drained", "closed", "closed twice", "closed by its own thread")
                ending = draw.choices(endings, (4, 3, 1, 1))[0]
                life = Life(f"soak{lives}", to_do[done : done + size], ending, close_after=draw.randint(0, size))
                counts += life.run()
                done, lives = done + size, lives + 1
                del life
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert threading.active_count() == n_threads, threading.enumerate()
    report = Report(counts=counts, seconds=time.monotonic() - started, held_bytes=tuple(held))
    # a leak grows in every part; a cache of the interpreter or another thread's may jump once
    growth = statistics.median(after - before for before, after in pairwise(held)) * (WINDOWS - 1)
    assert growth < MOST_BYTES * requests + MOST_CACHED, report
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Soak of the server, on a fake engine.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(soak(arguments.requests, arguments.seed))


if __name__ == "__main__":
    main()
