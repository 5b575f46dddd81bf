"""The serving thread of one engine: order, cancellation, containment."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback

from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import Dsv4Error, EngineError, ModelClosed
from dsv4nb.session.journal import Journal, OnEnd
from dsv4nb.session.request import ChatTokens, Request
from dsv4nb.session.run import run

logger = logging.getLogger(__name__)

JOIN_S = 2.0


class Server:
    """Runs requests one at a time in the order they came; it alone touches the engine.

    Args:
        name: of the model; the thread is called `dsv4nb-serve-<name>`.
    """

    def __init__(self, engine: Engine, tokens: ChatTokens, name: str) -> None:
        self._engine, self._tokens, self._name = engine, tokens, name
        self._queue: queue.SimpleQueue[Journal | None] = queue.SimpleQueue()
        self._open: set[Journal] = set()  # queued or running
        self._lock = threading.RLock()  # a forgotten handle may be closed wherever garbage is collected
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name=f"dsv4nb-serve-{name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_end: OnEnd | None = None) -> Journal:
        """Put a request at the end of the queue.

        Args:
            on_end: see `Journal`.

        Raises:
            ModelClosed: after `close`.
        """
        journal = Journal(request, on_end)
        with self._lock:
            if self._is_closed:
                raise ModelClosed(self._name)
            self._open.add(journal)
            self._queue.put(journal)
        return journal

    def close(self) -> None:
        """Cancel what is queued and running, end the thread and free the engine; idempotent.

        Returns after `JOIN_S` at the latest; a forward that takes longer is left to the thread, which then frees
        the engine itself.
        """
        with self._lock:
            self._is_closed = True
            ending = list(self._open)
        for journal in ending:
            journal.cancel()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _serve(self) -> None:
        while (journal := self._queue.get()) is not None:
            if journal.start():
                self._attempt(journal)
            with self._lock:
                self._open.discard(journal)
            del journal  # an idle thread keeps no prompt and no reply
        self._engine.close()

    def _attempt(self, journal: Journal) -> None:
        """The one broad handler: whatever goes wrong becomes the last event of its own run."""
        try:
            run(self._engine, self._tokens, journal, time.monotonic() - journal.submitted_at)
        except BaseException as error:
            logger.debug("a run failed kind=%s", type(error).__name__, exc_info=error)
            # its frames hold the state, which may be gigabytes
            traceback.clear_frames(error.__traceback__)
            with contextlib.suppress(Exception):
                journal.fail(_typed(error))


def _typed(error: BaseException) -> Dsv4Error:
    """Return the error as one of ours; what it says may be anything."""
    if isinstance(error, Dsv4Error):
        return error
    try:
        said = str(error)
    except Exception:
        said = "it cannot be printed"
    typed = EngineError(f"generation panicked: {type(error).__name__}{': ' * bool(said)}{said}")
    typed.__cause__ = error
    return typed
