"""An engine that plays a recording: rows, drafts and confidences as they were, in the recorded time or faster.

As with real weights the ids alone decide: a row is found by the ids in front of it, however they got into the cache.
So everything above the engine is the product, and chooses what it chose. No torch, no weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dsv4nb.encoding.constants import BOS, EOS
from dsv4nb.encoding.render import Segment
from dsv4nb.engine.protocol import ChooseDraft, DecodeState, Proposal, Row
from dsv4nb.errors import EncodingError, EngineError
from dsv4nb.testing.fake_engine import FakeEngine, FakeState
from dsv4nb.testing.recording import RecordedReply, Recording
from dsv4nb.testing.rows import draft_row, row_of

Ids = tuple[int, ...]

_CHUNK = 64  # prompt rows between two looks at whether to stop


@dataclass(slots=True)
class TargetRow:
    """What is known of a row of the model."""

    told: dict[int, float] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    entropy: float | None = None
    avoid: set[int] = field(default_factory=set)
    made: dict[int, Row] = field(default_factory=dict)  # by the number of `avoid`, which only grows

    def row(self, size: int) -> Row:
        """Return it; what only a draft is known of is divided evenly."""
        key = len(self.avoid)
        if key not in self.made:
            entropy = math.log(size) if self.entropy is None else self.entropy
            self.made = {key: row_of(list(self.told.items()), self.ranks, entropy, size, self.avoid)}
        return self.made[key]


@dataclass(slots=True)
class DraftedRow:
    """What is known of a row of the drafter: tokens that were drafted from it, and their probabilities."""

    margin: float
    told: dict[int, float] = field(default_factory=dict)
    avoid: set[int] = field(default_factory=set)
    height: float = 0.5

    def row(self, size: int) -> Row:
        """Return it."""
        return draft_row(self.told, self.margin, size, self.avoid, self.height)


@dataclass(slots=True)
class Script:
    """A recording, by the ids in front of each row; rows of the drafter by where their block began, too.

    Attributes:
        conf_logits: of the draft that the ids end in.
        draft_ms, step_ms: what drafting, and a forward, took behind these ids.
    """

    size: int
    rows: dict[Ids, TargetRow] = field(default_factory=dict)
    drafts: dict[tuple[int, Ids], DraftedRow] = field(default_factory=dict)
    conf_logits: dict[tuple[int, Ids], float] = field(default_factory=dict)
    draft_ms: dict[Ids, float] = field(default_factory=dict)
    step_ms: dict[Ids, float] = field(default_factory=dict)

    def add(self, reply: RecordedReply) -> None:
        """Take a reply up; where another one said the same before, its rows are gone on from."""
        said = (*reply.prompt, *reply.given)
        start = len(said)
        whole = (*said, *reply.chosen)
        for i, place in enumerate(reply.places):
            row = self.rows.setdefault(whole[: start + i], TargetRow())
            row.told |= {**dict(place.top), place.id: place.logprob}
            row.ranks |= {place.id: place.rank, **{token: rank for rank, (token, _) in enumerate(place.top, 1)}}
            row.entropy = place.entropy
            row.avoid |= set(place.avoid)
            self.step_ms.setdefault(whole[: start + i], reply.step_ms)
        heights = {(number, k): (height, ids) for number, k, height, ids in reply.draft_rows}
        for round in reply.rounds:
            before: Ids = whole[: round.start + 1]  # the pending token included
            for k, draft in enumerate(round.drafts):
                if draft.q is not None and draft.margin is not None:
                    drafted = self.drafts.setdefault((round.start, before), DraftedRow(draft.margin))
                    drafted.told[draft.id] = draft.q
                    drafted.height, avoid = heights.get((round.round, k), (drafted.height, ()))
                    drafted.avoid |= set(avoid)
                if draft.p is not None:
                    row = self.rows.setdefault(before, TargetRow())
                    if draft.id not in row.told:
                        row.told[draft.id] = math.log(max(draft.p, 1e-30))
                before = (*before, draft.id)
                if draft.conf_logit is not None:
                    self.conf_logits[round.start, before] = draft.conf_logit
            at = whole[: round.start + 1]
            self.draft_ms[at] = round.ms.get("draft", 0.0)
            self.step_ms[at] = round.ms.get("verify", 0.0)


class ReplayEngine(FakeEngine):
    """Plays a recording.

    Args:
        speed: times the recorded one; `math.inf` waits for nothing.
        rate: forwards a second, in place of the recorded times: rounds where the reply was speculated.
    """

    def __init__(self, recording: Recording, *, speed: float = 1.0, rate: float | None = None) -> None:
        self.script = Script(recording.vocab_size)
        for reply in recording.replies:
            self.script.add(reply)
        rows = [reply.prefill_ms for reply in recording.replies]
        mean_ms = sum(rows) / len(rows) / max(1, len(recording.replies[0].prompt)) if rows else 0.0
        super().__init__(
            eos=recording.controls[EOS],
            vocab_size=recording.vocab_size,
            max_seq=recording.max_seq,
            drafts=(lambda before: ()) if recording.block_size else None,
            block_size=recording.block_size or 5,
            chunk=_CHUNK,
            chunk_delay_s=0.0 if rate is not None else _CHUNK * mean_ms / 1e3 / speed,
        )
        self._speed, self._rate, self._due = speed, rate, 0.0

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the recorded rows, after the recorded time."""
        before = (*self._own(state).ledger, *tokens[:1])
        if self._rate is not None:
            now = time.monotonic()
            time.sleep(max(0.0, self._due - now))
            self._due = max(self._due, now) + 1 / self._rate
        else:
            self._wait(self.script.step_ms.get(before, 0.0))
        return super().forward_rows(state, tokens)

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Return the recorded drafts."""
        own = self._own(state)
        self._begin(own, "draft", {})
        if not self.block_size:
            raise EngineError("the recording has no drafter", param="drafter")
        before = (*own.ledger, pending)
        if self._rate is None:
            self._wait(self.script.draft_ms.get(before, 0.0))
        ids: list[int] = []
        rows: list[Row] = []
        conf_logits: list[float] = []
        while (
            len(ids) < self.block_size and (drafted := self.script.drafts.get((own.pos, (*before, *ids)))) is not None
        ):
            rows.append(drafted.row(self.vocab_size))
            ids.append(choose(rows[-1], len(ids), tuple(ids)))
            conf_logits += (
                [found] if (found := self.script.conf_logits.get((own.pos, (*before, *ids)))) is not None else []
            )
        told = tuple(conf_logits) if len(conf_logits) == len(ids) else ()
        return Proposal(ids=tuple(ids), conf_logits=told, rows=tuple(rows))

    def layout(self) -> str:
        """Say that arrays are of a recording."""
        return "recording"

    def _wait(self, ms: float) -> None:
        if ms > 0 and not math.isinf(self._speed):
            time.sleep(ms / 1e3 / self._speed)

    def _row(self, state: FakeState, rows: Ids) -> Row:
        """The row behind committed ids and provisional `rows`."""
        before = (*state.ledger, *rows)
        known = self.script.rows.get(before)
        if known is not None:
            return known.row(self.vocab_size)
        # behind a draft that was rejected nothing is chosen; measuring costs reads zeros, and the chunks of a prompt
        # end anywhere
        is_chosen_from = len(rows) <= 1 and any(before)
        if is_chosen_from and not any(key[: len(before)] == before for key in self.script.rows):
            raise EngineError(
                f"this recording does not go on behind {len(before)} ids that end in {list(before[-4:])}",
                param="tokens",
            )
        return np.zeros(self.vocab_size, np.float32)


class ReplayTokens:
    """The tokens of a recording: what was read is read as it was, other text by the longest tokens that are known."""

    def __init__(self, recording: Recording) -> None:
        self._texts, self._controls = dict(recording.texts), dict(recording.controls)
        self._prompts = {reply.text: list(reply.prompt) for reply in recording.replies}
        self.vocab_size = recording.vocab_size
        controls = set(self._controls.values())
        self._by_text = {data: id for id, data in sorted(self._texts.items()) if data and id not in controls}
        self._longest = max(map(len, self._by_text), default=1)
        self._unknown = next((id for id in range(self.vocab_size) if id not in self._texts), 0)

    @property
    def bos_id(self) -> int:
        return self._controls[BOS]

    @property
    def eos_id(self) -> int:
        return self._controls[EOS]

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(self._controls.values())

    def id_of(self, control: str) -> int:
        """Return the id of a control token.

        Raises:
            EncodingError: the recorded model has no such token.
        """
        if control not in self._controls:
            raise EncodingError(f"the recording has no control token {control!r}")
        return self._controls[control]

    def encode_segments(self, segments: Iterable[Segment], *, trust_text: bool = False) -> list[int]:
        """Return the ids of a prompt: the recorded ones of a recorded prompt."""
        text = "".join(segment.text for segment in segments)
        return list(self._prompts.get(text) or self.encode_plain(text))

    def encode_plain(self, text: str) -> list[int]:
        """Return ids for text; what the recording has no token for is one unknown token a byte."""
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._by_text), 0)
            ids.append(self._by_text[data[at : at + size]] if size else self._unknown)
            at += max(1, size)
        return ids

    def count(self, text: str) -> int:
        """Count the tokens of plain text, about."""
        return len(self.encode_plain(text))

    def token_bytes(self, token: int) -> bytes:
        """Return what an id stands for."""
        return self._texts.get(token, b"")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
