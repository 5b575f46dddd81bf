"""An engine that says what a script says: no torch, no weights, everything above it is real."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, THINK_CLOSE, THINK_OPEN, USER
from dsv4nb.encoding.render import Segment
from dsv4nb.engine.protocol import MAX_ROWS, Cancelled, ChooseDraft, DecodeState, Prefilled, Proposal, Snapshot
from dsv4nb.errors import EngineError

_CONTROLS = (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML)
_BYTES = len(_CONTROLS)  # ids of the 256 bytes begin here
_WORDS = _BYTES + 256
_CONTROL = re.compile("|".join(map(re.escape, _CONTROLS)))
_CALLS = (
    *("new_state", "prefill", "chunks", "forward_rows", "commit", "draft"),
    *("capture", "restore", "release", "dump", "load", "close"),
)
_WORD = re.compile(r"\s*\S+|\s+")


class FakeTokenizer:
    """Words with the blanks in front of them, learnt as they are met; bytes for those that do not fit any more."""

    def __init__(self, vocab_size: int = 4096) -> None:
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._texts = [c.encode() for c in _CONTROLS] + [bytes([b]) for b in range(256)]
        self._ids: dict[str, int] = {c: i for i, c in enumerate(_CONTROLS)}

    @property
    def bos_id(self) -> int:
        return self._ids[BOS]

    @property
    def eos_id(self) -> int:
        return self._ids[EOS]

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(range(len(_CONTROLS)))

    def id_of(self, control: str) -> int:
        """Return the id of a control token."""
        return _CONTROLS.index(control)

    def encode_segments(self, segments: Iterable[Segment], *, trust_text: bool = False) -> list[int]:
        """Return the ids of a prompt."""
        return [
            token
            for s in segments
            for token in (self.encode_trusted if s.trusted or trust_text else self.encode_plain)(s.text)
        ]

    def encode_trusted(self, text: str) -> list[int]:
        """Return the ids of text with control tokens."""
        ids: list[int] = []
        start = 0
        for match in _CONTROL.finditer(text):
            ids += [*self.encode_plain(text[start : match.start()]), self._ids[match[0]]]
            start = match.end()
        return ids + self.encode_plain(text[start:])

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of text that is nothing but text."""
        ids: list[int] = []
        for word in _WORD.findall(text):
            ids += self._word(word)
        return ids

    def encode_bytes(self, text: str) -> list[int]:
        """Return one id per byte, to cut characters in two."""
        return [_BYTES + b for b in text.encode()]

    def count(self, text: str) -> int:
        """Count the tokens of plain text."""
        return len(self.encode_plain(text))

    def token_bytes(self, token: int) -> bytes:
        """Return what an id stands for."""
        return self._texts[token] if token < len(self._texts) else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def _word(self, word: str) -> list[int]:
        with self._lock:
            if word not in self._ids or word in _CONTROLS:
                if word in _CONTROLS or len(self._texts) >= self.vocab_size:
                    return [_BYTES + b for b in word.encode()]
                self._ids[word] = len(self._texts)
                self._texts.append(word.encode())
            return [self._ids[word]]


@dataclass
class FakeState:
    """A sequence: its position, and what was committed.

    Attributes:
        prompt: what `prefill` was called with, also if it did not come to its end.
        is_answered: the next prefill asks something else: the state was restored, or has decoded since the last one.
        is_released: `release` was called with it.
    """

    script: Sequence[int]
    ledger: list[int] = field(default_factory=list)
    n_prompt: int = 0
    rows: Sequence[int] = ()
    prompt: tuple[int, ...] = ()
    is_answered: bool = False
    is_released: bool = False

    @property
    def pos(self) -> int:
        return len(self.ledger)


class FakeSnapshot:
    """What a sequence had committed, and where in its script it was."""

    nbytes = 1000

    def __init__(self, script: Sequence[int], ledger: Sequence[int], n_prompt: int) -> None:
        self.script, self.ledger, self.n_prompt = tuple(script), tuple(ledger), n_prompt
        self.is_released = False

    @property
    def pos(self) -> int:
        return len(self.ledger)

    def release(self) -> None:
        """Note that it was called."""
        self.is_released = True


