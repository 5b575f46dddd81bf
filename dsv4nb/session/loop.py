"""One turn that may call Python functions: runs, approvals and results until the model has nothing to call."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dsv4nb.errors import Dsv4Error, RequestError
from dsv4nb.events import Done, Event, Failed, Generation, TokenSnapshot, ToolCall, ToolResult
from dsv4nb.session.desk import Desk
from dsv4nb.session.functions import Toolset
from dsv4nb.session.journal import Journal
from dsv4nb.session.log import Log, OnEnd

POLL_S = 0.1  # an interrupt is seen between two waits
MAX_ROUNDS = 8
STOPPED = "the user stopped here"

Approve = Callable[[ToolCall], bool | Mapping[str, Any]]


class Start(Protocol):
    """Puts a conversation in the queue."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], /) -> Journal: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How calls of a turn are dealt with.

    Attributes:
        toolset: the declared tools; those that are functions are called.
        approve: asked before each call: True runs it, False declines it, a mapping runs it with these arguments
            instead. On a desk all calls of a run lie together until somebody decides. None runs every call.
        max_rounds: runs with calls in one turn, so that a model cannot go on for ever.
    """

    toolset: Toolset
    approve: Approve | Desk | None = None
    max_rounds: int = MAX_ROUNDS


class Loop(Log):
    """Looks like the journal of one run, and is several with calls between them.

    Whoever calls `drive` runs the functions, on its own thread; it returns when the turn has ended.

    Args:
        on_end: as of `Journal`.
    """

    def __init__(
        self, start: Start, messages: Sequence[Mapping[str, Any]], rules: Rules, on_end: OnEnd | None = None
    ) -> None:
        super().__init__()
        self.error: Dsv4Error | None = None
        self._start, self._rules, self._on_end = start, rules, on_end
        self._cancelled = threading.Event()
        self._is_driven = False
        self._steps: list[Generation] = []  # of the runs that have ended
        self._results: dict[str, ToolResult] = {}  # by the id of the call
        self._result: Generation | None = None
        self._run = start(messages)  # what is refused is refused here, before anything has changed
        self._n_runs, self._n_seen = 1, 0

    def taken(self, n: int) -> None:
        """A turn with calls does not go in step."""

    def cancel(self) -> None:
        """Stop the run or, between two, the turn; a function that has begun is not stopped. Idempotent."""
        self._cancelled.set()
        self._run.cancel()

    def generation(self) -> Generation:
        """Return the last run's result, with the whole conversation and every run as its `steps`."""
        assert self._result is not None
        return self._result

    def drive(self) -> None:
        """Run the turn to its end; only the first caller does.

        An interrupt cancels the turn, lets it end in order, and is raised.
        """
        with self.changed:
            if self._is_driven:
                return
            self._is_driven = True
        try:
            self._turn()
        except Exception as error:  # what approves calls is the caller's own code
            self._run.cancel()
            self._fail(_typed(error))
        except BaseException:
            self.cancel()
            self._turn()  # goes on where it stood, and calls nothing more
            raise

    def _turn(self) -> None:
        while True:
            last = self._follow()
            if isinstance(last, Failed):
                assert self._run.error is not None
                self._fail(self._run.error)
                return
            step = self._run.generation()
            if len(self._steps) < self._n_runs:
                self._steps.append(step)
            if step.stop_reason != "tool_calls" or self._is_for_caller(step):
                self._finish(step.messages)
                return
            is_over = self._n_runs > self._rules.max_rounds
            self._answer_all([call for call in step.tool_calls if call.id not in self._results], is_over=is_over)
            results = [self._results[call.id] for call in step.tool_calls]
            messages = (*_as_run(step.messages, results), *map(_message, results))
            if is_over or self._cancelled.is_set():
                self._finish(messages)
                return
            self._run, self._n_runs, self._n_seen = self._start(messages), self._n_runs + 1, 0
            if self._cancelled.is_set():
                self._run.cancel()

    def _follow(self) -> Event:
        """Pass the run's events on, but for the last ones; return the last."""
        while True:
            events, is_finished = self._run.poll(self._n_seen)
            self._n_seen += len(events)
            self._append([event for event in events if not isinstance(event, TokenSnapshot | Done | Failed)])
            if is_finished:
                return self._run.poll(0)[0][-1]
            if not events:
                self._run.wait(self._n_seen, POLL_S)

    def _is_for_caller(self, step: Generation) -> bool:
        """Whether a call is of a tool that was declared and is no function: its result comes from the caller."""
        functions = self._rules.toolset.functions
        declared = {schema["function"]["name"] for schema in self._rules.toolset.schemas}
        return any(call.name in declared and call.name not in functions for call in step.tool_calls)

    def _answer_all(self, calls: Sequence[ToolCall], *, is_over: bool) -> None:
        desk = self._rules.approve
        if not isinstance(desk, Desk) or is_over or self._cancelled.is_set():
            desk = None
        if desk is not None:
            desk.lay(calls)
        try:
            for call in calls:
                self._answer(call, is_over=is_over)
        finally:
            if desk is not None:
                desk.clear()

    def _answer(self, call: ToolCall, *, is_over: bool) -> None:
        """Give one call its result; it has one before anything else can go wrong."""
        if is_over:
            n = self._rules.max_rounds
            self._results[call.id] = _not_run(call, f"this turn has had {n} round{'s' * (n != 1)} of calls")
        elif self._cancelled.is_set():
            self._results[call.id] = _not_run(call, STOPPED)
        else:
            self._results[call.id] = _not_run(call, "the user interrupted it")
            self._results[call.id] = self._call(call)
        self._append([self._results[call.id]])

    def _call(self, call: ToolCall) -> ToolResult:
        answer = self._approval(call)
        if answer is None:
            return _not_run(call, STOPPED)
        if answer is False:
            return _not_run(call, "the user declined this call")
        if answer is not True and not isinstance(answer, Mapping):
            raise RequestError(
                f"approve returned {answer!r}; it must be True, False, or a mapping of arguments", param="approve"
            )
        arguments = call.arguments if answer is True else json.dumps(dict(answer), ensure_ascii=False)
        outcome = self._rules.toolset.call(call.name, arguments)
        return ToolResult(
            id=call.id, name=call.name, content=outcome.content, arguments=arguments, error=outcome.error or ""
        )

    def _approval(self, call: ToolCall) -> object:
        """Return what was decided about a call, None when the turn was stopped first."""
        match self._rules.approve:
            case None:
                return True
            case Desk() as desk:
                return desk.answer(call, self._cancelled.is_set)
            case approve:
                answer = approve(call)
                return "None" if answer is None else answer  # which is no answer, and is refused

    def _finish(self, messages: Sequence[dict[str, object]]) -> None:
        step = self._steps[-1]
        done = step.done
        if self._cancelled.is_set():
            done = replace(done, stop_reason="cancelled")
        self._result = replace(step, done=done, messages=tuple(messages), steps=tuple(self._steps))
        self._end(TokenSnapshot(ids=step.ids), done)

    def _fail(self, error: Dsv4Error) -> None:
        self.error = error
        self._end(Failed(code=error.code, message=str(error), param=error.param, retryable=error.retryable))

    def _append(self, events: Sequence[Event]) -> None:
        self.write(events, "running")

    def _end(self, *last: Event) -> None:
        on_end, self._on_end = self._on_end, None
        final = last[-1]
        self.end(last, lambda: final if isinstance(final, Failed) else self.generation(), on_end)


def _as_run(messages: Sequence[dict[str, Any]], results: Sequence[ToolResult]) -> list[dict[str, Any]]:
    """Return the history with the calls of its last message as they were run: an edited one reads as edited."""
    run = {result.id: result.arguments for result in results if result.arguments}
    *before, reply = messages
    calls = [
        call | {"function": call["function"] | {"arguments": run.get(call["id"], call["function"]["arguments"])}}
        for call in reply["tool_calls"]
    ]
    return [*before, reply | {"tool_calls": calls}]


def _not_run(call: ToolCall, why: str) -> ToolResult:
    return ToolResult(id=call.id, name=call.name, content=f"Not run: {why}.", error=why)


def _message(result: ToolResult) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": result.id, "content": result.content}


def _typed(error: Exception) -> Dsv4Error:
    if isinstance(error, Dsv4Error):
        return error
    typed = RequestError(f"the approval of a call failed: {type(error).__name__}: {error}", param="approve")
    typed.__cause__ = error
    return typed
