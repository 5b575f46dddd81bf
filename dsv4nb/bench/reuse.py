"""What each way of not computing a prompt again is worth: its switch on and off, in turn, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.session.chat import Chat
from dsv4nb.session.reuse import DEFAULT, Policy, common_prefix

_SENTENCE = "Anna went from Paris to Rome on Monday. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a person does with a chat.

    Attributes:
        switch: what it rests on.
        turns: of the chat, which has the same length in tokens however many there are.
    """

    switch: str
    act: Callable[[Chat], Generation]
    turns: int = 2


MOVES: Mapping[str, Move] = {
    "next turn": Move(switch="live", act=lambda chat: chat.send("What is 12 + 30?")),
    "another try": Move(switch="anchors", act=lambda chat: chat.regenerate()),
    "fork": Move(switch="live", act=lambda chat: chat.fork().send("What is 20 + 31?")),
    "edit": Move(switch="anchors", act=lambda chat: chat.edit(-1, "What is 30 + 41?")),
    "edit 3 of 20": Move(switch="anchors", act=lambda chat: chat.edit(2, "What is 30 + 41?"), turns=20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One move with its switch on or off.

    Attributes:
        first_token_ms: every sample, in the order taken.
        computed: prompt rows of each sample.
        new: prompt rows that no earlier run had computed; what reuse cannot spare.
        copied_bytes: of the snapshot that each sample went on from.
    """

    first_token_ms: tuple[float, ...]
    computed: tuple[int, ...]
    new: tuple[int, ...]
    copied_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Milliseconds to the first token.

    Attributes:
        order: of the arms in each round: on, off, off, on.
        arms: (move, switch, "on" or "off") -> samples.
    """

    prompt_tokens: int
    order: tuple[str, ...]
    arms: Mapping[str, Arm]

    def __str__(self) -> str:
        head = f"first token at about {self.prompt_tokens} tokens, arms in turn: {', '.join(self.order)}"
        lines = [head, f"{'move, switch':<26}{'new':>6}{'rows':>6}{'copied':>10}{'median':>9}   samples, ms"]
        for name, arm in self.arms.items():
            new, rows, copied = map(statistics.median_low, (arm.new, arm.computed, arm.copied_bytes))
            samples = " ".join(f"{value:.1f}" for value in arm.first_token_ms)
            median = statistics.median(arm.first_token_ms)
            lines.append(f"{name:<26}{new:6}{rows:6}{copied / 2**20:6.1f} MiB{median:9.1f}   {samples}")
        return "\n".join(lines)


def reuse(path: str, *, prompt_tokens: int, runs: int) -> Report:
    """Measure every move with its switch on and off, in the order on, off, off, on."""
    order = ("on", "off", "off", "on") * ((runs + 1) // 2)
    arms: dict[str, Arm] = {}
    with load(path, name="reuse") as model:
        for name, move in MOVES.items():
            samples: dict[str, list[tuple[float, int, int, int]]] = {"on": [], "off": []}
            for state in order[: 2 * runs]:
                policy = DEFAULT if state == "on" else replace(DEFAULT, live=False, anchors=False, exact=False)
                samples[state].append(_sample(model, move, policy, prompt_tokens))
            for state, taken in samples.items():
                ms, computed, new, copied = zip(*taken, strict=True)
                arms[f"{name}, {move.switch} {state}"] = Arm(
                    first_token_ms=ms, computed=computed, new=new, copied_bytes=copied
                )
    return Report(prompt_tokens=prompt_tokens, order=order[: 2 * runs], arms=arms)


def _sample(model: Model, move: Move, policy: Policy, prompt_tokens: int) -> tuple[float, int, int, int]:
    """Make a chat of that length, then move under `policy`.

    Returns:
        Milliseconds to the first token, rows computed, rows that nobody had computed, bytes copied.
    """
    model.cache.clear()
    model.cache.policy = DEFAULT
    chat = model.chat(temperature=0, max_new=2)
    turn = _text(model, prompt_tokens // (move.turns - 1))
    said = [chat.send(turn) for _ in range(move.turns - 1)]
    said.append(chat.send("Hi!"))
    model.cache.policy = policy
    with _copying(model) as copied:
        reply = move.act(chat)
    done, prompt = reply.done, reply.recipe.prompt
    assert done.timings.first_token_s is not None and done.reuse is not None
    known = max(common_prefix(prompt, earlier.all_ids) for earlier in said)
    return 1e3 * done.timings.first_token_s, done.reuse.computed, len(prompt) - known, sum(copied)


def _text(model: Model, tokens: int) -> str:
    """Return so many tokens of text, or a sentence more."""
    many = 16
    return (_SENTENCE * (tokens * many // len(model.encode(_SENTENCE * many)) + 1)).strip()


@contextmanager
def _copying(model: Model) -> Iterator[list[int]]:
    """Yield the bytes of the snapshots that are restored meanwhile."""
    engine: Any = model.engine
    copied: list[int] = []
    restore = engine.restore

    def noting(snapshot: Any) -> Any:
        copied.append(snapshot.nbytes)
        return restore(snapshot)

    engine.restore = noting
    try:
        yield copied
    finally:
        del engine.restore
