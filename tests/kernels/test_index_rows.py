"""Queries and keys of the indexer."""

import torch

from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference._hadamard import hadamard_matrix
from dsv4nb_kernels.reference.index_rows import index_rows

STILL = torch.ones(5, 64), torch.zeros(5, 64)  # no rotation


def draw(heads: int) -> torch.Tensor:
    return torch.randn(5, heads, 128, generator=torch.Generator().manual_seed(heads))


def test_rotates_by_the_hadamard_matrix_only_to_round() -> None:
    x = draw(4)
    torch.testing.assert_close(index_rows(x, *STILL, index_fp4=False), x)
    rounded = index_rows(x, *STILL, index_fp4=True)
    torch.testing.assert_close(rounded, round_fp4(x @ hadamard_matrix(128)), atol=0, rtol=0)


def test_rounded_products_stay_near_the_exact_ones() -> None:
    query, key = draw(4), draw(1)
    exact, rounded = (
        index_rows(query, *STILL, index_fp4=flag) @ index_rows(key, *STILL, index_fp4=flag).mT for flag in (False, True)
    )
    assert (exact - rounded).abs().max() < 0.3 * exact.abs().max()


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    x = draw(3)
    batch = index_rows(x, *STILL, index_fp4=True)
    for r in range(5):
        alone = index_rows(x[r : r + 1], STILL[0][:1], STILL[1][:1], index_fp4=True)
        assert torch.equal(alone, batch[r : r + 1])
