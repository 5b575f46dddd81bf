"""The launches of two ranks, by turns from join to join."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from dsv4nb.engine.pair_turns import take_turns

CPU = torch.device("cpu")


def test_joins_come_behind_both_parts_and_before_what_follows_them() -> None:
    launched: list[str] = []

    def launches(rank: int) -> Iterator[Tensor]:
        for number in range(2):
            launched.append(f"part {number} of {rank}")
            yield torch.full((1,), 10 * rank + number)
        launched.append(f"end of {rank}")

    def join(parts: Sequence[Tensor]) -> None:
        launched.append(f"join {[int(part) for part in parts]}")

    take_turns([CPU, CPU], [launches(0), launches(1)], join)
    assert launched == [
        *("part 0 of 0", "part 0 of 1", "join [0, 10]"),
        *("part 1 of 0", "part 1 of 1", "join [1, 11]"),
        *("end of 0", "end of 1"),
    ]


def test_a_part_of_a_sum_that_nobody_else_has_is_a_fault() -> None:
    parts = [torch.zeros(1)] * 2
    with pytest.raises(AssertionError, match="nobody else"):
        take_turns([CPU, CPU], [iter(parts), iter(parts[:1])], lambda there: None)
