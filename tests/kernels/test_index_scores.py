"""Index scores."""

import pytest
import torch

from dsv4nb_kernels.reference.index_scores import KEYS, index_scores, padded_keys


def draw(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 4, 32, generator=generator),
        torch.randn(keys, 32, generator=generator),
        torch.randn(rows, 4, generator=generator),
    )


def test_matches_the_formula() -> None:
    query, keys, weights = draw(6, 2 * KEYS)
    expected = (torch.einsum("thd,cd->thc", query, keys).relu() * weights[..., None]).sum(1)
    torch.testing.assert_close(index_scores(query, keys, weights), expected, atol=1e-5, rtol=1e-5)


def test_a_row_and_a_key_depend_on_themselves_alone() -> None:
    query, keys, weights = draw(6, 3 * KEYS)
    batch = index_scores(query, keys, weights)
    for r in range(6):
        assert torch.equal(index_scores(query[r : r + 1], keys, weights[r : r + 1]), batch[r : r + 1])
    keys[200:] = torch.nan
    assert torch.equal(index_scores(query, keys, weights)[:, :200], batch[:, :200])
    assert torch.equal(index_scores(query, keys[:KEYS], weights), batch[:, :KEYS])


@pytest.mark.parametrize(("count", "padded"), [(1, 128), (128, 128), (129, 256)])
def test_reads_whole_blocks_of_keys(count: int, padded: int) -> None:
    assert padded_keys(count) == padded
