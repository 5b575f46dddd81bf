"""The serving thread: one per model, first come first served, and it survives whatever a request does."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import Dsv4Error, EngineError, ModelClosed
from dsv4nb.session.job import Job, Outcome
from dsv4nb.session.request import Request, Tokenizer
from dsv4nb.session.run import run

logger = logging.getLogger(__name__)


class Server:
    """Runs requests on an engine that only its thread touches.

    Args:
        name: of the model; the thread is `dsv4nb-serve-<name>`.
        engine: closed with the server.
    """

    def __init__(self, name: str, engine: Engine, tokenizer: Tokenizer) -> None:
        self._name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: list[Job] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name=f"dsv4nb-serve-{name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_end: Callable[[Outcome], None] | None = None) -> Job:
        """Put a request at the end of the queue.

        Raises:
            ModelClosed: the server was closed.
        """
        job = Job(request, on_end)
        with self._lock:
            if self._is_closed:
                raise ModelClosed(self._name)
            self._open = [open_ for open_ in self._open if open_.outcome is None]
            self._open.append(job)
            self._jobs.put(job)
        return job

    def close(self, timeout: float = 30.0) -> None:
        """Cancel everything, wait for the thread and close the engine; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
            jobs, self._open = self._open, []
        for job in jobs:
            job.cancel()
        if threading.current_thread() is not self._thread:  # the last handle may be collected on it
            self._thread.join(timeout)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.start():
                self._attempt(job)
            job = None  # noqa: PLW2901 - an idle thread keeps no prompt alive
        self._engine.close()

    def _attempt(self, job: Job) -> None:
        """Run a job; the one broad handler."""
        try:
            generation = run(job, self._engine, self._tokenizer)
        except BaseException as error:
            logger.debug("request failed kind=%s", type(error).__name__, exc_info=True)
            job.fail(_as_ours(error))
        else:
            job.succeed(generation)


def _as_ours(error: BaseException) -> Dsv4Error:
    if isinstance(error, Dsv4Error):
        return error
    try:
        why = str(error)
    except Exception:
        why = ""
    kind = type(error).__name__
    ours = EngineError(f"generation panicked: {kind}: {why}" if why else f"generation panicked: {kind}")
    ours.__cause__ = error
    return ours
