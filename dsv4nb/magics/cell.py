"""`%%dsv4`: the reply streams into the cell, and an interrupt keeps what is there."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dsv4nb.events import Event, Token, ToolCall, ToolResult
from dsv4nb.stream.transcript import Entry, Transcript, ended_entry, entry_from_events

UPDATE_S = 0.1  # each update carries the whole reply; ten a second read as a stream
POLL_S = 0.05
SETTLE_S = 30.0  # a cancelled run ends within one pass; a page of prompt may be under way


class Ticket(Protocol):
    """What the cell asks of a run."""

    def poll(self, start: int) -> tuple[Sequence[Event], bool]: ...
    def wait(self, timeout: float) -> bool: ...
    def result(self) -> Any: ...
    def cancel(self) -> None: ...


class Interrupted(KeyboardInterrupt):
    """The person interrupted the kernel, and the message says what is left. Cells that were to run next do not run."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Screen(Protocol):
    """Where a reply appears."""

    def show(self, events: Sequence[Event]) -> None: ...
    def finish(self, entry: Entry) -> None: ...


class CellScreen:
    """An output of the cell, replaced as the reply grows.

    Args:
        is_live: whether the reply is shown before it is complete.
    """

    def __init__(self, *, is_live: bool) -> None:
        from dsv4nb.stream.output import Output

        self._is_live = is_live
        self._shown_at = time.monotonic()
        self._output = Output(_bundle(Entry(user="")))

    def show(self, events: Sequence[Event]) -> None:
        """Show the reply so far, at most every `UPDATE_S`."""
        if self._is_live and time.monotonic() - self._shown_at >= UPDATE_S:
            self._shown_at = time.monotonic()
            self._output.update(_bundle(replace(entry_from_events("", events), n_tokens=0, n_reasoning=None)))

    def finish(self, entry: Entry) -> None:
        """Show the whole reply and how it ended."""
        self._output.update(_bundle(entry))


class TerminalScreen:
    """Standard output, for a terminal that cannot replace what it has printed."""

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self._seen = 0
        self._channel = ""

    def show(self, events: Sequence[Event]) -> None:
        """Write what is new."""
        if self._is_live:
            for event in events[self._seen :]:
                if isinstance(event, Token) and event.channel in ("content", "reasoning") and event.text:
                    self._write(event.channel, event.text)
                elif isinstance(event, ToolCall):
                    self._write(f"call {event.id}", f"[Call] {event.name}({event.arguments})")
                elif isinstance(event, ToolResult):
                    self._write(f"result {event.id}", f"[Result] {event.name} → {event.content}")
            self._seen = len(events)

    def _write(self, channel: str, text: str) -> None:
        if channel != self._channel:
            heading = {"reasoning": "[thinking]\n"}.get(channel, "")
            sys.stdout.write(("\n\n" if self._channel else "") + heading)
            self._channel = channel
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self, entry: Entry) -> None:
        """Close the reply with its mark."""
        rest = (f"[{entry.mark}]" if entry.mark else "") if self._is_live else str(_transcript(entry))
        sys.stdout.write(f"\n{rest}\n" if self._is_live and rest else f"{rest}\n")
        sys.stdout.flush()


def follow(ticket: Ticket, screen: Screen) -> tuple[Any, bool]:
    """Show a run until it ends.

    Returns:
        The result, and whether it was interrupted.

    Raises:
        Dsv4Error: the run failed; the screen shows what there was.
    """
    is_interrupted = False
    while True:
        try:
            while not ticket.wait(POLL_S):
                screen.show(ticket.poll(0)[0])
            break
        except KeyboardInterrupt:
            is_interrupted = True
            ticket.cancel()
            if ticket.wait(SETTLE_S):
                break
    events = ticket.poll(0)[0]
    screen.show(events)
    screen.finish(ended_entry("", events))
    return ticket.result(), is_interrupted


def _transcript(entry: Entry) -> Transcript:
    return Transcript(turns=(entry,), prompts=False)


def _bundle(entry: Entry) -> Mapping[str, str]:
    return _transcript(entry).bundle()
