"""e4m3 blocks with power-of-two scales; vectors of model.md section 9."""

import pytest
import torch

from dsv4nb_kernels.reference._fp8 import round_fp8


def padded(values: list[float], block: int) -> torch.Tensor:
    return torch.tensor([values + [0.0] * (block - len(values))])


@pytest.mark.parametrize(
    ("block", "given", "rounded"),
    [
        (64, [0, 1e-6, 0.3, -1, 2.5, -3.3, 0.07, 447], [0, 0, 0.3125, -1, 2.5, -3.25, 0.0703125, 448]),
        (128, [0.011, -0.5, 0.26, 1.0, -2.9], [0.0107421875, -0.5, 0.25, 1.0, -3.0]),
    ],
)
def test_rounds_the_hand_checked_vectors(block: int, given: list[float], rounded: list[float]) -> None:
    assert torch.equal(round_fp8(padded(given, block), block), padded(rounded, block))


def test_rounds_each_block_by_its_own_peak() -> None:
    small, large = torch.full((1, 64), 0.011), torch.full((1, 64), 300.0)
    both = round_fp8(torch.cat((small, large), 1), 64)
    assert torch.equal(both, torch.cat((round_fp8(small, 64), round_fp8(large, 64)), 1))


def test_a_rounded_block_is_a_fixed_point() -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * 10.0
    once = round_fp8(x, 128)
    assert torch.equal(round_fp8(once, 128), once)
    assert (once - x).abs().max() <= x.abs().max() / 16


def test_zeros_stay_zero() -> None:
    assert torch.equal(round_fp8(torch.zeros(2, 64), 64), torch.zeros(2, 64))
