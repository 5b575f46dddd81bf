"""The router; vectors of model.md section 9."""

import math

import torch

from dsv4nb_kernels.reference.route import affinity, route


def test_affinity_matches_the_hand_checked_vector_and_survives_extremes() -> None:
    given = torch.tensor([2.0, -1.0, 0.5, -20.0])
    expected = torch.tensor([1.4583992, 0.5596979, 0.9869534, 4.539993e-5])
    torch.testing.assert_close(affinity(given), expected, atol=0, rtol=1e-6)
    extremes = affinity(torch.tensor([-60.0, 20.0, 21.0, 200.0]))
    torch.testing.assert_close(extremes, torch.tensor([math.exp(-30), 20**0.5, 21**0.5, 200**0.5]), rtol=1e-5, atol=0)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, 9.0, 9.0, 9.0, 9.0]])
    bias = torch.tensor([0.0, -5.0, 0.0, 5.0, *[-math.inf] * 4])
    experts, weights = route(logits, bias=bias, table=None, k=2, factor=1.5)
    assert experts.tolist() == [[0, 3]]
    share = affinity(torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(weights[0], share / share.sum() * 1.5)


def test_equal_affinities_go_to_the_lowest_ids() -> None:
    experts, weights = route(torch.ones(1, 8), bias=torch.zeros(8), table=None, k=3, factor=1.5)
    assert experts.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 0.5))


def test_a_table_chooses_and_the_scores_weigh() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0]]).expand(2, -1)
    experts, weights = route(logits, bias=None, table=torch.tensor([[3, 0], [2, 3]]), k=2, factor=1.5)
    assert experts.tolist() == [[0, 3], [2, 3]]
    share = affinity(torch.tensor([[0.0, 2.0], [1.0, 2.0]]))
    torch.testing.assert_close(weights, share / share.sum(-1, keepdim=True) * 1.5)
