"""The chunk plan."""

import pytest

from dsv4nb.engine.prefill import FAST_ROWS, FAST_ROWS_MAX, FEW_ROWS, chunk_plan, padded_rows


@pytest.mark.parametrize(
    ("pos", "count", "plan"),
    [
        (0, 1, [(0, 1)]),
        (0, 256, [(0, 256)]),
        (0, 257, [(0, 256), (256, 257)]),
        (255, 2, [(0, 1), (1, 2)]),
        (100, 500, [(0, 156), (156, 412), (412, 500)]),
        (512, 256, [(0, 256)]),
        (0, 0, []),
        (100, 0, []),
        (100, 20, [(0, 20)]),
    ],
)
def test_h24_cuts_at_multiples_of_the_chunk(pos: int, count: int, plan: list[tuple[int, int]]) -> None:
    assert chunk_plan(pos, count) == plan


def test_h24_the_size_of_a_chunk_can_be_another() -> None:
    assert chunk_plan(0, 5000, chunk=2048) == [(0, 2048), (2048, 4096), (4096, 5000)]


def test_a_plan_covers_every_row_once() -> None:
    for pos in range(0, 40, 7):
        for count in range(1, 60):
            plan = chunk_plan(pos, count, chunk=16)
            assert [row for first, last in plan for row in range(first, last)] == list(range(count))
            assert all(0 < last - first <= 16 for first, last in plan)


def test_chunks_are_padded_to_few_lengths() -> None:
    lengths = [padded_rows(tokens) for tokens in range(1, FAST_ROWS_MAX + 1)]
    assert all(0 <= rows - tokens < (64 if tokens <= FEW_ROWS else 256) for tokens, rows in enumerate(lengths, 1))
    assert lengths == sorted(lengths)
    assert sorted(set(lengths)) == [*range(64, FEW_ROWS, 64), *range(FEW_ROWS, FAST_ROWS_MAX + 1, 256)]
    assert padded_rows(FAST_ROWS) == FAST_ROWS
