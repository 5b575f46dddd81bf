from __future__ import annotations

import pytest

from dsv4nb.engine.free_memory import free_host_bytes, largest_session
from dsv4nb.model import load


def stepped(positions: int) -> dict[str, int]:
    """A fixed part, and blocks of 128 positions."""
    return {"window": 1000, "entries": -(-positions // 128) * 500}


@pytest.mark.parametrize(
    ("free", "fits"), [(999, 0), (1000, 0), (1499, 0), (1500, 128), (1999, 128), (2000, 256), (10**9, 4096)]
)
def test_the_largest_session_is_the_last_that_fits(free: int, fits: int) -> None:
    assert largest_session(stepped, 4096, free) == fits
    if 0 < fits < 4096:
        assert sum(stepped(fits).values()) <= free < sum(stepped(fits + 1).values())


def test_the_bundled_model_has_room_for_its_longest_session() -> None:
    with load("toy", name="room") as model:
        assert model.largest_session() == model.max_seq == 4096
        assert 0 < sum(model.engine.state_bytes(4096).values()) < free_host_bytes()
