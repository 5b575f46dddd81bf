"""A model that plays a recording: the whole product on top of it, and nothing below."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import RequestError
from dsv4nb.handle import Model
from dsv4nb.session.journal import Journal
from dsv4nb.session.log import OnEnd
from dsv4nb.session.request import ChatTokens, Limits, Request
from dsv4nb.session.server import Server
from dsv4nb.testing.fake_model import model_of
from dsv4nb.testing.recording import RecordedReply, Recording
from dsv4nb.testing.replay_engine import ReplayEngine, ReplayTokens

_SHOWN = 40  # characters of a message in a refusal


def replay_model(
    recording: Recording | str | Path, *, speed: float = 1.0, rate: float | None = None, name: str | None = None
) -> Model:
    """Return a model that gives the replies of a recording, and refuses everything that is not in it.

    A prompt that was recorded gets the reply that was recorded, whatever sampler values are asked for: `Done.config`
    tells those that it was made with. Of several replies to one prompt the first comes first, and the last from then
    on. Log-probabilities are told where they are asked for, with as many alternatives as were recorded at most.

    Args:
        recording: of `dsv4nb.testing.record`, or the path of its file.
        speed: times the recorded one; `math.inf` waits for nothing.
        rate: forwards a second, in place of the recorded times: rounds where replies were speculated.

    Raises:
        RequestError: the file is no recording, or a number is not above 0.
    """
    recording = recording if isinstance(recording, Recording) else Recording.open(recording)
    for what, value in (("speed", speed), ("rate", rate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise RequestError(f"{what} is {value!r}; it must be a number above 0", param=what)
    engine = ReplayEngine(recording, speed=speed, rate=rate)
    tokens = ReplayTokens(recording)
    limits = Limits(
        max_seq=recording.max_seq,
        vocab_size=recording.vocab_size,
        revision=recording.revision,
        sampler=SamplerConfig(),
        spec=SpecConfig() if recording.block_size else None,
        block_size=recording.block_size,
        model=name or recording.model,
        weights=recording.weights,
        arithmetic=recording.arithmetic,
    )
    server = ReplayServer(recording, engine, tokens, limits.model)
    return model_of(server, cast(Engine, engine), tokens, limits, provenance="a recording")


class ReplayServer(Server):
    """Takes requests whose prompt was recorded, and runs them as they were recorded."""

    def __init__(self, recording: Recording, engine: Engine, tokens: ChatTokens, name: str) -> None:
        super().__init__(engine, tokens, name)
        self._recording, self._played = recording, dict[tuple[int, ...], int]()

    def submit(self, request: Request, on_end: OnEnd | None = None, **options: Any) -> Journal:
        """Put the recorded request in the queue in place of the one that is asked for.

        Raises:
            RequestError: nothing of its kind was recorded.
        """
        return super().submit(self._as_recorded(request), on_end, **options)

    def _as_recorded(self, request: Request) -> Request:
        found = [reply for reply in self._recording.replies if _answers(reply, request)]
        if not found:
            raise RequestError(self._refusal(request), param="prompt")
        key = (*request.prompt, *request.given)
        number = self._played.get(key, 0)
        self._played[key] = number + 1
        reply = found[min(number, len(found) - 1)]
        return replace(
            request,
            max_new=reply.max_new,
            config=reply.config,
            spec=reply.spec,
            stops=reply.stops,
            eos=frozenset(reply.eos),
            is_thinking=reply.is_thinking,
            has_tools=reply.has_tools,
            constraint=None,
            logprobs=None if request.logprobs is None else min(request.logprobs, reply.n_top),
        )

    def _refusal(self, request: Request) -> str:
        asked = asked_of(request)
        same = [reply for reply in self._recording.replies if request.given and reply.prompt == request.prompt]
        if same:
            return f"this recording has no reply to {asked!r} that goes on behind these {len(request.given)} tokens"
        known = "; ".join(repr(reply.asked) for reply in self._recording.replies)
        what = repr(asked) if asked else f"these {len(request.prompt)} ids"
        where = "behind this history and with these options"
        return f"this recording has no turn beginning with {what} {where}; it has {known}"


def _answers(reply: RecordedReply, request: Request) -> bool:
    return reply.prompt == request.prompt and reply.given == request.given


def asked_of(request: Request) -> str:
    """Return the beginning of what a request asks, "" of a prompt given as ids."""
    content = request.messages[-1].get("content") if request.messages else None
    line = " ".join(str(content or "").split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
