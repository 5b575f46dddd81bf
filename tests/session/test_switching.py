from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsv4nb.session.switching import INTERVAL_S, brisk_switching


@pytest.fixture(autouse=True)
def keep_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_while_any_request_runs_and_as_it_was_after() -> None:
    before = sys.getswitchinterval()
    with brisk_switching():
        with brisk_switching():
            assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
        assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    assert sys.getswitchinterval() == before


def test_an_error_gives_the_interval_back() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(LookupError), brisk_switching():
        raise LookupError
    assert sys.getswitchinterval() == before


def test_a_shorter_interval_and_one_set_meanwhile_stay() -> None:
    sys.setswitchinterval(2e-5)
    with brisk_switching():
        assert sys.getswitchinterval() == pytest.approx(2e-5)
        sys.setswitchinterval(0.01)
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_the_server_uses_it(make_model: Callable[..., Any]) -> None:
    before, seen = sys.getswitchinterval(), list[float]()
    model = make_model("one two three")
    model.generate("hi", on_token=lambda token: seen.append(sys.getswitchinterval()))
    assert seen and all(value == pytest.approx(INTERVAL_S) for value in seen)
    model.close()
    assert sys.getswitchinterval() == before
