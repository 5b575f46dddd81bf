"""The one place where ids become events: end, budget, characters, channels, calls, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsv4nb.encoding.constants import EOS, THINK_CLOSE
from dsv4nb.encoding.detokenize import Detokenizer, TokenBytes
from dsv4nb.encoding.stream_parse import Splitter
from dsv4nb.events import Channel, Event, Reasoning, StopReason, Token, TokenLogprob, ToolCall
from dsv4nb.session.request import Request
from dsv4nb.session.stops import StopScanner


class Emission:
    """Turns the ids of one reply into events.

    Every id gives one `Token` that carries it. Where an id settles text of two channels, the earlier pieces come
    before it with `id` None. What stands behind an end, a stop string or the budget in the
    same round is discarded.

    Attributes:
        stop_reason: None while the reply goes on.
        ids: the reply so far, without an id that ended it.
    """

    def __init__(self, request: Request, source: TokenBytes, emit: Callable[[Event], None]) -> None:
        self.stop_reason: StopReason | None = None
        self.ids: list[int] = []
        self._emit, self._source = emit, source
        self._is_complete = False
        self._eos, self._max_new = request.eos, request.max_new
        self._characters = Detokenizer(source)
        self._splitter = Splitter(thinking=request.is_thinking, tools_enabled=request.has_tools)
        self._stops = StopScanner(request.stops)
        self._channel: Channel = "reasoning" if request.is_thinking else "content"  # of the text that comes next
        self._thought: list[str] | None = [] if request.is_thinking else None  # None outside a reasoning span
        self._first_call = sum(len(message.get("tool_calls", ())) for message in request.messages)
        self._told_calls = 0

    @property
    def problems(self) -> tuple[str, ...]:
        """Where the reply departs from the format; complete after `finish`."""
        return self._splitter.anomalies

    def accept(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> int:
        """Take the ids of one round, in order; return the place of the one that ended the reply, or how many there are.

        Args:
            logprobs: one per id, when they are reported.
        """
        for i, token in enumerate(ids):
            if self.stop_reason is not None:
                return i
            if token in self._eos:
                self.stop_reason = "stop"
                # a stop id of the caller's cuts a call off; the model's own end completes it
                self._is_complete = self._source.token_bytes(token) == EOS.encode()
                return i
            self.ids.append(token)
            self._say(token, self._pieces(self._characters.feed((token,))), logprobs[i] if logprobs else None)
            self._tell_calls()
            if self._stops.hit is not None:
                self.stop_reason = "stop"
            elif self._splitter.block_closed:
                self.stop_reason = "tool_calls" if self._told_calls else "stop"
            elif len(self.ids) >= self._max_new:
                self.stop_reason = "length"
            if self.stop_reason is not None:
                return i
        return len(ids)

    def finish(self) -> None:
        """Release what was held back; a stop string that it completes is a stop, and so is a block without its end."""
        if self._stops.hit is not None:
            return
        self._say(None, self._pieces(self._characters.flush(), is_last=True))
        self._tell_calls()
        if self.stop_reason == "cancelled":
            return
        if self._stops.hit is not None:
            self.stop_reason = "stop"
        elif self.stop_reason == "stop" and self._told_calls:
            self.stop_reason = "tool_calls"

    def _pieces(self, text: str, *, is_last: bool = False) -> list[tuple[Channel, str]]:
        """Return the (channel, text) that may be shown after `text`."""
        shown: list[tuple[Channel, str]] = []
        split = self._splitter.feed(text)
        if is_last:
            split += self._splitter.flush(eos=self._is_complete)
        for channel, piece in split:
            if self._stops.hit is not None:
                return shown
            if channel == "content":
                shown.append((channel, self._stops.feed(piece)))
            else:
                # a stop string does not reach across a control token or a block
                shown += [("content", self._stops.flush()), (channel, piece)]
        if is_last:
            shown.append(("content", self._stops.flush()))
        return [(channel, piece) for channel, piece in shown if piece]

    def _say(
        self, token: int | None, pieces: Sequence[tuple[Channel, str]], logprob: TokenLogprob | None = None
    ) -> None:
        if token is not None and not pieces:
            pieces = [(self._channel, "")]
        for i, (channel, text) in enumerate(pieces):
            if text:
                self._follow(channel, text)
            is_carrier = i == len(pieces) - 1
            self._emit(
                Token(
                    id=token if is_carrier else None,
                    text=text,
                    channel=channel,
                    logprob=logprob if is_carrier else None,
                )
            )

    def _tell_calls(self) -> None:
        """Tell of every call that is complete now."""
        for call in self._splitter.calls[self._told_calls :]:
            number = self._first_call + self._told_calls
            self._told_calls += 1
            self._emit(ToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments_json))

    def _follow(self, channel: Channel, text: str) -> None:
        """Keep track of the reasoning span, and tell when it is complete."""
        if channel == "reasoning":
            self._thought = self._thought or []
            self._thought.append(text)
        elif self._thought is not None and (channel != "hidden" or THINK_CLOSE in text):
            self._emit(Reasoning(text="".join(self._thought)))
            self._thought = None
        if channel != "hidden":
            self._channel = channel
        elif THINK_CLOSE in text:
            self._channel = "content"
