"""The one place where ids become events: end, budget, characters, channels and stop strings."""

from __future__ import annotations

from collections.abc import Callable

from dsv4nb.encoding.constants import THINK_CLOSE
from dsv4nb.encoding.detokenize import Detokenizer
from dsv4nb.encoding.stream_parse import Splitter
from dsv4nb.events import Channel, Event, Reasoning, StopReason, Token, TokenSnapshot
from dsv4nb.session.request import Request, Tokenizer
from dsv4nb.session.stops import StopScanner

Piece = tuple[Channel, str]


class Emission:
    """Takes the ids of one reply, one by one, and tells what a reader may know.

    Every id gives one `Token` with its id; text that is released later comes with the id None. The events do not
    depend on how many ids are decided at a time.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, emit: Callable[[Event], None]) -> None:
        self._request = request
        self._emit = emit
        self._detokenizer = Detokenizer(tokenizer)
        self._splitter = Splitter(thinking=request.thinking, tools_enabled=request.tools)
        self._stops = StopScanner(request.stops)
        self._channel: Channel = "reasoning" if request.thinking else "content"
        self._thought = False  # the reasoning is complete and was told
        self._texts: dict[Channel, list[str]] = {"content": [], "reasoning": [], "tool": [], "hidden": []}
        self._raw: list[str] = []
        self.ids: list[int] = []

    def take(self, token: int) -> StopReason | None:
        """Take the next id; return why the reply ends with it, None when it goes on."""
        if token in self._request.stop_ids:
            return "stop"
        self.ids.append(token)
        self._tell(token, self._scanned(self._splitter.feed(self._detokenizer.feed([token]))))
        if self._stops.hit is not None:
            return "stop"
        if self._splitter.block_closed:
            return "tool_calls"
        return "length" if len(self.ids) >= self._request.budget else None

    def finish(self, reason: StopReason) -> None:
        """Release what was held back and tell all ids."""
        pieces = self._scanned(self._splitter.feed(self._detokenizer.flush()) + self._splitter.flush())
        if held := self._stops.flush():
            pieces.append(("content", held))
        for piece in pieces:
            self._tell(None, [piece])
        if reason == "stop":
            self._end_thought()
        self._emit(TokenSnapshot(ids=tuple(self.ids)))

    def text(self, channel: Channel) -> str:
        """Return what was told on `channel`."""
        return "".join(self._texts[channel])

    @property
    def raw_text(self) -> str:
        """What was told on all channels, in order."""
        return "".join(self._raw)

    @property
    def has_calls(self) -> bool:
        """Whether the reply holds a complete block of calls."""
        return self._splitter.block_closed

    def _scanned(self, pieces: list[Piece]) -> list[Piece]:
        """Search the content for stop strings; whatever follows one is dropped."""
        shown: list[Piece] = []
        for channel, text in pieces:
            if self._stops.hit is not None:
                break
            if channel == "content":
                text = self._stops.feed(text)
            elif held := self._stops.flush():
                shown.append(("content", held))
            if text:
                shown.append((channel, text))
        return shown

    def _tell(self, token: int | None, pieces: list[Piece]) -> None:
        for channel, text in pieces or [(self._channel, "")]:
            if channel in ("content", "tool") or text.startswith(THINK_CLOSE):
                self._end_thought()
            self._emit(Token(id=token, text=text, channel=channel))
            self._texts[channel].append(text)
            self._raw.append(text)
            self._channel = "content" if channel == "hidden" else channel
            token = None

    def _end_thought(self) -> None:
        if not self._thought and (text := self.text("reasoning")):
            self._emit(Reasoning(text=text))
        self._thought = self._thought or bool(text)
