from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from dsv4nb.config import SamplerConfig
from dsv4nb.events import Done, Event, Failed, PromptUsage, Timings, Token
from dsv4nb.model import Model
from dsv4nb.testing.fake_model import fake_model


class ScriptTicket:
    """A run that says its words on a thread; cancelled it ends after the word that is being said."""

    def __init__(self, words: Sequence[tuple[Any, str]], delay_s: float, error: str = "") -> None:
        self.events: list[Event] = []
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._error = error
        threading.Thread(target=self._run, args=(words, delay_s), daemon=True).start()

    def _run(self, words: Sequence[tuple[Any, str]], delay_s: float) -> None:
        self.events.append(PromptUsage(n_prompt=3, n_cached=0))
        said = 0
        for channel, word in words:
            if self._cancelled.wait(delay_s):
                break
            self.events.append(Token(id=said, text=word, channel=channel))
            said += 1
        if self._error:
            self.events.append(Failed(code="engine", message=self._error, param=None, retryable=False))
        else:
            self.events.append(
                Done(
                    stop_reason="cancelled" if self._cancelled.is_set() else "stop",
                    n_tokens=said,
                    n_prompt=3,
                    n_cached=0,
                    queue_s=0.0,
                    elapsed_s=0.5,
                    config=SamplerConfig(),
                    route="plain_greedy",
                    timings=Timings(queue_s=0.0, prepare_s=0.0),
                )
            )
        self._over.set()

    def poll(self, start: int) -> tuple[list[Event], bool]:
        is_over = self._over.is_set()
        return self.events[start:], is_over

    def wait(self, timeout: float) -> bool:
        return self._over.wait(timeout)

    def cancel(self) -> None:
        self._cancelled.set()

    def result(self) -> SimpleNamespace:
        assert self._over.is_set()
        tokens = [event for event in self.events if isinstance(event, Token)]
        text = "".join(token.text for token in tokens if token.channel == "content")
        return SimpleNamespace(text=text, done=self.events[-1])


class ScriptModel:
    """A model that always says the same."""

    def __init__(self, *words: tuple[Any, str], delay_s: float = 0.0) -> None:
        self.words = words or (("content", "The capital "), ("content", "is Paris."))
        self.delay_s = delay_s
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.info = "a model of words"
        self.closed = 0

    def submit(self, prompt: str, **options: Any) -> ScriptTicket:
        self.asked.append((prompt, options))
        return ScriptTicket(self.words, self.delay_s)

    @property
    def is_closed(self) -> bool:
        return self.closed > 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def ip() -> Iterator[InteractiveShell]:
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False  # it would keep a thread and a file
    shell = InteractiveShell.instance(config=config)
    shell.run_line_magic("load_ext", "dsv4nb")
    yield shell
    shell.run_line_magic("unload_ext", "dsv4nb")
    InteractiveShell.clear_instance()
    atexit.unregister(shell.atexit_operations)  # half a second for each shell


@pytest.fixture
def make_model() -> type[ScriptModel]:
    return ScriptModel


@pytest.fixture
def make_ticket() -> type[ScriptTicket]:
    return ScriptTicket


@pytest.fixture
def fake(ip: InteractiveShell) -> Iterator[Callable[..., Model]]:
    """Put a model that says a script into `m`, or another variable; it is closed after the test."""
    made: list[Model] = []

    def make(script: Any = "Hello.", *, into: str = "m", **options: Any) -> Model:
        made.append(fake_model(script, **options))
        ip.user_ns[into] = made[-1]
        return made[-1]

    yield make
    for model in made:
        model.close()


def run(ip: InteractiveShell, source: str) -> None:
    """Run a cell that succeeds."""
    ip.run_cell(source).raise_error()


def refused(ip: InteractiveShell, source: str) -> str:
    """Run a cell that is refused in one line; return the line."""
    done = ip.run_cell(source)
    assert isinstance(done.error_in_exec, UsageError), done.error_in_exec
    said = str(done.error_in_exec)
    assert "\n" not in said
    return said


@pytest.fixture
def cells(ip: InteractiveShell) -> SimpleNamespace:
    """`run` and `refused` in the shell."""
    return SimpleNamespace(
        run=lambda source: run(ip, source), refused=lambda source: refused(ip, source), ns=ip.user_ns
    )
