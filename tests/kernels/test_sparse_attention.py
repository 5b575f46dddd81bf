"""Attention to lists of keys; C-10."""

import math

import torch

from dsv4nb_kernels.reference.sparse_attention import sparse_attention

Split = tuple[torch.Tensor, torch.Tensor]


def draw(rows: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, list[Split], torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    query = torch.randn(rows, 4, 64, generator=generator)
    splits = []
    for size in sizes:
        keys = torch.randn(rows, size, 64, generator=generator)
        splits.append((keys, torch.rand(rows, size, generator=generator) < 0.4))
    return query, splits, torch.randn(4, generator=generator)


def formula(query: torch.Tensor, splits: list[Split], sink: torch.Tensor, scale: float) -> torch.Tensor:
    keys = torch.cat([k for k, _ in splits], 1).double()
    hidden = torch.cat([h for _, h in splits], 1)
    z = (torch.einsum("thd,tnd->thn", query.double(), keys) * scale).masked_fill(hidden[:, None], -math.inf)
    weights = torch.cat((z, sink.double()[:, None].expand(query.shape[0], -1, -1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("thn,tnd->thd", weights, keys).float()


def test_matches_the_formula() -> None:
    query, splits, sink = draw(6, (128, 32, 32))
    torch.testing.assert_close(
        sparse_attention(query, splits, sink, scale=0.125), formula(query, splits, sink, 0.125), atol=1e-5, rtol=1e-5
    )


def test_a_row_without_keys_is_zero_wherever_it_stands() -> None:
    query, splits, sink = draw(16, (32, 32))
    before = sparse_attention(query, splits, sink, scale=0.125)
    for first, last in ((0, 14), (5, 10)):
        masked = [(keys, hidden.clone()) for keys, hidden in splits]
        for _, hidden in masked:
            hidden[first:last] = True
        out = sparse_attention(query, masked, sink, scale=0.125)
        assert torch.equal(out[first:last], torch.zeros(last - first, 4, 64))
        assert torch.equal(out[:first], before[:first])
        assert torch.equal(out[last:], before[last:])


def test_one_key_of_score_zero_and_sink_zero_give_half_the_value() -> None:
    keys = torch.arange(64.0).expand(1, 1, -1)
    out = sparse_attention(
        torch.zeros(1, 2, 64), [(keys, torch.zeros(1, 1, dtype=torch.bool))], torch.zeros(2), scale=1.0
    )
    assert torch.equal(out, keys.expand(1, 2, -1) / 2)


def test_a_split_of_hidden_keys_changes_no_bit() -> None:
    query, splits, sink = draw(6, (128, 32))
    fewer = sparse_attention(query, splits, sink, scale=0.125)
    extra = (torch.randn(6, 32, 64) * 1e3, torch.ones(6, 32, dtype=torch.bool))
    assert torch.equal(sparse_attention(query, [*splits, extra], sink, scale=0.125), fewer)


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    query, splits, sink = draw(9, (128, 32, 32))
    batch = sparse_attention(query, splits, sink, scale=0.125)
    for r in range(9):
        alone = [(keys[r : r + 1], hidden[r : r + 1]) for keys, hidden in splits]
        assert torch.equal(sparse_attention(query[r : r + 1], alone, sink, scale=0.125), batch[r : r + 1])
