"""The tables of words stand for the keywords of `generate` and `load`, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from IPython.core.error import UsageError

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.handle import Model
from dsv4nb.magics.arguments import COMMANDS, HelpAsked, cell_parser, given
from dsv4nb.magics.options import CELL, LOAD, NOTEBOOK, each, window
from dsv4nb.model import load


def asked(line: str) -> dict[str, Any]:
    return given(cell_parser().parse(line), CELL)


def fields(table: Any) -> list[str]:
    return [option.field for options in table.values() for option in options]


def test_each_word_is_a_keyword_of_what_it_calls() -> None:
    assert set(fields(CELL)) <= set(inspect.signature(Model.generate).parameters)
    assert set(fields(LOAD)) <= set(inspect.signature(load).parameters)
    assert len(set(fields(CELL))) == len(fields(CELL)) and len(set(fields(LOAD))) == len(fields(LOAD))


def test_no_word_of_a_cell_stands_for_two_things() -> None:
    words = [option for table in (CELL, NOTEBOOK) for option in each(table)]
    assert len({option.field for option in words}) == len({option.flag for option in words}) == len(words)
    assert {"tools"} == set(fields(NOTEBOOK)) & set(inspect.signature(Model.generate).parameters)


def test_every_value_of_the_sampler_and_of_speculation_has_a_word() -> None:
    sampler = {field.name for field in dataclasses.fields(SamplerConfig)} - {"logit_bias"}  # a mapping
    spec = {f"spec_{field.name}" for field in dataclasses.fields(SpecConfig)} - {"spec_tau", "spec_floor"}
    assert sampler | spec <= set(fields(CELL))


def test_what_is_not_on_the_line_is_not_asked() -> None:
    assert asked("") == {}
    assert given(COMMANDS["load"].parser().parse("toy"), LOAD) == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--top-k 40 --min-p 0.05", {"top_k": 40, "min_p": 0.05}),
        ("--repetition-penalty 1.1 --penalty-last-n 64", {"repetition_penalty": 1.1, "penalty_last_n": 64}),
        ("--frequency-penalty -0.5 --presence-penalty=-1", {"frequency_penalty": -0.5, "presence_penalty": -1.0}),
        ("--penalty-scope generated --sampler inverse_cdf", {"penalty_scope": "generated", "sampler": "inverse_cdf"}),
        ("--stop END --stop 'the end'", {"stop": ["END", "the end"]}),
        ("--thinking --effort high --logprobs 0", {"thinking": True, "effort": "high", "logprobs": 0}),
        ("--no-spec", {"spec": False}),
        ("--spec --no-thinking", {"spec": True, "thinking": False}),
        ("--spec-depth 3 --spec-mode rejection", {"spec_depth": 3, "spec_mode": "rejection"}),
        ("--spec-proposal greedy --spec-window auto", {"spec_proposal": "greedy", "spec_window": "auto"}),
    ],
)
def test_words_become_keywords(line: str, expected: dict[str, Any]) -> None:
    assert asked(line) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", "off"),
        ("auto", "auto"),
        ("slot", "slot"),
        ("slot:0.5", ("slot", 0.5)),
        ("slot:0.5:2", ("slot", 0.5, 2)),
    ],
)
def test_windows(text: str, expected: object) -> None:
    assert window(text) == expected and asked(f"--spec-window {text}") == {"spec_window": expected}


@pytest.mark.parametrize("text", ["on", "slot:", "slot:high", "slot:0.5:1.5", "slot:0.5:1:2", "auto:0.5", "''"])
def test_m24_a_window_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        asked(f"--spec-window {text}")
    assert "is no window; it is off, auto, slot, slot:TAU or slot:TAU:FLOOR" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_help_has_groups_and_shows_percent_signs() -> None:
    with pytest.raises(HelpAsked) as asked_for:
        cell_parser().parse("--help")
    said = str(asked_for.value)
    headings = [line for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options:", *(f"{heading}:" for heading in [*NOTEBOOK, *CELL])]
    assert "usage: %%dsv4 [options]\n" in said and "%dsv4 caps tells the levels" in said
    for options in CELL.values():
        for option in options:
            assert f"  {option.flag}" in said
