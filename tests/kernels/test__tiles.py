"""Tiled products: one shape for every row."""

import pytest
import torch

from dsv4nb_kernels.reference._tiles import TILE, tiled_product

SHAPES = [(256, 128), (128, 512), (1024, 24), (128, 1280), (64, 96)]


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_matches_the_product(width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(24, width, generator=generator), torch.randn(out, width, generator=generator)
    torch.testing.assert_close(
        tiled_product(x, weight), (x.double() @ weight.double().t()).float(), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_a_row_does_not_depend_on_the_other_rows(width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(11 * TILE, width, generator=generator), torch.randn(out, width, generator=generator)
    together = tiled_product(x, weight)
    for first in range(0, x.shape[0], TILE):
        assert torch.equal(tiled_product(x[first : first + TILE], weight), together[first : first + TILE])
    for slot in range(TILE):
        alone = torch.zeros(TILE, width)
        alone[slot] = x[slot]
        assert torch.equal(tiled_product(alone, weight)[slot], together[slot])
        crowded = torch.randn(TILE, width, generator=generator) * 1e3
        crowded[slot] = x[slot]
        assert torch.equal(tiled_product(crowded, weight)[slot], together[slot])
