"""Mask, bias and penalties of one row, and of the rows of a verify forward."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.processors import Processor
from dsv4nb.engine.sampler import choose
from dsv4nb.errors import EngineError, RequestError

INF = math.inf
V = 6


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def f32(value: float) -> float:
    return float(np.float32(value))


def processed(
    logits: Sequence[float], config: SamplerConfig, prompt: Sequence[int], said: Sequence[int], mask: Sequence[bool]
) -> list[float]:
    """One row by the words of dspark.md 5, from the whole context; each step rounds to float32."""
    values = [x if allowed else -INF for x, allowed in zip(logits, mask, strict=True)]
    for token, bias in config.logit_bias:
        values[token] = f32(values[token] + bias)
    context = [*prompt, *said] if config.penalty_scope == "all" else list(said)
    window = context[max(0, len(context) - (config.penalty_last_n or len(context))) :]
    for token in {t for t in window if t < len(values)}:
        x = values[token]
        if config.repetition_penalty != 1:
            x = x / config.repetition_penalty if x > 0 else x * config.repetition_penalty
        x -= config.frequency_penalty * window.count(token)
        x -= config.presence_penalty
        values[token] = f32(x)
    return values


CONFIGS = st.builds(
    SamplerConfig,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.2, -0.1, 1e-9]),
    presence_penalty=st.sampled_from([0.0, 0.3, 1e6]),
    penalty_last_n=st.integers(0, 9),
    penalty_scope=st.sampled_from(["all", "generated"]),
    logit_bias=st.dictionaries(st.integers(1, V - 1), st.sampled_from([-INF, -1.5, 0.1, 4.0]), max_size=3),
)
IDS = st.integers(0, V - 1)


class TestOneRow:
    @settings(max_examples=300, deadline=None)
    @given(
        config=CONFIGS,
        prompt=st.lists(st.integers(0, V + 3), max_size=8),
        said=st.lists(IDS, max_size=8),
        ahead=st.lists(IDS, max_size=5),
        logits=st.lists(st.floats(-9, 9, width=32), min_size=V, max_size=V),
        mask=st.lists(st.booleans(), min_size=V - 1, max_size=V - 1).map(lambda rest: [True, *rest]),
        masked=st.booleans(),
    )
    def test_m25_drafts_in_front_count_as_if_they_were_committed(
        self,
        config: SamplerConfig,
        prompt: list[int],
        said: list[int],
        ahead: list[int],
        logits: list[float],
        mask: list[bool],
        masked: bool,
    ) -> None:
        allowed = np.array(mask) if masked else None
        expected = processed(logits, config, prompt, [*said, *ahead], mask if masked else [True] * V)
        given_row = row(*logits)
        processor = Processor(config, prompt, V)
        for token in said:
            processor.push(token)
        for _ in range(2):  # the first look changes nothing
            assert processor.apply(given_row, ahead, allowed).tolist() == expected
        assert given_row.tolist() == logits
        for token in ahead:
            processor.push(token)
        assert processor.apply(given_row, (), allowed).tolist() == expected

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"repetition_penalty": 2.0}, [1, -8, 0, 3, -1]),
            ({"repetition_penalty": 0.5}, [4, -2, 0, 3, -1]),
            ({"frequency_penalty": 0.5}, [1, -4.5, -0.5, 3, -1]),
            ({"presence_penalty": 0.5}, [1.5, -4.5, -0.5, 3, -1]),
            ({"presence_penalty": -0.5}, [2.5, -3.5, 0.5, 3, -1]),
            (
                {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
                [-0.25, -8.75, -0.75, 3, -1],
            ),
        ],
        ids=str,
    )
    def test_m38_penalties_apply_once_per_distinct_id(self, options: dict[str, float], expected: list[float]) -> None:
        prompt = [0, 1, 5, 0, 2, 99]  # 0 twice; 5 and 99 are no ids of a row of five
        found = Processor(SamplerConfig(**options), prompt, 5).apply(row(2, -4, 0, 3, -1))
        assert found.dtype == np.float32
        assert found.tolist() == expected

    def test_m38_a_penalty_is_rounded_once(self) -> None:
        # 0.1 is no float32: six times its float32, taken from 1, is another number
        found = Processor(SamplerConfig(frequency_penalty=0.1), [0] * 6, 1).apply(row(1))
        assert found[0] == np.float32(1 - 6 * 0.1)
        assert found[0] != np.float32(1) - np.float32(6) * np.float32(0.1)

    @pytest.mark.parametrize(
        ("last_n", "said", "expected"),
        [
            (0, [], [-1, -1, -1, 0]),
            (1, [], [0, 0, -1, 0]),
            (1, [3], [0, 0, 0, -1]),
            (2, [3], [0, 0, -1, -1]),
            (3, [3], [0, -1, -1, -1]),
            (4, [3], [-1, -1, -1, -1]),
            (9, [], [-1, -1, -1, 0]),
            (2, [3, 3, 3], [0, 0, 0, -1]),
        ],
        ids=str,
    )
    def test_m37_the_window_is_the_newest_tokens_or_the_whole_context(
        self, last_n: int, said: list[int], expected: list[float]
    ) -> None:
        config = SamplerConfig(presence_penalty=1.0, penalty_last_n=last_n)
        processor = Processor(config, [0, 1, 2], 4)
        assert processor.apply(row(0, 0, 0, 0), said).tolist() == expected
        for token in said:
            processor.push(token)
        assert processor.apply(row(0, 0, 0, 0)).tolist() == expected

    def test_m37_ids_outside_the_vocabulary_take_their_place_in_the_window(self) -> None:
        config = SamplerConfig(presence_penalty=1.0, penalty_last_n=2)
        assert Processor(config, [0, 1, 7], 3).apply(row(0, 0, 0)).tolist() == [0, -1, 0]

    @pytest.mark.parametrize(
        "options", [{"repetition_penalty": 2.0}, {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}], ids=str
    )
    def test_a_prompt_does_not_count_in_the_generated_scope(self, options: dict[str, Any]) -> None:
        processor = Processor(SamplerConfig(**options, penalty_scope="generated", penalty_last_n=8), [0, 0], 2)
        assert processor.apply(row(2, 2)).tolist() == [2, 2]
        processor.push(1)
        assert processor.apply(row(2, 2)).tolist() == [2, 1]

    def test_m39_the_first_token_is_penalised(self) -> None:
        config = SamplerConfig(temperature=0, presence_penalty=1e9)
        first = Processor(config, [4, 0, 0, 0], 5).apply(row(9, 1, 2, 0, 8))
        assert choose(first, config, 4) == 2

    def test_m41_a_tie_made_by_penalties_goes_to_the_lowest_id(self) -> None:
        config = SamplerConfig(temperature=0, presence_penalty=1.0)
        tied = Processor(config, [2], 3).apply(row(1, 2, 3))
        assert tied.tolist() == [1, 2, 2]
        assert choose(tied, config, 1) == 1

    def test_the_order_is_mask_bias_penalties(self) -> None:
        config = SamplerConfig(repetition_penalty=2.0, logit_bias={0: 2.0, 1: 100.0, 2: -4.0})
        found = Processor(config, [0, 1, 2], 4).apply(row(-1, 5, 3, 1), mask=np.array([True, False, True, True]))
        # the sign that the repetition penalty goes by is that after the bias; no bias brings back what is not allowed
        assert found.tolist() == [0.5, -INF, -2.0, 1.0]

    @pytest.mark.parametrize("options", [{"frequency_penalty": 1e-9}, {"logit_bias": {0: 0.0}}], ids=str)
    def test_m36_the_smallest_penalty_arms(self, options: dict[str, Any]) -> None:
        processor = Processor(SamplerConfig(**options), [0], V)
        logits = row(0, 1, 2, 3, 4, 5)
        assert not processor.is_neutral
        assert processor.apply(logits) is not logits
        assert processor.apply(logits)[0] == np.float32(-options.get("frequency_penalty", 0))

    def test_m36_neutral_values_leave_the_row_itself(self) -> None:
        config = SamplerConfig(top_k=3, top_p=0.5, min_p=0.1, penalty_last_n=4, penalty_scope="generated")
        processor = Processor(config, [0, 1], V)
        processor.push(2)
        logits = np.frombuffer(np.arange(V, dtype=np.float32).tobytes(), np.float32)  # cannot be written to
        assert processor.is_neutral
        assert processor.apply(logits, [3, 3]) is logits

    def test_a_mask_alone_changes_what_is_not_allowed_alone(self) -> None:
        logits = row(0.1, -0.0, np.nan, 7)
        found = Processor(SamplerConfig(), [3], 4).apply(logits, mask=np.array([True, True, True, False]))
        assert found[:3].tobytes() == logits[:3].tobytes()
        assert found[3] == -INF


class TestNothingLeft:
    def test_a_mask_that_allows_nothing_is_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="of 3 the mask allows 0") as refused:
            Processor(SamplerConfig(), [], 3).apply(row(1, 2, 3), mask=np.zeros(3, np.bool_))
        assert refused.value.param == "mask"

    def test_a_mask_whose_tokens_are_banned_is_refused_by_name(self) -> None:
        config = SamplerConfig(logit_bias={1: -INF}, presence_penalty=1.0)
        with pytest.raises(EngineError, match="the mask allows 2") as refused:
            Processor(config, [1], 3).apply(row(-INF, 2, 3), mask=np.array([True, True, False]))
        assert refused.value.param == "mask"

    def test_bans_of_everything_are_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="logit_bias") as refused:
            Processor(SamplerConfig(logit_bias={0: -INF, 1: -INF}), [], 2).apply(row(1, 2))
        assert refused.value.param == "logit_bias"

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_broken_row_is_not_hidden_by_a_ban_or_a_penalty(self, bad: float, temperature: float) -> None:
        config = SamplerConfig(temperature=temperature, logit_bias={0: -INF}, repetition_penalty=2.0)
        found = Processor(config, [0, 1], 3).apply(row(bad, 1, 2))
        with pytest.raises(EngineError, match="broke"):
            choose(found, config, 2)

    def test_a_padded_row_is_penalised_without_a_warning(self) -> None:
        lowest = float(np.finfo(np.float32).min)
        found = Processor(SamplerConfig(repetition_penalty=1.5), [0, 1], 2).apply(row(lowest, 3))
        assert found.tolist() == [-INF, 2.0]

    @pytest.mark.parametrize(
        "mask", [np.ones(4, np.bool_), np.ones((1, 3), np.bool_), np.ones(3, np.int32), np.ones(1, np.int32)], ids=repr
    )
    def test_a_mask_of_another_form_is_refused(self, mask: Any) -> None:
        with pytest.raises(EngineError, match=r"must be bool \[3\]") as refused:
            Processor(SamplerConfig(), [], 3).apply(row(1, 2, 3), mask=mask)
        assert refused.value.param == "mask"

    def test_a_bias_on_an_id_that_the_model_has_not_is_refused(self) -> None:
        with pytest.raises(RequestError, match="has the id 3; ids are 0 to 2") as refused:
            Processor(SamplerConfig(logit_bias={1: 1.0, 3: 1.0}), [], 3)
        assert refused.value.param == "logit_bias"


class TestVerifyRows:
    """Rounds of a pending token and drafts, as the engine will run them, against choosing one by one (C-17)."""

    LOGITS = row(3.0, 2.9, 2.8)

    def speculate(self, config: SamplerConfig, prompt: Sequence[int], drafts: Sequence[int], width: int) -> list[int]:
        """Ten tokens; the drafts of a round are the next `width` of `drafts`, which has one for each position."""
        processor = Processor(config, prompt, 3)
        said: list[int] = []
        while len(said) < 10:
            drafted = drafts[len(said) : len(said) + width]
            accepted: list[int] = []
            for i in range(len(drafted) + 1):
                position = len(prompt) + len(said) + i
                chosen = choose(processor.apply(self.LOGITS, drafted[:i]), config, position)
                accepted.append(chosen)
                if i == len(drafted) or chosen != drafted[i]:
                    break
            for token in accepted:
                processor.push(token)
            said += accepted
        return said[:10]

    @pytest.mark.parametrize(
        ("name", "plain"),
        [
            ("frequency_penalty", [0, 1, 0, 2, 1, 0, 2, 1, 0, 2]),
            ("presence_penalty", [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        ],
    )
    @pytest.mark.parametrize("drafter", ["none", "zeros", "right", "alternating"])
    @pytest.mark.parametrize("scope", ["all", "generated"])
    def test_c17_penalties_hold_under_speculation(self, name: str, plain: list[int], drafter: str, scope: Any) -> None:
        drafts = {"none": [], "zeros": [0] * 20, "right": plain * 2, "alternating": [0, 1] * 10}[drafter]
        config = SamplerConfig(temperature=0, penalty_scope=scope, **{name: 0.15})
        for width in (1, 2, 5):
            assert self.speculate(config, [5], drafts, width) == plain  # the prompt's id is none of the three

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("last_n", [0, 1, 3, 256])
    def test_m25_a_window_that_is_left_within_a_round_gives_the_plain_tokens(
        self, temperature: float, last_n: int
    ) -> None:
        config = SamplerConfig(
            temperature=temperature,
            seed=4,
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            presence_penalty=0.2,
            penalty_last_n=last_n,
        )
        prompt = [0, 1, 1, 2, 0]
        plain = self.speculate(config, prompt, [], 1)
        assert len(set(plain)) > 1
        for drafts, width in itertools.product((plain * 2, [0] * 20, [1, 2] * 10), (1, 3, 5)):
            assert self.speculate(config, prompt, drafts, width) == plain


def test_penalties_over_a_long_window_are_quick() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(0, 3, 129_280).astype(np.float32)
    config = SamplerConfig(temperature=0, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)
    processor = Processor(config, (random.zipf(1.2, 4000) % 129_280).tolist(), 129_280)
    taken = []
    for m in range(15):
        started = time.perf_counter()
        processor.push(choose(processor.apply(logits, (1, 2, 3)), config, m))
        taken.append(time.perf_counter() - started)
    assert min(taken) * 1e3 < 2  # the quickest: others may use the machine
