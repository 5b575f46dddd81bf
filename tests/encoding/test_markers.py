"""What lets markers be found whatever the cuts."""

from __future__ import annotations

import pytest

from dsv4nb.encoding.markers import INSIDE, OUTSIDE, WITHOUT_TOOLS, Markers

SETS = {**OUTSIDE, **INSIDE, "without tools": WITHOUT_TOOLS}


@pytest.mark.parametrize("markers", SETS.values(), ids=SETS)
def test_no_marker_stands_within_another(markers: Markers) -> None:
    for one in markers.texts:
        assert not any(one in other for other in markers.texts if other != one)


@pytest.mark.parametrize("markers", SETS.values(), ids=SETS)
def test_a_tail_is_undecided_while_it_could_become_a_marker(markers: Markers) -> None:
    for marker in markers.texts:
        found = markers.search(f"ab{marker}", 0)
        assert found is not None and found.span() == (2, 2 + len(marker))
        assert markers.search(f"{marker}b", 1) is None
        for n in range(1, len(marker)):
            assert markers.decided(f"ab{marker[:n]}", 0) == 2
            assert markers.decided(f"ab{marker[:n]}\0", 0) == n + 3
    assert markers.decided("abc", 1) == 3
    assert markers.decided("", 0) == 0


def test_a_tail_begins_at_its_earliest_and_not_before_the_start() -> None:
    markers = Markers("aab", '" s="')
    assert markers.decided("caa", 0) == 1
    assert markers.decided("caa", 2) == 2
    assert markers.decided('x" s=', 0) == 1
    assert markers.decided('x" "', 0) == 3
