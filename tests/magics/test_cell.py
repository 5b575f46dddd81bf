from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4nb.events import Event
from dsv4nb.magics.cell import follow
from dsv4nb.stream.transcript import Entry


class Recorder:
    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.entries: list[Entry] = []

    def show(self, events: Sequence[Event]) -> None:
        self.lengths.append(len(events))

    def finish(self, entry: Entry) -> None:
        self.entries.append(entry)


def test_a_reply_is_shown_while_it_grows_and_whole_at_the_end(make_ticket: Any) -> None:
    screen = Recorder()
    words = [("content", f"{i} ") for i in range(20)]
    result, is_interrupted = follow(make_ticket(words, 0.02), screen)
    assert not is_interrupted and result.text == "".join(word for _, word in words)
    assert len(set(screen.lengths)) > 3 and screen.lengths == sorted(screen.lengths)
    (entry,) = screen.entries
    assert (entry.text, entry.n_tokens, entry.stop_reason) == (result.text, 20, "stop")


def test_a_failed_reply_shows_what_there_was_and_why(make_ticket: Any) -> None:
    screen = Recorder()
    follow(make_ticket([("content", "half ")], 0.0, error="out of memory"), screen)
    assert (screen.entries[0].text, screen.entries[0].error) == ("half ", "out of memory")
