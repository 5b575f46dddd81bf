"""The rounds of speculation as a person sees them in a notebook: live, and afterwards as data to ask.

Comm handlers may run on a subshell's thread, so they only leave a job to the pump; everything that the page is told
comes from the pump's thread. Rounds are messages, never traits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.events import Generation
from dsv4nb.rounds import Costs, Rounds
from dsv4nb.stream.frames import Pollable, Pump
from dsv4nb.widgets import following, protocol
from dsv4nb.widgets.acceptance_figures import figures_of, sweep_points, wire_rounds
from dsv4nb.widgets.acceptance_saved import SavedRounds
from dsv4nb.widgets.acceptance_story import Reader, Story, TurnLike, story_of_rounds, story_of_turn
from dsv4nb.widgets.following import NO_TURN, Following

_STATIC = Path(__file__).parent / "static"

FIGURES_S = 0.5  # between two counts of the totals while a reply runs
FIGURES_SHARE = 0.02  # of a core, for counting them again: a long reply is counted more seldom


@runtime_checkable
class Chat(following.Chat, Protocol):
    """What the panel asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    @property
    def turns(self) -> Sequence[TurnLike]: ...
    def rewind(self, turn: int | None = None, *, round: int | None = None) -> None: ...


class AcceptancePanel(Following[Story]):
    """Shows rounds of speculation in any number of views.

    Args:
        source: whose rounds. A chat: those of the turn that runs, else of any turn; a ticket: as they come; a
            finished generation, or rounds alone.
        costs: what drafting and verifying take, for the milliseconds of another window; those of `Model.spec`.
        title: stands above the rounds.
        pump: delivers the stream, the kernel's own if None.

    Raises:
        RequestError: `source` is none of these.
    """

    _esm = _STATIC / "acceptance.js"
    _css = _STATIC / "acceptance.css"

    from_page, from_kernel = protocol.ROUNDS_FROM_PAGE, protocol.ROUNDS_FROM_KERNEL
    saved_class, name = "dsv4-rounds-saved", "Speculation"

    _chat: Chat | None

    def __init__(
        self,
        source: Chat | Pollable | Generation | Rounds,
        *,
        costs: Costs | None = None,
        title: str = "Speculation",
        pump: Pump | None = None,
    ) -> None:
        chat, story, ticket = _parts(source)
        self._costs, self._sent, self._figures_due = costs, 0, 0.0
        do = {"rewind": self._do_rewind, "sweep": self._do_sweep}
        super().__init__(chat, story, ticket, do, title=title, pump=pump)

    # what the page is told, on the pump's thread

    def _of_turn(self, turn: TurnLike | None) -> Story:
        return Story() if turn is None else story_of_turn(turn)

    def _of_run(self, ticket: Pollable, user: str) -> Reader:
        return Reader(ticket, user)

    def _size(self, turn: TurnLike) -> int:
        return len(turn.rounds)

    def _news(self, *, is_shown: bool) -> None:
        if is_shown and len(self._shown.rounds) > self._sent:
            self._say("frame", run=self._run, start=self._sent, rounds=self._fresh(), figures=self._due_figures())

    def _ended(self) -> None:
        figures = self._figures(time.monotonic())
        self._say("frame", run=self._run, start=self._sent, rounds=self._fresh(), figures=figures)
        self._say("ended", run=self._run, note=self._shown.note, rewinds=self._rewinds)

    def _fresh(self) -> list[list[Any]]:
        fresh = wire_rounds(self._shown, self._sent)
        self._sent += len(fresh)
        return fresh

    def _due_figures(self) -> dict[str, Any] | None:
        began = time.monotonic()
        return self._figures(began) if began >= self._figures_due else None

    def _figures(self, began: float) -> dict[str, Any]:
        figures = figures_of(self._shown.rounds).message()
        done = time.monotonic()
        self._figures_due = done + max(FIGURES_S, (done - began) / FIGURES_SHARE)
        return figures

    def _snapshot(self) -> None:
        story, self._sent = self._shown, 0
        rounds = self._fresh()
        self._say(
            "snapshot",
            run=self._run,
            label=story.label,
            note=story.note,
            live=story.is_live,
            rewinds=self._rewinds,
            mode=story.mode,
            rounds=rounds,
            figures=self._figures(time.monotonic()),
        )

    @property
    def _rewinds(self) -> bool:
        """Whether what is shown is a chat's, which can go back to one of its rounds."""
        return self._chat is not None and (self._shown.turn is not None or self._shown.is_live)

    def _do_rewind(self, command: dict[str, Any]) -> None:
        if self._chat is None:
            raise RequestError("these rounds are of no chat; there is nothing to rewind", param="round")
        if self._chat.is_busy or self._shown.is_live:
            raise ChatBusy
        place = self._place()
        if command["run"] != self._run or place == NO_TURN:
            raise RequestError("this reply is no longer shown, or the chat is on another branch", param="round")
        self._chat.rewind(place + 1, round=command["round"])
        self._follows = True
        self._show(self._latest())

    def _do_sweep(self, command: dict[str, Any]) -> None:
        if command["run"] == self._run:
            work = partial(self._sweep, self._run, Rounds(self._shown.rounds))
            # 50 us a round, half a second for ten thousand: the pump has others to serve
            threading.Thread(target=work, name="dsv4nb-sweep", daemon=True).start()

    def _sweep(self, run: int, rounds: Rounds) -> None:
        """On a thread of its own."""
        points, note = sweep_points(rounds, self._costs)
        self._pump.call(partial(self._say_if_shown, run, "sweep", n=len(rounds), points=points, note=note))

    def _say_if_shown(self, run: int, kind: str, **fields: Any) -> None:
        if self.comm is not None and run == self._run:
            self._say(kind, run=run, **fields)

    # what a saved notebook keeps

    def saved(self) -> SavedRounds:
        """Return what is shown, as a value that can be read without a kernel."""
        story = self._shown
        return SavedRounds(title=self.title, label=story.label, note=story.note, rounds=tuple(story.rounds))


def _parts(source: object) -> tuple[Chat | None, Story, Pollable | None]:
    match source:
        case Rounds():
            return None, story_of_rounds(source), None
        case Generation():
            return None, story_of_rounds(source.rounds), None
        case Chat():
            turns = source.turns
            return source, story_of_turn(turns[-1]) if turns else Story(), None
        case _ if callable(getattr(source, "poll", None)):
            return None, Story(is_live=True), source  # type: ignore[return-value]
    what = "a chat, a ticket, a generation or rounds"
    raise RequestError(f"source is a {type(source).__name__}; it must be {what}", param="source")
