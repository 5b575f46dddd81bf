"""What each way of not computing a prompt again is worth: its switch on and off, in turn, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.session.chat import Chat
from dsv4nb.session.reuse import DEFAULT, Policy

_SENTENCE = "Anna went from Paris to Rome on Monday. "

# what a person does -> the switch that it rests on
MOVES: Mapping[str, tuple[str, Callable[[Chat], Generation]]] = {
    "next turn": ("live", lambda chat: chat.send("What is 12 + 30?")),
    "another try": ("anchors", lambda chat: chat.regenerate()),
    "fork": ("live", lambda chat: chat.fork().send("What is 20 + 31?")),
    "edit": ("anchors", lambda chat: chat.edit(-1, "What is 30 + 41?")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One move with its switch on or off.

    Attributes:
        first_token_ms: every sample, in the order taken.
        computed: prompt rows of each sample.
    """

    first_token_ms: tuple[float, ...]
    computed: tuple[int, ...]


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
        lines = [head, f"{'move, switch':<26}{'rows':>6}{'median':>9}   samples, ms"]
        for name, arm in self.arms.items():
            samples = " ".join(f"{value:.1f}" for value in arm.first_token_ms)
            rows = statistics.median_low(arm.computed)
            lines.append(f"{name:<26}{rows:6}{statistics.median(arm.first_token_ms):9.1f}   {samples}")
        return "\n".join(lines)


def reuse(path: str, *, prompt_tokens: int, runs: int) -> Report:
    """Measure every move with its switch on and off, in the order on, off, off, on."""
    order = ("on", "off", "off", "on") * ((runs + 1) // 2)
    samples: dict[str, list[tuple[float, int]]] = {}
    with load(path, name="reuse") as model:
        for name, (switch, move) in MOVES.items():
            for state in order[: 2 * runs]:
                policy = DEFAULT if state == "on" else replace(DEFAULT, live=False, anchors=False, exact=False)
                samples.setdefault(f"{name}, {switch} {state}", []).append(_sample(model, move, policy, prompt_tokens))
    return Report(
        prompt_tokens=prompt_tokens,
        order=order[: 2 * runs],
        arms={
            name: Arm(first_token_ms=tuple(ms for ms, _ in taken), computed=tuple(rows for _, rows in taken))
            for name, taken in samples.items()
        },
    )


def _sample(model: Model, move: Callable[[Chat], Generation], policy: Policy, prompt_tokens: int) -> tuple[float, int]:
    """Make a chat of that length, then move under `policy`; return milliseconds to the first token, and rows."""
    model.cache.clear()
    model.cache.policy = DEFAULT
    chat = model.chat(temperature=0, max_new=4)
    chat.send((_SENTENCE * (prompt_tokens // len(model.encode(_SENTENCE)) + 1)).strip())
    chat.send("Hi!")
    model.cache.policy = policy
    done = move(chat).done
    assert done.timings.first_token_s is not None and done.reuse is not None
    return 1e3 * done.timings.first_token_s, done.reuse.computed
