"""What a token costs above the engine: choice, text, events, journal; with an engine that takes no time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.protocol import Prefilled
from dsv4nb.errors import Dsv4Error
from dsv4nb.session.request import Limits, Options, prepare
from dsv4nb.session.server import Server
from dsv4nb.testing.fake_engine import FakeEngine, FakeState, FakeTokenizer

_ROWS = 16  # different ones, so that no row stays in a cache

ARMS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    "T 1": {"temperature": 1.0},
    "T 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T 1, top-k 50, min-p 0.05": {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
    "T 1, top-p 0.95, penalties, 5 logprobs": {
        "temperature": 1.0,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "logprobs": 5,
    },
}


class _Instant(FakeEngine):
    """An engine whose rows are ready, and which notes when it is asked and when it has answered."""

    def __init__(self, rows: npt.NDArray[np.float32]) -> None:
        super().__init__(vocab_size=rows.shape[1], max_seq=1 << 20)
        self._rows = rows
        self.gaps: list[float] = []
        self._answered = 0.0

    def new_state(self) -> FakeState:
        self.gaps = []
        return super().new_state()

    def prefill(self, state: Any, tokens: Sequence[int], **_: Any) -> Prefilled:
        state.ledger += tokens
        self._answered = time.perf_counter()
        return Prefilled(logits=self._rows[0], pos=state.pos, computed=len(tokens))

    def forward_rows(self, state: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self.gaps.append(time.perf_counter() - self._answered)
        state.rows = tuple(tokens)
        rows: npt.NDArray[np.float32] = self._rows[len(self.gaps) % _ROWS][None]
        self._answered = time.perf_counter()
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Milliseconds per token.

    Attributes:
        vocab_size: width of a row.
        new_tokens: of each reply.
        arms: sampler values -> (median, 95th percentile) in milliseconds.
    """

    vocab_size: int
    new_tokens: int
    arms: Mapping[str, tuple[float, float]]

    def __str__(self) -> str:
        head = f"ms per token above the engine, V = {self.vocab_size:,}, {self.new_tokens} tokens per arm"
        rows = (f"{name:<42}{median:8.3f}{high:8.3f}" for name, (median, high) in self.arms.items())
        return "\n".join([head, f"{'':<42}{'median':>8}{'p95':>8}", *rows])


def overhead(*, vocab_size: int, new: int) -> Report:
    """Run every arm once for warmth and once for the record, on rows like a language model's."""
    engine = _Instant(_rows(vocab_size))
    tokens = FakeTokenizer(vocab_size)
    limits = Limits(max_seq=engine.max_seq, vocab_size=vocab_size, revision="v0731", sampler=SamplerConfig())
    server = Server(engine, tokens, "bench")
    arms = {}
    try:
        for name, options in ARMS.items():
            request = Options(max_new=new, seed=1, **options)
            ids = list(range(300, 500))  # words, as a prompt
            gaps: list[float] = []
            for _ in range(2):
                journal = server.submit(prepare(None, None, ids, request, tokens, limits))
                while not journal.wait(None, 1.0):
                    pass
                if journal.error is not None:
                    raise Dsv4Error(f"a run of the measurement failed: {journal.error}")
                gaps = sorted(1e3 * gap for gap in engine.gaps)
            arms[name] = (statistics.median(gaps), gaps[int(0.95 * len(gaps))])
    finally:
        server.close()
    return Report(vocab_size=vocab_size, new_tokens=new, arms=arms)


def _rows(vocab_size: int) -> npt.NDArray[np.float32]:
    """Return [n, V] rows: normal noise, and a few dozen tokens that stand out of it, the first ones most."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0.0, 2.0, (_ROWS, vocab_size)).astype(np.float32)
    rows[:, 0:8] = -40.0  # the control tokens, which would end a reply
    for row in rows:
        places = rng.choice(np.arange(300, vocab_size), min(40, vocab_size // 8), replace=False)
        row[places] += np.linspace(16.0, 6.0, places.size, dtype=np.float32)
    return rows
