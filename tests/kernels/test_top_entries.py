"""The best entries."""

import math

import torch

from dsv4nb_kernels.reference.top_entries import top_entries


def test_ties_go_to_the_lowest_index_and_the_result_ascends() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    picked = top_entries(scores, torch.tensor([6, 6]), 4)
    assert picked.tolist() == [[0, 1, 3, 4], [0, 1, 2, 3]]


def test_hidden_columns_are_never_picked_whatever_they_hold() -> None:
    scores = torch.tensor([[1.0, 3.0, math.inf, math.nan], [-2.0, -1.0, -3.0, math.nan], [math.nan] * 4])
    picked = top_entries(scores, torch.tensor([2, 3, 0]), 2)
    assert picked.tolist() == [[0, 1], [0, 1], [-1, -1]]


def test_fewer_visible_than_wanted_are_filled_up() -> None:
    assert top_entries(torch.zeros(1, 8), torch.tensor([3]), 6).tolist() == [[0, 1, 2, -1, -1, -1]]
    assert top_entries(torch.zeros(1, 2), torch.tensor([2]), 6).tolist() == [[0, 1]]


def test_matches_a_sort_of_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (40, 100), generator=generator).float()  # many ties
    visible = torch.randint(0, 101, (40,), generator=generator)
    for row, count, picked in zip(
        scores.tolist(), visible.tolist(), top_entries(scores, visible, 16).tolist(), strict=True
    ):
        best = sorted(range(count), key=lambda i: (-row[i], i))[:16]
        assert picked == sorted(best) + [-1] * (16 - len(best))
