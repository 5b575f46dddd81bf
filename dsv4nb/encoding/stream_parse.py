"""Generated text → reasoning, content and calls as they arrive, whatever the model writes (encoding.md section 9).

`markers` knows the tags, `calls` reads what stands inside a block; the automaton around it is here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from dsv4nb.encoding.calls import Anomaly, CallEvent, CallReader, ToolCall
from dsv4nb.encoding.constants import CALLS_OPEN, EOS, THINK_CLOSE, THINK_OPEN
from dsv4nb.encoding.markers import BLANKS, CLOSERS, INSIDE, INVOKE, OPENERS, OUTSIDE, WITHOUT_TOOLS, Markers

Channel = Literal["reasoning", "content", "tool", "hidden"]
Ending = Literal["eos", "tool_calls", "length"]
_State = Literal["reasoning", "content", "opener", "block", "after", "done"]

_BLANK_RUN = re.compile(f"[{BLANKS}]*")
_IN_A_BLOCK = (INVOKE, *CLOSERS)  # what follows an opener that is one
_LONGEST = max(map(len, _IN_A_BLOCK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of a channel."""

    channel: Channel
    text: str


class Splitter:
    """Sorts generated text into channels and reads the calls in it.

    The pieces of all channels, joined in order, are the text again, character by character. "tool" holds blocks
    of calls as the model wrote them; "hidden" what nobody is shown: control tokens, the up to two newlines in
    front of a block, closers of nothing, and all that follows a block or the end token.

    The result does not depend on how the text is cut into deltas. A tail that could still become a marker,
    newlines that could still be a separator and an opener that no invocation has followed yet are held back, so
    nothing shown is ever taken back. The work per character does not grow with the reply.

    Args:
        thinking: whether the prompt ended in `<think>`.
        tools_enabled: whether tools were offered; otherwise a block is ordinary text.
    """

    def __init__(self, *, thinking: bool, tools_enabled: bool = False) -> None:
        self._state: _State = "reasoning" if thinking else "content"
        self._tools = tools_enabled
        self._held = ""
        self._out: list[Piece | CallEvent] = []
        self._reasoning_end = ""  # last character of the reasoning so far
        self._answered = False  # something visible stands in content
        self._anomalies: dict[Anomaly, None] = {}
        self._reader = CallReader(self._note)
        self._block_closed = False
        self._ending: Ending | None = None
        # of an opener that is not decided: the state it stands in, the newlines before it, the blanks behind it
        self._around: Literal["reasoning", "content"] = "content"
        self._before, self._opener = "", ""
        self._behind: list[str] = []

    @property
    def block_closed(self) -> bool:
        """Whether a block of calls is complete: generation stops here."""
        return self._block_closed

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The finished calls so far."""
        return tuple(self._reader.calls)

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """How the text departs from the format so far, each name once, in the order met."""
        return tuple(self._anomalies)

    @property
    def ending(self) -> Ending | None:
        """What ended the text: its end token, the closer of a block, else its length; None before `flush`."""
        return self._ending

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """Take a delta; return the text that may be shown now."""
        return _texts(self.feed_events(text))

    def flush(self, *, eos: bool = False) -> list[tuple[Channel, str]]:
        """End of the stream; return what was held back. `eos` as for `flush_events`."""
        return _texts(self.flush_events(eos=eos))

    def feed_events(self, text: str) -> list[Piece | CallEvent]:
        """Take a delta; return what it settles: pieces, and the events of calls behind the text they rest on."""
        self._held = self._run(self._held + text)
        return self._taken()

    def flush_events(self, *, eos: bool = False) -> list[Piece | CallEvent]:
        """End of the stream; return what was held back, which is no marker.

        Args:
            eos: the end token was sampled, but its text was not fed; it is not returned either.
        """
        rest = self._run(self._held + (EOS if eos else ""))
        if eos:
            self._out.pop()
        elif self._state == "opener":
            rest = self._run(self._revert() + rest)
        self._held = ""
        # a tag that was cut short is no text of a call
        self._emit(self._channel(), rest)
        if self._state == "reasoning":
            self._note("unterminated_think")
        elif self._state == "block":
            self._reader.end()
        self._end("tool_calls" if self._block_closed else "length")
        return self._taken()

    def _taken(self) -> list[Piece | CallEvent]:
        out, self._out = self._out, []
        return list(_merged(out))

    def _note(self, anomaly: Anomaly) -> None:
        self._anomalies[anomaly] = None

    def _end(self, ending: Ending) -> None:
        self._state = "done"
        self._ending = self._ending or ending

    def _run(self, text: str) -> str:
        """Take the text as far as it is decided; return the rest."""
        at = 0
        while self._state != "done":
            if self._state == "opener":
                text, at = self._after_opener(text, at)
                if self._state == "opener":
                    return text[at:]
                continue
            markers = self._markers()
            found = markers.search(text, at)
            end = self._separator(text, at, markers.decided(text, at)) if found is None else found.start()
            if found is not None and self._state in ("reasoning", "content"):
                at = self._in_text(text, at, found)
                continue
            self._show(text[at:end])
            at = end
            if self._markers() is not markers:  # the text began something that has other markers
                continue
            if found is None:
                return text[at:]
            at += self._in_block(found[0])
        self._emit("hidden", text[at:])
        return ""

    def _markers(self) -> Markers:
        if self._state == "block":
            return INSIDE[self._reader.state]
        if self._state in ("reasoning", "content") and not self._tools:
            return WITHOUT_TOOLS
        return OUTSIDE[self._state]

    def _channel(self) -> Channel:
        if self._state == "reasoning" or self._state == "content":
            return self._state
        return "tool" if self._state == "block" else "hidden"

    def _emit(self, channel: Channel, text: str) -> None:
        if text:
            self._out.append(Piece(channel=channel, text=text))

    def _show(self, text: str) -> None:
        """Pass on text that holds no marker."""
        if not text:
            return
        self._emit(self._channel(), text)
        if self._state == "reasoning":
            self._reasoning_end = text[-1]
        elif self._state == "block":
            self._reader.text(text)
            self._out += self._reader.take_events()
        elif text.strip(BLANKS):
            if self._state == "content":
                self._answered = True
            else:
                self._note("text_after_tool_calls")

    def _separator(self, text: str, start: int, end: int) -> int:
        """Return where the up to two newlines that end at `end` begin."""
        if self._tools and self._state in ("reasoning", "content"):
            for _ in range(2):
                end -= end > start and text[end - 1] == "\n"
        return end

    def _in_text(self, text: str, at: int, found: re.Match[str]) -> int:
        """Take reasoning or content up to a marker, and the marker; return where to go on."""
        marker, start = found[0], found.start()
        if marker != INVOKE and not (marker in OPENERS and self._may_open(text, at, start)):
            self._show(text[at:start])
            self._control(marker)
            return found.end()
        separator = self._separator(text, at, start)
        self._show(text[at:separator])
        if marker == INVOKE:
            self._emit("hidden", text[separator:start])
            self._note("missing_block_open")
            self._state = "block"
            return start
        self._around = "reasoning" if self._state == "reasoning" else "content"
        self._before, self._opener, self._state = text[separator:start], marker, "opener"
        return found.end()

    def _may_open(self, text: str, at: int, start: int) -> bool:
        """Tell whether a block may begin at `start`: within reasoning only a new line does."""
        before = text[start - 1] if start > at else self._reasoning_end
        return self._state == "content" or before in ("", "\n")

    def _control(self, marker: str) -> None:
        """Take a marker within reasoning or content that opens no block."""
        is_reasoning = self._state == "reasoning"
        if marker == THINK_OPEN and not is_reasoning and (self._answered or self._reasoning_end):
            self._show(marker)
            return
        if marker in OPENERS:
            self._show(marker)
            return
        self._emit("hidden", marker)
        if marker == EOS:
            if is_reasoning:
                self._note("unterminated_think")
            self._end("eos")
        elif marker == THINK_CLOSE:
            if not is_reasoning:
                self._note("stray_think_close")
            self._state = "content"
        elif marker == THINK_OPEN:
            # a model asked not to think may do so first thing
            self._note("duplicate_think_open" if is_reasoning else "think_in_chat_mode")
            self._state = "reasoning"
        else:
            self._note("orphan_closer")

    def _after_opener(self, text: str, at: int) -> tuple[str, int]:
        """Find out from what follows whether the opener is one; return the text and place to go on with."""
        blanks = _BLANK_RUN.match(text, at)
        assert blanks is not None
        end = blanks.end()
        sequel = text[end : end + _LONGEST]
        if sequel.startswith(_IN_A_BLOCK):
            self._commit(blanks[0])
        elif any(tag.startswith(sequel) for tag in _IN_A_BLOCK):
            self._behind.append(blanks[0])
        else:
            behind = self._revert()
            return (behind + text[at:], 0) if behind else (text, at)
        return text, end

    def _commit(self, blanks: str) -> None:
        self._emit("hidden", self._before)
        self._emit("tool", f"{self._opener}{''.join(self._behind)}{blanks}")
        if self._opener != CALLS_OPEN:
            self._note("malformed_opener")
        if self._around == "reasoning":
            self._note("implicit_think_end")
        self._state, self._behind = "block", []

    def _revert(self) -> str:
        """Make the opener text; return the blanks that were read behind it."""
        self._state = self._around
        self._note("literal_opener")
        self._show(self._before + self._opener)
        behind, self._behind = "".join(self._behind), []
        return behind

    def _in_block(self, marker: str) -> int:
        """Take a marker within or behind a block; return how much of it was used."""
        if self._state == "after":
            self._emit("hidden", marker)
            self._end("eos")
            return len(marker)
        is_used = self._reader.marker(marker)
        if is_used:
            self._emit("hidden" if marker == EOS else "tool", marker)
        self._out += self._reader.take_events()
        if self._reader.is_closed and marker == EOS:
            self._end("eos")
        elif self._reader.is_closed:
            self._state, self._block_closed = "after", True
        return len(marker) if is_used else 0


def _merged(events: Iterable[Piece | CallEvent]) -> Iterator[Piece | CallEvent]:
    """Join neighbouring pieces of one channel."""
    for channel, run in groupby(events, lambda event: event.channel if isinstance(event, Piece) else None):
        if channel is None:
            yield from run
        else:
            yield Piece(channel=channel, text="".join(piece.text for piece in run if isinstance(piece, Piece)))


def _texts(events: Iterable[Piece | CallEvent]) -> list[tuple[Channel, str]]:
    pieces = _merged(event for event in events if isinstance(event, Piece))
    return [(piece.channel, piece.text) for piece in pieces if isinstance(piece, Piece)]
