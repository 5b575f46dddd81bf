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

from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.events import Generation, TokenLogprob
from dsv4nb.session.attachments import name_in_notebook
from dsv4nb.session.tree import Turn
from dsv4nb.stream.frames import Pollable, Pump
from dsv4nb.widgets import protocol
from dsv4nb.widgets.following import NO_TURN, Following
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

_STATIC = Path(__file__).parent / "static"


class TokenLens(Following[Reply]):
    """Shows the tokens of a reply in any number of views.

    Args:
        source: whose tokens. A chat: those of the turn that runs, else of any turn; a finished generation, or a
            ticket, as they come.
        model: that made a generation or a ticket; a chat knows its own.
        title: stands above the tokens.
        pump: delivers the stream, the kernel's own if None.

    Raises:
        RequestError: `source` is none of these, or there is no model to read its ids with.
    """

    _esm = _STATIC / "lens.js"
    _css = _STATIC / "lens.css"

    from_page, from_kernel = protocol.LENS_FROM_PAGE, protocol.LENS_FROM_KERNEL
    saved_class, name = "dsv4-tokens-saved", "Token lens"

    _chat: Chat | None
    _reader: Reader | None

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
        self._model, self._spelling = reads, Spelling(reads)
        self._origins: list[tuple[Chat, Turn | None]] = []  # what forks were made of, and the turn that was shown
        self._sent = self._n_runs = 0
        self._is_closing = threading.Event()
        self._scoring = ""  # the command that waits for scores
        do = {"score": self._do_score, "continue": self._do_continue, "back": self._do_back}
        super().__init__(chat, reply, ticket, do, title=title, pump=pump)

    @property
    def chat(self) -> Chat | None:
        """The chat that is shown: the given one, or the fork that was made of it last; None without a chat."""
        return self._chat

    def close(self) -> None:
        """Stop following, and remove all views."""
        if hasattr(self, "_is_closing"):  # a panel that was refused is closed too
            self._is_closing.set()
        super().close()

    # what the page is told, on the pump's thread

    def _of_turn(self, turn: Turn | None) -> Reply:
        return Reply() if turn is None else reply_of_turn(turn)

    def _of_run(self, ticket: Pollable, user: str) -> Reader:
        self._n_runs = 0
        return Reader(ticket, user)

    def _size(self, turn: Turn) -> int:
        return len(turn.ids)

    def _news(self, *, is_shown: bool) -> None:
        reader = self._reader
        assert reader is not None
        if is_shown and reader.n_runs > max(1, self._n_runs):
            self._run += 1  # another run of a turn with calls: the page forgets the one before
            self._snapshot()
        elif is_shown and reader.changed_from < len(reader.shown.ids):
            self._frame(min(self._sent, reader.changed_from))
        self._n_runs = reader.n_runs

    def _ended(self) -> None:
        note = self._shown.note
        self._say("ended", run=self._run, note=note, continues=self._continues, scores=self._may_score)

    def _frame(self, first: int) -> None:
        reply = self._shown
        n, k, buffers = arrays_of(reply, first)
        self._sent = len(reply.ids)
        texts = self._spelling.fresh(reply, first)
        self._say("frame", buffers, run=self._run, start=first, n=n, k=k, texts=texts)

    def _snapshot(self) -> None:
        reply = self._shown
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
        turn = self._shown.turn
        return self._chat is not None and turn is not None and bool(turn.ids) and not turn.calls

    @property
    def _may_score(self) -> bool:
        """Whether log-probabilities are missing and can be computed."""
        reply = self._shown
        has_prompt = bool(reply.prompt) or (self._chat is not None and reply.turn is not None)
        return not reply.is_live and not reply.is_scored and bool(reply.ids) and has_prompt

    def _fork_name(self) -> str:
        """What shows the fork that is looked at in Python, "" when none is."""
        if not self._origins:
            return ""
        origin = self._origins[-1][0]
        name = name_in_notebook(origin)
        places = [i for i, fork in enumerate(origin.forks) if fork is self._chat]
        return f"{name}.forks[{places[0]}]" if name and places else "the lens's chat"

    # scores

    def _do_score(self, command: dict[str, Any]) -> bool:
        if command["run"] != self._run or not self._may_score:
            raise RequestError("the tokens that are shown have their probabilities, or cannot be scored", param="run")
        if self._scoring:
            raise RequestError("probabilities are being computed", param="run")
        self._scoring = command["id"]
        self._aside(partial(self._score, self._shown, self._place()))
        self._snapshot()
        return False

    def _score(self, reply: Reply, index: int) -> None:
        """On a thread of its own."""
        stop = self._is_closing.is_set
        error: Exception | None = None
        scores: Sequence[TokenLogprob] = ()
        try:
            if self._chat is not None and reply.turn is not None:
                scores = self._chat.score(index, N_TOP, should_stop=stop)
            else:
                scores = self._model.score(reply.prompt, reply.ids, N_TOP, should_stop=stop)
        except Exception as failed:  # whatever it is, the command has an answer
            error = failed
        self._pump.call(partial(self._scored, reply, scores, error))

    def _scored(self, reply: Reply, scores: Sequence[TokenLogprob], error: Exception | None) -> None:
        key, self._scoring = self._scoring, ""
        if len(scores) == len(reply.ids):
            reply.scores = list(scores)
        if self.comm is None:
            return
        self._snapshot()
        self._refresh_saved()
        self._orders.answer(key, error or "")

    # forks

    def _do_continue(self, command: dict[str, Any]) -> bool:
        index = self._place()
        if self._chat is None or not self._continues or command["run"] != self._run or index == NO_TURN:
            raise RequestError("only a reply of a chat can be continued, on the branch that is shown", param="token")
        if self._chat.is_busy:
            raise ChatBusy
        reply, chat = self._shown, self._chat
        self._aside(partial(self._fork, chat, index, reply, command))
        return False

    def _fork(self, chat: Chat, index: int, reply: Reply, command: dict[str, Any]) -> None:
        """On a thread of its own: what is not known of the reply's beginning is scored first."""
        try:
            fork = chat.fork()
            scores = reply.scores if reply.is_scored else ()
            ticket = fork.submit_from(index, command["token"], command["alternative"], scores=scores, logprobs=N_TOP)
        except Exception as failed:  # as above
            self._pump.call(partial(self._orders.answer, command["id"], failed))
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
        self._show(self._of_turn(shown))

    def _turn_to(self, chat: Chat) -> None:
        """Look at another chat."""
        self._deaf()
        self._chat, self._reader, self._watch, self._follows = chat, None, None, True
        self._listen(chat)

    def _aside(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="dsv4nb-lens", daemon=True).start()

    # what a saved notebook keeps

    def saved(self) -> SavedLens:
        """Return what is shown, as a value that can be read without a kernel."""
        return SavedLens(title=self.title, reply=self._shown, text=self._spelling.text)
