"""Replies as data: their tokens, what the model thought of them, how they were speculated and how long it took.

One JSON file, which needs neither the model nor torch. Logits are not kept: of each place there are the most likely
tokens, the chosen one's rank and the entropy, and `rows.py` makes a row of them that has the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.encoding.constants import Revision
from dsv4nb.errors import RequestError
from dsv4nb.rounds import Rounds

FORMAT, VERSION = "dsv4nb recording", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the model thought where it chose a token.

    Attributes:
        id: the token; logprob, rank, entropy and top are as in `TokenLogprob`.
        avoid: ids that are to get nothing of what the told ones leave over: by the draws of the recorded seed one of
            them would be chosen instead.
    """

    id: int
    logprob: float
    rank: int
    entropy: float
    top: tuple[tuple[int, float], ...]
    avoid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """One reply.

    Attributes:
        asked: the beginning of its last message, for people.
        prompt: ids; `text` is the same rendered.
        given: ids that the reply began with and that were not chosen.
        places: one per token that was chosen, in order; with an end token there is one more than the reply has.
        ends: whether the last place is that of an end token.
        n_top: alternatives of each place.
        rounds: of speculation. Their times are those that were measured.
        draft_rows: (round, draft, height, ids) of rows of the drafter that need them, as in `rows.draft_row`.
        prefill_ms: of the prompt's rows that were computed; `step_ms` of one token on a plain route.
        max_new: the others too are as in `Request`.
    """

    asked: str
    prompt: tuple[int, ...]
    text: str
    given: tuple[int, ...]
    places: tuple[Place, ...]
    ends: bool
    n_top: int
    rounds: Rounds = field(repr=False)
    draft_rows: tuple[tuple[int, int, float, tuple[int, ...]], ...]
    config: SamplerConfig
    spec: SpecConfig | None
    is_thinking: bool
    has_tools: bool
    stops: tuple[str, ...]
    eos: tuple[int, ...]
    max_new: int
    prefill_ms: float
    step_ms: float

    @property
    def chosen(self) -> tuple[int, ...]:
        """The tokens that were chosen, an end token among them."""
        return tuple(place.id for place in self.places)

    @property
    def ids(self) -> tuple[int, ...]:
        """The reply, as `Generation.ids` has it."""
        return (*self.given, *(self.chosen[:-1] if self.ends else self.chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Replies of one model.

    Attributes:
        texts: the bytes of every token that is met.
        controls: control tokens by their text.
        weights, arithmetic: of the recorded model, as in `Limits`.
    """

    model: str
    weights: str
    arithmetic: str
    revision: Revision
    vocab_size: int
    max_seq: int
    block_size: int
    texts: Mapping[int, bytes] = field(repr=False)
    controls: Mapping[str, int] = field(repr=False)
    replies: tuple[RecordedReply, ...]

    def save(self, path: str | Path) -> int:
        """Write the file; return its bytes."""
        return Path(path).write_bytes(self.to_json().encode())

    def to_json(self) -> str:
        """Return the text of the file; numbers are rounded."""
        raw = {"format": FORMAT, "version": VERSION, **_dict_of(self)}
        return json.dumps(raw, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def open(cls, path: str | Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            RequestError: the file is no recording, or one of a newer version.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read: {error}", param="path") from error
        except RequestError as error:
            raise RequestError(f"{path} cannot be played: {error}", param="path") from error

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """Read what `to_json` returned.

        Raises:
            RequestError: the text is no recording, or one of a newer version.
        """
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
                raise ValueError(f"it does not say that it is a {FORMAT!r}")
            if (version := raw.pop("version", None)) != VERSION:
                raise ValueError(f"its version is {version!r}; this dsv4nb reads {VERSION}")
            raw["texts"] = {int(id): _bytes(text) for id, text in raw["texts"].items()}
            raw["replies"] = tuple(map(_reply, raw["replies"]))
            return cls(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(f"it is no recording: {error}", param="text") from error


def _dict_of(recording: Recording) -> dict[str, Any]:
    """Return what JSON can say."""
    raw = {f.name: getattr(recording, f.name) for f in fields(recording)}
    raw["texts"] = {str(id): _text(data) for id, data in recording.texts.items()}
    raw["replies"] = [_reply_dict(reply) for reply in recording.replies]
    return raw


def _reply_dict(reply: RecordedReply) -> dict[str, Any]:
    raw = {f.name: getattr(reply, f.name) for f in fields(reply)}
    raw["config"] = asdict(reply.config)
    raw["spec"] = None if reply.spec is None else asdict(reply.spec)
    raw["rounds"] = [_rounded(one) for one in reply.rounds.to_dicts()]
    raw["places"] = [
        [p.id, round(p.logprob, 6), p.rank, round(p.entropy, 5), [[t, round(lp, 6)] for t, lp in p.top], p.avoid]
        for p in reply.places
    ]
    return raw


def _reply(raw: dict[str, Any]) -> RecordedReply:
    lists = {name: tuple(raw[name]) for name in ("prompt", "given", "stops", "eos")}
    bias = tuple((int(token), float(value)) for token, value in raw["config"]["logit_bias"])
    places = tuple(
        Place(id=id, logprob=logprob, rank=rank, entropy=entropy, top=tuple(map(tuple, top)), avoid=tuple(avoid))
        for id, logprob, rank, entropy, top, avoid in raw["places"]
    )
    own = {
        "config": SamplerConfig(**raw["config"] | {"logit_bias": bias}),
        "spec": None if raw["spec"] is None else SpecConfig(**raw["spec"]),
        "rounds": Rounds.from_dicts(raw["rounds"]),
        "draft_rows": tuple((number, k, height, tuple(ids)) for number, k, height, ids in raw["draft_rows"]),
        "places": places,
    }
    return RecordedReply(**raw | lists | own)


def _rounded(value: Any) -> Any:
    """Six digits are plenty, and half the bytes."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {name: _rounded(one) for name, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
    return value


def _text(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:  # a part of a character
        return list(data)


def _bytes(text: str | list[int]) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
