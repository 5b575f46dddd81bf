"""A reply under the lens: how likely each of its tokens was, what else it could have been, and what would follow then.

Comm handlers may run on a subshell's thread, so they only leave a job to the pump; everything that the page is told
comes from the pump's thread. What waits for the engine, scoring and forking, runs on a thread of its own. Tokens
travel as binary buffers, each text once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsv4nb.errors import ChatBusy, Dsv4Error, RequestError
from dsv4nb.events import Generation, TokenLogprob
from dsv4nb.session.attachments import name_in_notebook
from dsv4nb.session.tree import Turn
from dsv4nb.stream.frames import Ended, News, Pollable, Pump, Watch, shared_pump
from dsv4nb.widgets import protocol
from dsv4nb.widgets.lens_reply import (
    N_TOP,
    Reader,
    Reply,
    Spelling,
    arrays_of,
    reply_of_turn,
)
from dsv4nb.widgets.lens_saved import SavedLens
from dsv4nb.widgets.lens_source import Chat, Model, parts_of
from dsv4nb.widgets.orders import Orders
from dsv4nb.widgets.panel import Panel, finish

_STATIC = Path(__file__).parent / "static"

LISTED = 200  # turns to choose from, the latest ones
NO_TURN = -1


class TokenLens(Panel):
    """Shows the tokens of a reply in any number of views.

    Args:
        source: whose tokens. A chat: those of the turn that runs, else of any turn; a finished generation, or a
            ticket, as they come.
        model: that made a generation or a ticket; a chat knows its own.
        title: stands above the tokens.
        pump: delivers the stream, the kernel's own if None.

    Attributes:
        chat: that is shown: the given one, or the fork that was made of it last; None for a generation or a ticket.

    Raises:
        RequestError: `source` is none of these, or there is no model to read its ids with.
    """

    _esm = _STATIC / "lens.js"
    _css = _STATIC / "lens.css"

    saved_class, name = "dsv4-tokens-saved", "Token lens"

    _unwatch: tuple[Callable[[], None], ...] = ()  # a panel that was refused is closed too

    def __init__(
        self,
        source: Chat | Pollable | Generation,
        model: Model | None = None,
        *,
        title: str = "Token lens",
        pump: Pump | None = None,
    ) -> None:
        chat, reply, ticket = parts_of(source)
        reads = chat.model if chat is not None and model is None else model
        if reads is None or not callable(getattr(reads, "decode", None)):
            raise RequestError(
                "the lens needs the model that made these tokens, for their texts: TokenLens(result, model)",
                param="model",
            )
        super().__init__(title=title)
        self.chat = chat
        self._model, self._reply, self._spelling = reads, reply, Spelling(reads)
        self._origins: list[tuple[Chat, Turn | None]] = []  # what forks were made of, and the turn that was shown
        self._pump = pump or shared_pump()
        self._reader: Reader | None = None  # of the run that goes on
        self._watch: Watch | None = None
        self._follows = True
        self._run, self._sent, self._n_runs = 1, 0, 0
        self._is_closing = threading.Event()
        self._scoring = ""  # the command that waits for scores
        do = {"show": self._do_show, "score": self._do_score, "continue": self._do_continue, "back": self._do_back}
        self._orders = Orders(self.send, do)
        self.on_msg(self._received)
        if chat is not None:
            self._listen(chat)
            ticket = chat.ticket if chat.is_busy else None
        if ticket is not None:
            self._pump.call(partial(self._begin, "", ticket))

    def close(self) -> None:
        """Stop following, and remove all views."""
        self._deaf()
        if hasattr(self, "_is_closing"):
            self._is_closing.set()
        super().close()

    def _listen(self, chat: Chat) -> None:
        self._unwatch = chat.on_submit(self._submitted), chat.on_change(self._changed)

    def _deaf(self) -> None:
        for end in self._unwatch:
            end()
        self._unwatch = ()

    # page to kernel: may run on a subshell's thread

    def _received(self, _widget: object, content: object, _buffers: object) -> None:
        command = protocol.parse(content, protocol.LENS_FROM_PAGE)
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

    def _say(self, kind: str, buffers: Sequence[memoryview] = (), **fields: Any) -> None:
        message = protocol.message(kind, declared=protocol.LENS_FROM_KERNEL, **fields)
        self.send(message, buffers=list(buffers)) if buffers else self.send(message)

    def _begin(self, user: str, ticket: Pollable) -> None:
        if self.comm is None or (self._watch is not None and self._watch.ticket is ticket):
            return
        if not finish(self._watch, self._pump, partial(self._begin, user, ticket)):
            return
        self._reader, self._n_runs = Reader(ticket, user), 0
        self._watch = Watch(self._run, ticket, self._told)
        self._pump.watch(self._watch)
        if self._follows:
            self._show(self._reader.reply)
        else:
            self._list()

    def _take_over(self) -> None:
        """Show the chat's branch; what was chosen from it stays as long as it is there."""
        if self.comm is None or self.chat is None or not finish(self._watch, self._pump, self._take_over):
            return
        turns = self.chat.turns
        if any(turn is self._reply.turn for turn in (turns[-1:] if self._follows else turns)):
            self._list()
            return
        self._follows = True
        self._show(reply_of_turn(turns[-1]) if turns else Reply())

    def _told(self, news: News) -> None:
        reader = self._reader
        if self.comm is None or reader is None:
            return
        reader.read()
        is_shown = self._reply is reader.reply
        if is_shown and reader.n_runs > max(1, self._n_runs):
            self._run += 1  # another run of a turn with calls: the page forgets the one before
            self._snapshot()
        elif is_shown and reader.changed_from < len(reader.reply.ids):
            self._frame(min(self._sent, reader.changed_from))
        self._n_runs = reader.n_runs
        if isinstance(news, Ended):
            self._end(reader.reply, is_shown)

    def _frame(self, first: int) -> None:
        reply = self._reply
        n, k, buffers = arrays_of(reply, first)
        self._sent = len(reply.ids)
        texts = self._spelling.fresh(reply, first)
        self._say("frame", buffers, run=self._run, start=first, n=n, k=k, texts=texts)

    def _end(self, reply: Reply, is_shown: bool) -> None:
        self._reader = self._watch = None
        if self.chat is not None and (turns := self.chat.turns):
            reply.turn, reply.label = turns[-1], turns[-1].user
        if is_shown:
            self._say("ended", run=self._run, note=reply.note, continues=self._continues, scores=self._may_score)
            self._refresh_saved()
        self._list()

    def _show(self, reply: Reply) -> None:
        """Show another reply: every view forgets the one before."""
        self._reply = reply
        self._run += 1
        self._snapshot()
        self._list()
        self._refresh_saved()

    def _snapshot(self) -> None:
        reply = self._reply
        n, k, buffers = arrays_of(reply, 0)
        self._sent = n
        self._say(
            "snapshot",
            buffers,
            run=self._run,
            label=reply.label,
            note=reply.note,
            live=reply.is_live,
            continues=self._continues,
            scores=self._may_score,
            scoring=bool(self._scoring),
            fork=self._fork_name(),
            n=n,
            k=k,
            texts=self._spelling.fresh(reply, 0, all_again=True),
        )

    @property
    def _continues(self) -> bool:
        """Whether the chat can go on from a token of what is shown."""
        turn = self._reply.turn
        return self.chat is not None and turn is not None and bool(turn.ids) and not turn.calls

    @property
    def _may_score(self) -> bool:
        """Whether log-probabilities are missing and can be computed."""
        reply = self._reply
        has_prompt = bool(reply.prompt) or (self.chat is not None and reply.turn is not None)
        return not reply.is_live and not reply.is_scored and bool(reply.ids) and has_prompt

    def _fork_name(self) -> str:
        """What shows the fork that is looked at in Python, "" when none is."""
        if not self._origins:
            return ""
        origin = self._origins[-1][0]
        name = name_in_notebook(origin)
        places = [i for i, fork in enumerate(origin.forks) if fork is self.chat]
        return f"{name}.forks[{places[0]}]" if name and places else "the lens's chat"

    def _resync(self) -> None:
        """Tell a view that has just come, or missed something, where things stand."""
        if self.chat is not None and not self._reply.is_live and self._follows:
            turns = self.chat.turns
            if turns and self._reply.turn is not turns[-1]:
                self._reply, self._run = reply_of_turn(turns[-1]), self._run + 1
                self._refresh_saved()
        self._list()
        self._snapshot()

    def _list(self) -> None:
        """Tell which turns there are to choose from."""
        if self.chat is None:
            return
        turns = list(self.chat.turns)
        first = max(0, len(turns) - LISTED)
        told = [[i, turns[i].user, len(turns[i].ids)] for i in range(first, len(turns))]
        found = [i for i, turn in enumerate(turns) if turn is self._reply.turn]
        self._say("turns", turns=told, shown=found[0] if found else NO_TURN, follows=self._follows)

    def _do_show(self, command: dict[str, Any]) -> None:
        turns, i = (self.chat.turns if self.chat else ()), command["turn"]
        if i == NO_TURN:
            self._follows = True
            live = self._reader.reply if self._reader else None
            self._show(live or (reply_of_turn(turns[-1]) if turns else Reply()))
            return
        if not 0 <= i < len(turns):
            raise RequestError(f"turn is {i}; this branch has {len(turns)} turns, counted from 0", param="turn")
        self._follows = i == len(turns) - 1 and self._reader is None
        self._show(reply_of_turn(turns[i]))

    # scores

    def _do_score(self, command: dict[str, Any]) -> bool:
        if command["run"] != self._run or not self._may_score:
            raise RequestError("the tokens that are shown have their probabilities, or cannot be scored", param="run")
        if self._scoring:
            raise RequestError("probabilities are being computed", param="run")
        self._scoring = command["id"]
        self._aside(partial(self._score, self._reply, self._turn_index()))
        self._snapshot()
        return False

    def _turn_index(self) -> int:
        turns = self.chat.turns if self.chat else ()
        return next((i for i, turn in enumerate(turns) if turn is self._reply.turn), NO_TURN)

    def _score(self, reply: Reply, index: int) -> None:
        """On a thread of its own."""
        stop = self._is_closing.is_set
        error, scores = "", ()
        try:
            if self.chat is not None and reply.turn is not None:
                scores = self.chat.score(index, N_TOP, should_stop=stop)  # type: ignore[assignment]
            else:
                scores = self._model.score(reply.prompt, reply.ids, N_TOP, should_stop=stop)  # type: ignore[assignment]
        except Exception as failed:  # whatever it is, the command has an answer
            error = _words(failed)
        self._pump.call(partial(self._scored, reply, scores, error))

    def _scored(self, reply: Reply, scores: Sequence[TokenLogprob], error: str) -> None:
        key, self._scoring = self._scoring, ""
        if len(scores) == len(reply.ids):
            reply.scores = list(scores)
        if self.comm is None:
            return
        self._snapshot()
        self._refresh_saved()
        self._orders.answer(key, error)

    # forks

    def _do_continue(self, command: dict[str, Any]) -> bool:
        index = self._turn_index()
        if self.chat is None or not self._continues or command["run"] != self._run or index == NO_TURN:
            raise RequestError("only a reply of a chat can be continued, on the branch that is shown", param="token")
        if self.chat.is_busy:
            raise ChatBusy
        reply, chat = self._reply, self.chat
        self._aside(partial(self._fork, chat, index, reply, command))
        return False

    def _fork(self, chat: Chat, index: int, reply: Reply, command: dict[str, Any]) -> None:
        """On a thread of its own: what is not known of the reply's beginning is scored first."""
        try:
            fork = chat.fork()
            scores = reply.scores if reply.is_scored else ()
            ticket = fork.submit_from(index, command["token"], command["alternative"], scores=scores, logprobs=N_TOP)
        except Exception as failed:  # as above
            self._pump.call(partial(self._orders.answer, command["id"], _words(failed)))
            return
        self._pump.call(partial(self._go_to_fork, chat, fork, ticket, reply.turn, command["id"]))

    def _go_to_fork(self, chat: Chat, fork: Chat, ticket: Pollable, turn: Turn | None, key: str) -> None:
        chat.forks.append(fork)
        self._origins.append((chat, turn))
        self._turn_to(fork)
        user = turn.user if turn else ""
        self._orders.answer(key)
        self._begin(user, ticket)

    def _do_back(self, command: dict[str, Any]) -> None:
        if not self._origins:
            raise RequestError("this is no fork; there is nothing to go back to", param="run")
        chat, turn = self._origins.pop()
        self._turn_to(chat)
        turns = chat.turns
        self._follows = not turns or turn is turns[-1]
        shown = next((one for one in turns if one is turn), turns[-1] if turns else None)
        self._show(reply_of_turn(shown) if shown else Reply())

    def _turn_to(self, chat: Chat) -> None:
        """Look at another chat."""
        self._deaf()
        self.chat, self._reader, self._watch, self._follows = chat, None, None, True
        self._listen(chat)

    def _aside(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="dsv4nb-lens", daemon=True).start()

    # what a saved notebook keeps

    def saved(self) -> SavedLens:
        """Return what is shown, as a value that can be read without a kernel."""
        return SavedLens(title=self.title, reply=self._reply, text=self._spelling.text)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, Dsv4Error) else f"{type(error).__name__}: {error}"
