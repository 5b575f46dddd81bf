"""`for` and `async for` over a run; whoever leaves the loop stops the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Protocol

from dsv4nb.events import Event, Generation

HEARTBEAT_S = 0.05  # an awaiting cell sees Interrupt only when its loop wakes: 6 s late without this


class Run(Protocol):
    """The part of a ticket that a loop needs."""

    def events(self) -> Iterator[Event]: ...
    def poll(self, start: int) -> tuple[list[Event], bool]: ...
    def result(self) -> Generation: ...
    def cancel(self) -> None: ...
    def watch(self, callback: Callable[[], None]) -> Callable[[], None]: ...


def iterate(ticket: Run) -> Iterator[Event]:
    """Yield the events of a run; leaving the loop early cancels it.

    Raises:
        Dsv4Error: the run failed, after its `Failed` event.
    """
    try:
        yield from ticket.events()
    finally:
        ticket.cancel()  # changes nothing once the run has ended
    ticket.result()


async def aiterate(ticket: Run) -> AsyncGenerator[Event]:
    """Yield the events of a run in an event loop; leaving or cancelling the loop cancels the run.

    Raises:
        Dsv4Error: the run failed, after its `Failed` event.
    """
    async with aclosing(aevents(ticket)) as events:
        async for event in events:
            yield event
    ticket.result()


async def aevents(ticket: Run) -> AsyncGenerator[Event]:
    """Yield the events of a run without raising its error, each as soon as the loop gets to it."""
    loop, news, seen = asyncio.get_running_loop(), asyncio.Event(), 0

    def tell() -> None:  # on the serving thread
        with suppress(RuntimeError):  # the loop was closed under the reader
            loop.call_soon_threadsafe(news.set)

    unwatch = ticket.watch(tell)
    try:
        while True:
            news.clear()
            events, is_finished = ticket.poll(seen)
            for event in events:
                yield event
            seen += len(events)
            if is_finished:
                return
            # not wait_for: before Python 3.12 it can lose a cancellation that comes together with news
            heartbeat = loop.call_later(HEARTBEAT_S, news.set)
            try:
                await news.wait()
            finally:
                heartbeat.cancel()
    finally:
        unwatch()
        ticket.cancel()