class FakeEngine:
    """Says its scripts: the first sequence the first one, the next the next, and the last one from then on.

    A sequence that is asked again takes the next script too: by a prefill after it has decoded, or after it was
    restored. A restored sequence that is only decoded says what the captured one would have said.

    Args:
        scripts: ids, one after the other; `eos` follows when a script ends.
        next_id: says what follows these committed and provisional ids, and stands in for the scripts. As with real
            weights the ids alone decide, however they got into the cache.
        delay_s: of each decode forward.
        chunk: prompt tokens per chunk, each of which takes `chunk_delay_s`.
        faults: what the decode forward with this number raises, counted over all sequences from 0.
        prefill_faults: what the prefill with this number raises, likewise.
        drafts: says what is drafted behind committed ids and the pending one; None is an engine without a drafter.
        block_size: of its drafts at most.
        conf_logits: of every block, as long as its drafts.
        on_step: called with "prefill", "chunk", "forward_rows", "draft", "capture", "restore" (with the new
            sequence), "load" (with an empty one) when one begins, on the thread that runs it; what it raises is a
            fault of that step.

    Attributes:
        calls: how often each method was called; "chunks" counts chunks.
        prefilled: rows that each call of `prefill` ran; those of finished chunks if it did not come to its end.
        intervals: (start, end) of every prefill and forward, failed ones included, on the monotonic clock.
        threads: names of the threads that ran something.
    """

    def __init__(
        self,
        *scripts: Sequence[int],
        eos: int = 1,
        vocab_size: int = 4096,
        max_seq: int = 4096,
        delay_s: float = 0.0,
        chunk: int = 64,
        chunk_delay_s: float = 0.0,
        faults: Mapping[int, BaseException] | None = None,
        prefill_faults: Mapping[int, BaseException] | None = None,
        on_step: Callable[[str, FakeState], None] | None = None,
        next_id: Callable[[tuple[int, ...]], int] | None = None,
        drafts: Callable[[tuple[int, ...]], Sequence[int]] | None = None,
        block_size: int = 5,
        conf_logits: Sequence[float] = (),
    ) -> None:
        self._scripts, self._said, self._next_id = scripts or ((),), 0, next_id
        self._eos, self._vocab_size, self._max_seq = eos, vocab_size, max_seq
        self._delay_s, self._chunk, self._chunk_delay_s = delay_s, chunk, chunk_delay_s
        self._faults, self._prefill_faults = dict(faults or {}), dict(prefill_faults or {})
        self._drafts, self._block_size, self._conf_logits = drafts, block_size, tuple(conf_logits)
        self._on_step = on_step or (lambda step, state: None)
        self.calls = dict.fromkeys(_CALLS, 0)
        self.intervals: list[tuple[float, float]] = []
        self.threads: set[str] = set()
        self.states: list[FakeState] = []
        self.prefilled: list[int] = []
        self._snapshots: weakref.WeakSet[FakeSnapshot] = weakref.WeakSet()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_seq(self) -> int:
        return self._max_seq

    @property
    def block_size(self) -> int:
        return 0 if self._drafts is None else self._block_size

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Return what `drafts` says, through rows whose best ids they are."""
        own = self._own(state)
        self._begin(own, "draft", {})
        if self._drafts is None:
            raise EngineError("the engine has no drafter", param="drafter")
        ids: list[int] = []
        rows = []
        for slot, token in enumerate(list(self._drafts((*own.ledger, pending)))[: self._block_size]):
            row = np.zeros(self._vocab_size, np.float32)
            row[token] = 60.0
            ids.append(choose(row, slot, ids))
            rows.append(row)
        return Proposal(ids=tuple(ids), conf_logits=self._conf_logits[: len(ids)], rows=tuple(rows))

    def new_state(self) -> FakeState:
        """Make an empty sequence with the next script."""
        self.calls["new_state"] += 1
        self.states.append(FakeState(self._next_script()))
        return self.states[-1]

    def prefill(
        self,
        state: DecodeState,
        tokens: Sequence[int],
        *,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Prefilled:
        """Commit the prompt chunk by chunk."""
        own = self._own(state)
        if len(tokens) == 0 or own.pos + len(tokens) > self._max_seq:
            raise EngineError(f"prefill got {len(tokens)} tokens at {own.pos}", param="tokens")
        own.prompt = tuple(tokens)
        before, started = own.pos, time.monotonic()
        try:
            self._begin(own, "prefill", self._prefill_faults)
            if own.is_answered:
                own.script, own.is_answered = self._next_script(), False
            for first in range(0, len(tokens), self._chunk):
                if should_stop is not None and should_stop():
                    raise Cancelled
                self._on_step("chunk", own)
                time.sleep(self._chunk_delay_s)
                self.calls["chunks"] += 1
                own.ledger += tokens[first : first + self._chunk]
                own.n_prompt, own.rows = own.pos, ()
                if on_progress is not None:
                    on_progress(min(first + self._chunk, len(tokens)), len(tokens))
        finally:
            self.intervals.append((started, time.monotonic()))
            self.prefilled.append(own.pos - before)
        return Prefilled(logits=self._row(own, ()), pos=own.pos, computed=len(tokens))

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return rows whose best ids are the script's."""
        own = self._own(state)
        started = time.monotonic()
        try:
            self._begin(own, "forward_rows", self._faults)
            if not 0 < len(tokens) <= MAX_ROWS or own.pos + len(tokens) > self._max_seq:
                raise EngineError(f"forward_rows got {len(tokens)} rows at {own.pos}", param="tokens")
            time.sleep(self._delay_s)
            own.rows, own.is_answered = tuple(tokens), True
            return np.stack([self._row(own, own.rows[: i + 1]) for i in range(len(tokens))])
        finally:
            self.intervals.append((started, time.monotonic()))

    def commit(self, state: DecodeState, n: int) -> None:
        """Keep the first `n` rows."""
        own = self._own(state)
        self._count("commit")
        if not 0 <= n <= len(own.rows):
            raise EngineError(f"commit({n}): the last forward left {len(own.rows)} rows", param="n")
        own.ledger += own.rows[:n]
        own.rows = ()

    def capture(self, state: DecodeState) -> FakeSnapshot:
        """Keep what `state` has committed."""
        own = self._own(state)
        self._begin(own, "capture", {})
        return self._kept(FakeSnapshot(own.script, own.ledger, own.n_prompt))

    def restore(self, snapshot: Snapshot) -> FakeState:
        """Make a sequence that goes on where the captured one was."""
        own = self._held(snapshot)
        state = FakeState(own.script, list(own.ledger), own.n_prompt, is_answered=True)
        self._begin(state, "restore", {})
        self.states.append(state)
        return state

    def release(self, state: DecodeState) -> None:
        """Make `state` unusable; what it was stays readable for tests."""
        assert isinstance(state, FakeState), state
        self._count("release")
        state.is_released = True

    def dump(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """Return the snapshot as three arrays."""
        own = self._held(snapshot)
        self._count("dump")
        return {
            "ledger": np.array(own.ledger, np.int32),
            "script": np.array(own.script, np.int32),
            "n_prompt": np.array([own.n_prompt], np.int32),
        }

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], pos: int) -> FakeSnapshot:
        """Make a snapshot of what `dump` returned."""
        self._begin(FakeState(()), "load", {})
        if not 0 <= pos <= self._max_seq:
            raise EngineError(f"pos {pos} is outside 0 … {self._max_seq}", param="pos")
        if arrays.keys() != {"ledger", "script", "n_prompt"}:
            raise EngineError(f"expected ledger, script and n_prompt; found {', '.join(arrays)}", param="arrays")
        for name, shape in (("ledger", (pos,)), ("script", arrays["script"].shape[:1]), ("n_prompt", (1,))):
            found = arrays[name]
            if found.dtype != np.int32 or found.shape != shape:
                raise EngineError(
                    f"{name} must be int32 {list(shape)}; found {found.dtype} {list(found.shape)}", param=name
                )
        script, ledger = arrays["script"].tolist(), arrays["ledger"].tolist()
        return self._kept(FakeSnapshot(script, ledger, int(arrays["n_prompt"][0])))

    def layout(self) -> str:
        """Return the one layout there is."""
        return "fake 1"

    def state_bytes(self, positions: int) -> dict[str, int]:
        """Return sizes that grow with the positions as real ones do."""
        return {"window": 600, "compressor": positions // 4 * 8, "indexer": positions // 4 * 2, "source": 400}

    @property
    def blocks_in_use(self) -> int:
        """Sequences that were not released, and snapshots that were neither released nor forgotten.

        `states` keeps sequences for tests to read, so forgetting one is not enough here.
        """
        states = sum(not state.is_released for state in self.states)
        return states + sum(not snapshot.is_released for snapshot in self._snapshots)

    def close(self) -> None:
        """Count; there is nothing to free."""
        self.calls["close"] += 1

    def _own(self, state: DecodeState) -> FakeState:
        assert isinstance(state, FakeState), state
        if state.is_released:
            raise EngineError(f"the state at position {state.pos} was released")
        return state

    def _held(self, snapshot: Snapshot) -> FakeSnapshot:
        assert isinstance(snapshot, FakeSnapshot), snapshot
        if snapshot.is_released:
            raise EngineError(f"the snapshot at position {snapshot.pos} was released")
        return snapshot

    def _kept(self, snapshot: FakeSnapshot) -> FakeSnapshot:
        self._snapshots.add(snapshot)
        return snapshot

    def _next_script(self) -> Sequence[int]:
        script = self._scripts[min(self._said, len(self._scripts) - 1)]
        self._said += 1
        return script

    def _count(self, call: str) -> int:
        """Return how often `call` was called before."""
        self.threads.add(threading.current_thread().name)
        self.calls[call] += 1
        return self.calls[call] - 1

    def _begin(self, state: FakeState, call: str, faults: Mapping[int, BaseException]) -> None:
        """Count a call, and fail as told."""
        n = self._count(call)
        if n in faults:
            raise faults[n]
        self._on_step(call, state)

    def _row(self, state: FakeState, rows: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The logits after provisional `rows`: sampled with, they still all but always give the script's id."""
        row = np.zeros(self._vocab_size, np.float32)
        row[self._best(state, rows)] = 60.0
        return row

    def _best(self, state: FakeState, rows: tuple[int, ...]) -> int:
        if self._next_id is not None:
            return self._next_id((*state.ledger, *rows))
        at = state.pos + len(rows) - state.n_prompt
        return state.script[at] if at < len(state.script) else self._eos
