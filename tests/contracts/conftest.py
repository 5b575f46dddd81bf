from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsv4nb.model import Model, load
from dsv4nb.testing.fake_model import fake_model


@pytest.fixture
def make_model() -> Iterator[Callable[..., Model]]:
    """Make models that say a script; they are closed after the test."""
    made: list[Model] = []

    def make(script: Any = "Hello there.", **options: Any) -> Model:
        made.append(fake_model(script, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()


@pytest.fixture(scope="session")
def toy() -> Iterator[Model]:
    with load("toy") as made:
        yield made
