"""Rows that stay on their device until somebody looks, on the CPU, which stands for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4nb.engine.lent_rows import Lender, LentRows


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that were copied to the host."""
    counted, copy = list[int](), LentRows.copy

    def counting(rows: LentRows) -> None:
        if rows._host is None:
            counted.append(len(rows))
        copy(rows)

    monkeypatch.setattr(LentRows, "copy", counting)
    return counted


def test_rows_are_copied_once_when_one_is_looked_at(copies: list[int]) -> None:
    logits = torch.arange(6.0).view(2, 3)
    rows = Lender().lend(logits)
    assert (len(rows), bool(rows), copies) == (2, True, [])
    assert rows[0].tolist() == [0.0, 1.0, 2.0] and rows[-1].tolist() == [3.0, 4.0, 5.0]
    assert [row.tolist() for row in rows] == logits.tolist() == np.stack(list(rows[0:2])).tolist()
    assert copies == [2]


def test_rows_that_are_held_stay_what_they_are_when_the_buffer_is_written(copies: list[int]) -> None:
    lender, logits = Lender(), torch.ones(2, 3)
    held, seen, dropped = lender.lend(logits), lender.lend(logits), lender.lend(logits)
    assert seen[1].tolist() == [1.0, 1.0, 1.0]
    del dropped
    lender.recall()
    logits.zero_()
    assert copies == [2, 2]  # what was seen and what is held, once each; what nobody holds never
    lender.recall()
    assert held[0].tolist() == seen[0].tolist() == [1.0, 1.0, 1.0]
    assert copies == [2, 2]
    assert lender.lend(logits)[0].tolist() == [0.0, 0.0, 0.0]
