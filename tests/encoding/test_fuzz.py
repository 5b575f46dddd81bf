"""A sample of what the two fuzz scripts beside it check."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dsv4nb.encoding.constants import EOS
from dsv4nb.encoding.parse import parse_tolerant


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_random_replies_parse_the_same_whatever_the_cuts() -> None:
    met = script("fuzz_parser").run(2_000, seed=1)
    assert met["texts"] == 2_000
    assert met["calls"] > 300 and met["strict"] > 200  # the heaps are not all rubble


def test_a_fault_is_told_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz = script("fuzz_parser")
    monkeypatch.setattr(fuzz, "parse_tolerant", lambda text, **options: parse_tolerant(text + "a" + EOS, **options))
    with pytest.raises(AssertionError) as caught:
        fuzz.run(100, seed=0)
    assert "seed 0: " in caught.value.__notes__[0]


def test_random_conversations_are_encoded_or_refused_by_name() -> None:
    met = script("fuzz_encoder").run(300, seed=2)
    assert met["encoded"] > 100 and met["refused"] > 50
