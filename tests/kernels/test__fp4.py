"""e2m1 blocks with power-of-two scales; vectors of model.md section 9."""

import torch

from dsv4nb_kernels.reference._fp4 import round_e2m1, round_fp4

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def padded(values: list[float]) -> torch.Tensor:
    return torch.tensor([values + [0.0] * (32 - len(values))])


def test_rounds_the_hand_checked_vectors() -> None:
    given = padded([0.1, 0.25, 0.3, -0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -6, 5.9, 0.24999])
    assert torch.equal(round_fp4(given), padded([0, 0, 0.5, -1, 1, -2, 2, 4, 4, -6, 6, 0]))
    assert torch.equal(round_fp4(padded([0.1, -0.7, 1.3, 0.02])), padded([0.125, -0.75, 1.5, 0]))


def test_every_value_goes_to_the_nearest_code() -> None:
    x = torch.linspace(-6, 6, 4801)
    distance = (x.abs()[:, None] - GRID).abs()
    assert torch.equal((round_e2m1(x) - x).abs(), distance.amin(1))


def test_grid_values_stay() -> None:
    both = torch.cat((GRID, -GRID))
    assert torch.equal(round_e2m1(both), both)
