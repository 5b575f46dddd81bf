"""Log-probabilities of one raw row."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.engine.logprobs import MAX_LOGPROBS, logprob_of
from dsv4nb.errors import EngineError, RequestError
from dsv4nb.events import TokenLogprob

INF = math.inf


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def test_known_answer() -> None:
    logits = row(*map(math.log, (1, 8, 4, 2, 1)))
    found = logprob_of(logits, 3, 2)
    assert found == TokenLogprob(id=3, logprob=found.logprob, rank=3, entropy=found.entropy, top=found.top)
    assert found.entropy == pytest.approx(1.875 * math.log(2), abs=1e-6)  # 1.875 bits: the lengths of a perfect code
    assert found.logprob == pytest.approx(math.log(2 / 16), abs=1e-6)  # the logits are rounded to float32
    assert [token for token, _ in found.top] == [1, 2]
    assert [p for _, p in found.top] == pytest.approx([math.log(1 / 2), math.log(1 / 4)], abs=1e-6)


@pytest.mark.parametrize(("chosen", "rank"), [(0, 4), (1, 1), (2, 5), (3, 2), (4, 3)])
def test_m41_of_equals_the_lowest_id_is_first(chosen: int, rank: int) -> None:
    found = logprob_of(row(1, 3, 1, 3, 3), chosen, 4)
    assert found.rank == rank
    assert [token for token, _ in found.top] == [1, 3, 4, 0]


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.one_of(st.sampled_from([0.0, 1.5, -INF]), st.floats(-80, 80, width=32)), min_size=1, max_size=9),
    n=st.integers(0, MAX_LOGPROBS),
    pick=st.integers(0, 8),
)
def test_agrees_with_a_plain_log_softmax(logits: list[float], n: int, pick: int) -> None:
    if max(logits) == -INF:
        logits[0] = 0.0
    chosen = pick % len(logits)
    peak = max(logits)
    log_total = math.log(math.fsum(math.exp(x - peak) for x in logits))
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    found = logprob_of(row(*logits), chosen, n)
    assert found.id == chosen
    assert found.rank == 1 + ranked.index(chosen)
    assert found.logprob == pytest.approx(logits[chosen] - peak - log_total, abs=1e-12)
    logs = [x - peak - log_total for x in logits if x > -INF]
    assert found.entropy == pytest.approx(-math.fsum(math.exp(log) * log for log in logs), abs=1e-9)
    assert [token for token, _ in found.top] == [i for i in ranked[:n] if logits[i] > -INF]
    assert all(p == logprob_of(row(*logits), token, 0).logprob <= 0 for token, p in found.top)
    assert math.fsum(math.exp(p) for _, p in found.top) <= 1 + 1e-12


def test_the_sum_is_wide_enough_for_the_vocabulary() -> None:
    found = logprob_of(np.full(129_280, 0.1, np.float32), 129_279, 20)
    assert found.logprob == pytest.approx(-math.log(129_280), abs=1e-12)
    assert found.rank == 129_280
    assert found.entropy == pytest.approx(math.log(129_280), abs=1e-9)
    assert [token for token, _ in found.top] == list(range(20))


def test_large_logits_do_not_overflow_and_the_row_is_not_changed() -> None:
    logits = row(3e38, -3e38, 3e38)
    before = logits.tobytes()
    assert logprob_of(logits, 0, 1).logprob == pytest.approx(math.log(0.5))
    assert logprob_of(logits, 1, 1).logprob < -1e38
    assert logprob_of(logits, 0, 1).entropy == pytest.approx(math.log(2))
    assert logits.tobytes() == before


@pytest.mark.parametrize("n", [-1, MAX_LOGPROBS + 1])
def test_more_alternatives_than_the_limit_are_refused_by_name(n: int) -> None:
    with pytest.raises(RequestError, match=f"logprobs is {n}; 0 to 20") as refused:
        logprob_of(row(1, 2), 0, n)
    assert refused.value.param == "logprobs"


@pytest.mark.parametrize("logits", [(0, math.nan), (INF, 0), (-INF, -INF)], ids=str)
def test_a_broken_row_is_refused(logits: tuple[float, ...]) -> None:
    with pytest.raises(EngineError, match="broke"):
        logprob_of(row(*logits), 0, 1)


def test_a_row_of_the_real_vocabulary_is_quick() -> None:
    logits = np.random.default_rng(1).normal(0, 3, 129_280).astype(np.float32)
    taken = []
    for _ in range(15):
        started = time.perf_counter()
        logprob_of(logits, 77, 5)
        taken.append(time.perf_counter() - started)
    assert min(taken) * 1e3 < 4  # the quickest: others may use the machine


def test_certainty_has_no_entropy() -> None:
    assert logprob_of(row(-INF, 5, -INF), 1, 3).entropy == 0
    assert logprob_of(row(0, 900, 0), 1, 3).entropy == 0
