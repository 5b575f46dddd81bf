from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.events import Done, Event, PromptUsage, StopReason, Timings, Token


def done(n_tokens: int, stop_reason: StopReason = "stop") -> Done:
    return Done(
        stop_reason=stop_reason,
        n_tokens=n_tokens,
        n_prompt=5,
        n_cached=0,
        queue_s=0.0,
        elapsed_s=0.5,
        config=SamplerConfig(),
        route="plain_greedy",
        timings=Timings(queue_s=0.0, prepare_s=0.0),
    )


@dataclass
class Tape:
    """A ticket whose events are put in by hand."""

    state: str = "queued"
    events: list[Event] = field(default_factory=list)
    finished: bool = False
    asked: int = 0

    def poll(self, start: int) -> tuple[Sequence[Event], bool]:
        self.asked += 1
        return self.events[start:], self.finished

    def start(self) -> None:
        self.state = "running"
        self.events.append(PromptUsage(n_prompt=5, n_cached=0))

    def say(self, *texts: str, channel: str = "content") -> None:
        for text in texts:
            self.events.append(Token(id=len(self.events), text=text, channel=channel))  # type: ignore[arg-type]

    def end(self, stop_reason: StopReason = "stop") -> None:
        n = sum(isinstance(event, Token) for event in self.events)
        self.events.append(done(n, stop_reason))
        self.state, self.finished = "done", True


@pytest.fixture
def tape() -> Callable[[], Tape]:
    return Tape
