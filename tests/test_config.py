"""Sampler values: what is refused, and by which name."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import numpy as np
import pytest

from dsv4nb.config import SamplerConfig
from dsv4nb.errors import RequestError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("param", "value", "limit"),
    [
        ("temperature", INF, "finite"),
        ("temperature", "1", "a finite number"),
        ("top_k", -1, "0 (off) or more"),
        ("top_k", 1.5, "an integer"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.0000001, "in (0, 1]"),
        ("top_p", NAN, "finite"),
        ("min_p", 1.0, "in [0, 1)"),
        ("min_p", -0.1, "in [0, 1)"),
        ("seed", -1, "in [0, 2**64)"),
        ("seed", 2**64, "in [0, 2**64)"),
        ("seed", True, "an integer"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", INF, "finite"),
        ("repetition_penalty", 1e31, "1e+30"),
        ("frequency_penalty", NAN, "finite"),
        ("frequency_penalty", -1e31, "1e+30"),
        ("frequency_penalty", None, "a finite number"),
        ("presence_penalty", -INF, "finite"),
        ("presence_penalty", 1e31, "1e+30"),
        ("penalty_last_n", -1, "0 (the whole context) or more"),
        ("penalty_last_n", 64.0, "an integer"),
        ("penalty_scope", "prompt", "'all' or 'generated'"),
        ("sampler", "race", "'gumbel' or 'inverse_cdf'"),
    ],
    ids=str,
)
def test_m35_a_value_outside_its_range_is_refused_by_name(param: str, value: Any, limit: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplerConfig(**{param: value})
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param} is {value!r}; it must be ")
    assert limit in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0},
        {"top_k": 10**9, "top_p": 1e-300, "min_p": 0.999, "seed": 2**64 - 1},
        {"temperature": -1.0},
        {"repetition_penalty": 1e-30, "frequency_penalty": -1e30, "presence_penalty": 1e30, "penalty_last_n": 10**9},
        {"top_k": np.int64(3), "top_p": np.float32(0.5)},
    ],
    ids=str,
)
def test_m35_the_ends_of_the_ranges_are_accepted(options: dict[str, Any]) -> None:
    config = SamplerConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


class TestLogitBias:
    @pytest.mark.parametrize(
        "given",
        [{9: -INF, 2: 1}, [(9, -INF), (2, 1)], ((2, 1.0), (9, -INF)), [[9, -INF], [2, 1]], {np.int64(9): -INF, 2: 1}],
        ids=str,
    )
    def test_is_kept_as_pairs_by_ascending_id(self, given: Any) -> None:
        config = SamplerConfig(logit_bias=given)
        assert config.logit_bias == ((2, 1.0), (9, -INF))
        assert [(type(token), type(bias)) for token, bias in config.logit_bias] == [(int, float)] * 2

    def test_is_part_of_a_value(self) -> None:
        given = {5: 2.5}
        config = SamplerConfig(logit_bias=given, seed=1)  # type: ignore[arg-type]
        given[6] = 1.0
        assert config.logit_bias == ((5, 2.5),)
        assert replace(config, seed=2).logit_bias == config.logit_bias
        assert hash(config) == hash(SamplerConfig(logit_bias=((5, 2.5),), seed=1))
        assert SamplerConfig(**json.loads(json.dumps(asdict(config)))) == config

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({3: INF}, "logit_bias[3] is inf"),
            ({3: NAN}, "logit_bias[3] is nan"),
            ({3: 1e31}, "logit_bias[3] is 1e+31"),
            ({3: "1"}, "logit_bias[3] is '1'"),
            ({3: True}, "logit_bias[3] is True"),
            ({-1: 1.0}, "an id of logit_bias is -1"),
            ({"3": 1.0}, "an id of logit_bias is '3'"),
            ({True: 1.0}, "an id of logit_bias is True"),
            ([(3, 1.0), (3, 2.0)], "an id of logit_bias is 3; it must be given once"),
            ([3], "logit_bias is [3]; it must be a mapping"),
            (3, "logit_bias is 3; it must be a mapping"),
            ("34", "logit_bias is '34'; it must be a mapping"),
            (None, "logit_bias is None; it must be a mapping"),
        ],
        ids=str,
    )
    def test_what_is_no_bias_is_refused_by_name(self, given: Any, message: str) -> None:
        with pytest.raises(RequestError) as refused:
            SamplerConfig(logit_bias=given)
        assert refused.value.param == "logit_bias"
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "is_greedy"),
    [({}, False), ({"top_k": 1}, True), ({"top_k": 2}, False), ({"temperature": 1e-5}, False)]
    + [({"temperature": t}, True) for t in (9.9e-6, 0.0, -1.0)],
    ids=str,
)
def test_a17_greedy_is_no_temperature_or_one_candidate(options: dict[str, Any], is_greedy: bool) -> None:
    assert SamplerConfig(**options).is_greedy is is_greedy


@pytest.mark.parametrize(
    ("options", "armed"),
    [
        ({}, False),
        ({"penalty_last_n": 64, "penalty_scope": "generated"}, False),  # a window of nothing
        ({"logit_bias": {1: 5.0}, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.0, "frequency_penalty": -0.0, "presence_penalty": 0}, False),
        ({"repetition_penalty": 1.0000001}, True),
        ({"repetition_penalty": 0.5}, True),
        ({"frequency_penalty": 1e-9}, True),
        ({"presence_penalty": -1e-9}, True),
    ],
    ids=str,
)
def test_m36_a18_penalties_are_armed_by_any_value_that_is_not_neutral(options: dict[str, Any], armed: bool) -> None:
    assert SamplerConfig(**options).has_penalties is armed


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplerConfig().top_k = 3  # type: ignore[misc]
