from __future__ import annotations

import pytest

from dsv4nb.checkpoint.jsonfile import parse_object


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 1}', "'a' appears twice"),
        ('{"a": {"b": 1, "b": 2}}', "'b' appears twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": -Infinity}', "Infinity is not a finite number"),
        ("[1]", "JSON is a list"),
        ('{"a":' * 100_000, "nested too deeply|Expecting"),
        (b'{"a": "\xff"}', "can't decode"),
    ],
)
def test_refuses_what_reads_two_ways(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_object(text)
