"""Pooling; the vector of model.md section 9."""

import math

import torch

from dsv4nb_kernels.reference.compress import compress


def test_equal_scores_give_the_mean_and_missing_rows_take_no_part() -> None:
    early, late = torch.arange(1.0, 9.0), 10 * torch.arange(1.0, 9.0)
    # overlapping windows of four: the early half of the window before, the late half of the own one
    values = torch.stack((torch.cat((early[:4], late[:4])), torch.cat((early[:4], late[4:]))))[:, :, None]
    scores = torch.zeros_like(values)
    scores[0, :4] = -math.inf
    assert compress(values, scores).flatten().tolist() == [25.0, 33.75]


def test_softmax_runs_per_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    values, scores = torch.randn(3, 128, 32, generator=generator), torch.randn(3, 128, 32, generator=generator) * 5
    expected = (scores.double().softmax(1) * values.double()).sum(1)
    torch.testing.assert_close(compress(values, scores), expected.float(), atol=1e-5, rtol=1e-5)


def test_a_window_of_a_batch_equals_the_window_alone() -> None:
    for rows in (8, 128):
        generator = torch.Generator().manual_seed(1)
        values, scores = (torch.randn(9, rows, 128, generator=generator) for _ in range(2))
        batch = compress(values, scores)
        for n in (1, 2, 5):
            assert torch.equal(compress(values[3 : 3 + n], scores[3 : 3 + n]), batch[3 : 3 + n])
