"""Number formats against the hand-checked vectors of the specification."""

from __future__ import annotations

import pytest
import torch

from dsv4nb.reference.rounding import bf16, fp4_blocks, fp8_blocks, fp8_tiles, hadamard, nearest_e2m1, pow2_at_least


def _padded(values: list[float], width: int) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (width - len(values))])


@pytest.mark.parametrize(
    ("block", "values", "expected"),
    [
        (64, [0, 1e-6, 0.3, -1, 2.5, -3.3, 0.07, 447], [0, 0, 0.3125, -1, 2.5, -3.25, 0.0703125, 448]),
        (128, [0.011, -0.5, 0.26, 1.0, -2.9], [0.0107421875, -0.5, 0.25, 1.0, -3.0]),
    ],
)
def test_fp8_blocks_match_the_vectors(block: int, values: list[float], expected: list[float]) -> None:
    assert torch.equal(fp8_blocks(_padded(values, block), block)[: len(expected)], torch.tensor(expected))


def test_fp4_blocks_match_the_vectors() -> None:
    values = [0.1, 0.25, 0.3, -0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -6, 5.9, 0.24999]
    expected = [0, 0, 0.5, -1, 1, -2, 2, 4, 4, -6, 6, 0]
    assert torch.equal(fp4_blocks(_padded(values, 32))[:12], torch.tensor(expected, dtype=torch.float32))
    small = fp4_blocks(_padded([0.1, -0.7, 1.3, 0.02], 32))[:4]
    assert torch.equal(small, torch.tensor([0.125, -0.75, 1.5, 0.0]))


def test_e2m1_ties_go_to_the_even_code() -> None:
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nearest_e2m1(edges).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert nearest_e2m1(-edges).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


def test_pow2_is_exact_at_powers_of_two() -> None:
    x = torch.tensor([1.0, 1.0000001, 0.5, 0.75, 2.0**-126])
    assert pow2_at_least(x).tolist() == [1.0, 2.0, 0.5, 1.0, 2.0**-126]


def test_hadamard_has_sylvester_order_and_is_its_own_inverse() -> None:
    unit = torch.eye(8)
    assert torch.sign(hadamard(unit[1])).tolist() == [1, -1, 1, -1, 1, -1, 1, -1]
    assert torch.sign(hadamard(unit[2])).tolist() == [1, 1, -1, -1, 1, 1, -1, -1]
    torch.testing.assert_close(hadamard(unit)[0, 0], torch.tensor(0.35355339))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(hadamard(x)), x)


@pytest.mark.parametrize(
    "rounding",
    [lambda x: fp8_blocks(x, 128), lambda x: fp4_blocks(x), bf16, fp8_tiles],
    ids=["fp8_blocks", "fp4_blocks", "bf16", "fp8_tiles"],
)
def test_a_rounding_passes_the_gradient_and_keeps_its_own_results(rounding) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = rounding(x)
    assert not torch.equal(y, x)
    torch.testing.assert_close(rounding(y.detach()), y.detach(), rtol=0, atol=0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
