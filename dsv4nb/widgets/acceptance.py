"""The rounds of speculation as a person sees them in a notebook: live, and afterwards as data to ask.

Comm handlers may run on a subshell's thread, so they only leave a job to the pump; everything that the page is told
comes from the pump's thread. Rounds are messages, never traits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.events import Generation
from dsv4nb.rounds import Costs, Rounds
from dsv4nb.stream.frames import Ended, News, Pollable, Pump, Watch, shared_pump
from dsv4nb.widgets import protocol
from dsv4nb.widgets.acceptance_figures import figures_of, sweep_points, wire_rounds
from dsv4nb.widgets.acceptance_saved import SavedRounds
from dsv4nb.widgets.acceptance_story import Reader, Story, TurnLike, story_of_rounds, story_of_turn
from dsv4nb.widgets.orders import Orders
from dsv4nb.widgets.panel import Panel, finish

_STATIC = Path(__file__).parent / "static"

FIGURES_S = 0.5  # between two counts of the totals while a reply runs
FIGURES_SHARE = 0.02  # of a core, for counting them again: a long reply is counted more seldom
LISTED = 200  # turns to choose from, the latest ones
NO_TURN = -1


@runtime_checkable
class Chat(Protocol):
    """What the panel asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    @property
    def turns(self) -> Sequence[TurnLike]: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def ticket(self) -> Any: ...
    def rewind(self, turn: int | None = None, *, round: int | None = None) -> None: ...
    def on_submit(self, callback: Callable[[str, Any], None]) -> Callable[[], None]: ...
    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class AcceptancePanel(Panel):
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

    saved_class, name = "dsv4-rounds-saved", "Speculation"

    _unwatch: tuple[Callable[[], None], ...] = ()  # a panel that was refused is closed too

    def __init__(
        self,
        source: Chat | Pollable | Generation | Rounds,
        *,
        costs: Costs | None = None,
        title: str = "Speculation",
        pump: Pump | None = None,
    ) -> None:
        chat, story, ticket = _parts(source)
        super().__init__(title=title)
        self._chat, self._story, self._costs = chat, story, costs
        self._pump = pump or shared_pump()
        self._reader: Reader | None = None  # of the run that goes on
        self._watch: Watch | None = None
        self._follows = True
        self._run = 1
        self._sent = 0
        self._figures_due = 0.0
        self._orders = Orders(self.send, {"show": self._do_show, "rewind": self._do_rewind, "sweep": self._do_sweep})
        self.on_msg(self._received)
        if chat is not None:
            self._unwatch = chat.on_submit(self._submitted), chat.on_change(self._changed)
            ticket = chat.ticket if chat.is_busy else None
        if ticket is not None:
            self._pump.call(partial(self._begin, "", ticket))

    def close(self) -> None:
        """Stop following, and remove all views."""
        for end in self._unwatch:
            end()
        super().close()

    # page to kernel: may run on a subshell's thread

    def _received(self, _widget: object, content: object, _buffers: object) -> None:
        command = protocol.parse(content, protocol.ROUNDS_FROM_PAGE)
        if command is None:
            return
        self._pump.call(self._resync if command["kind"] == "resync" else partial(self._orders.obey, command))

    def _submitted(self, user: str, ticket: Pollable) -> None:
        """The chat started a turn, on whatever thread asked for it."""
        self._pump.call(partial(self._begin, user, ticket))

    def _changed(self) -> None:
        """The chat went back or to another branch, on whatever thread asked for it."""
        self._pump.call(self._take_over)

    # everything below runs on the pump's thread

    def _say(self, kind: str, **fields: Any) -> None:
        self.send(protocol.message(kind, declared=protocol.ROUNDS_FROM_KERNEL, **fields))

    def _begin(self, user: str, ticket: Pollable) -> None:
        if self.comm is None or (self._watch is not None and self._watch.ticket is ticket):
            return
        if not finish(self._watch, self._pump, partial(self._begin, user, ticket)):
            return
        self._reader = Reader(ticket, user)
        self._watch = Watch(self._run, ticket, self._told)
        self._pump.watch(self._watch)
        if self._follows:
            self._show(self._reader.story)
        else:
            self._list()

    def _take_over(self) -> None:
        """Show the chat's branch; what was chosen from it stays as long as it is there."""
        if self.comm is None or self._chat is None or not finish(self._watch, self._pump, self._take_over):
            return
        turns = self._chat.turns
        is_there = any(turn is self._story.turn for turn in (turns[-1:] if self._follows else turns))
        if is_there:
            self._list()
            return
        self._follows = True
        self._show(story_of_turn(turns[-1]) if turns else Story())

    def _told(self, news: News) -> None:
        reader = self._reader
        if self.comm is None or reader is None:
            return
        reader.read()
        is_shown = self._story is reader.story
        if is_shown and len(reader.story.rounds) > self._sent:
            self._say("frame", run=self._run, start=self._sent, rounds=self._fresh(), figures=self._due_figures())
        if isinstance(news, Ended):
            self._end(reader.story, is_shown)

    def _fresh(self) -> list[list[Any]]:
        fresh = wire_rounds(self._story, self._sent)
        self._sent += len(fresh)
        return fresh

    def _due_figures(self) -> dict[str, Any] | None:
        began = time.monotonic()
        return self._figures(began) if began >= self._figures_due else None

    def _figures(self, began: float) -> dict[str, Any]:
        figures = figures_of(self._story.rounds).message()
        done = time.monotonic()
        self._figures_due = done + max(FIGURES_S, (done - began) / FIGURES_SHARE)
        return figures

    def _end(self, story: Story, is_shown: bool) -> None:
        self._reader = self._watch = None
        if self._chat is not None and (turns := self._chat.turns):
            story.turn, story.label = turns[-1], turns[-1].user
        if is_shown:
            figures = self._figures(time.monotonic())
            self._say("frame", run=self._run, start=self._sent, rounds=self._fresh(), figures=figures)
            self._say("ended", run=self._run, note=story.note, rewinds=self._rewinds)
            self._refresh_saved()
        self._list()

    def _show(self, story: Story) -> None:
        """Show another reply: every view forgets the one before."""
        self._story = story
        self._run += 1
        self._snapshot()
        self._list()
        self._refresh_saved()

    def _snapshot(self) -> None:
        story, self._sent = self._story, 0
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
        return self._chat is not None and (self._story.turn is not None or self._story.is_live)

    def _resync(self) -> None:
        """Tell a view that has just come, or missed something, where things stand."""
        self._catch_up()
        self._list()
        self._snapshot()

    def _catch_up(self) -> None:
        """Show the last turn when what was shown is no longer of the chat's branch."""
        if self._chat is None or self._story.is_live:
            return
        turns = self._chat.turns
        if self._follows and turns and self._story.turn is not turns[-1]:
            self._story, self._run = story_of_turn(turns[-1]), self._run + 1
            self._refresh_saved()

    def _list(self) -> None:
        """Tell which turns there are to choose from."""
        if self._chat is None:
            return
        turns = list(self._chat.turns)
        first = max(0, len(turns) - LISTED)
        told = [[i, turns[i].user, len(turns[i].rounds)] for i in range(first, len(turns))]
        found = [i for i, turn in enumerate(turns) if turn is self._story.turn]
        self._say("turns", turns=told, shown=found[0] if found else NO_TURN, follows=self._follows)

    def _do_show(self, command: dict[str, Any]) -> None:
        turns, i = (self._chat.turns if self._chat else ()), command["turn"]
        if i == NO_TURN:
            self._follows = True
            live = self._reader.story if self._reader else None
            self._show(live or (story_of_turn(turns[-1]) if turns else Story()))
            return
        if not 0 <= i < len(turns):
            raise RequestError(f"turn is {i}; this branch has {len(turns)} turns, counted from 0", param="turn")
        self._follows = i == len(turns) - 1 and self._reader is None
        self._show(story_of_turn(turns[i]))

    def _do_rewind(self, command: dict[str, Any]) -> None:
        if self._chat is None:
            raise RequestError("these rounds are of no chat; there is nothing to rewind", param="round")
        if self._chat.is_busy or self._story.is_live:
            raise ChatBusy
        found = [i for i, turn in enumerate(self._chat.turns) if turn is self._story.turn]
        if command["run"] != self._run or not found:
            raise RequestError("this reply is no longer shown, or the chat is on another branch", param="round")
        self._chat.rewind(found[0] + 1, round=command["round"])
        self._follows = True
        self._show(story_of_turn(self._chat.turns[-1]))

    def _do_sweep(self, command: dict[str, Any]) -> None:
        if command["run"] == self._run:
            work = partial(self._sweep, self._run, Rounds(self._story.rounds))
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
        story = self._story
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
