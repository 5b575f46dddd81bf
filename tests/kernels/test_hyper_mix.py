"""Residual streams; the vector of model.md section 9."""

import torch

from dsv4nb_kernels.reference.hyper_mix import balance, hyper_expand, hyper_head, hyper_mix

PRE = torch.tensor([0.17744707, 0.45814785, 0.38241345, 0.17865227])
POST = torch.tensor([0.63689780, 1.53628373, 0.64900130, 0.26001382])
COMB = torch.tensor(
    [
        [0.04853741, 0.67208534, 0.27418578, 0.00519068],
        [0.40974721, 0.29508099, 0.22658284, 0.06858798],
        [0.44200438, 0.03024686, 0.19424762, 0.33350012],
        [0.09970997, 0.00258582, 0.30498284, 0.59272027],
    ]
)
STREAM = (0.25 * torch.arange(8.0) - 0.5).view(1, 4, 2).expand(8, -1, -1)
FN = torch.sin(torch.arange(192.0)).view(24, 8)
SCALE = torch.tensor([0.5] * 4 + [1.0] * 4 + [2.0] * 16)
BASE = 0.1 * torch.arange(24) - 1
EPS = 1e-6


def mix(stream: torch.Tensor, fn: torch.Tensor = FN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norm = torch.ones(stream.shape[-1])
    return hyper_mix(stream, fn, SCALE, BASE, norm, iterations=20, hc_eps=EPS, norm_eps=EPS)


def test_gives_the_hand_checked_coefficients() -> None:
    x, post, comb = mix(STREAM)
    torch.testing.assert_close(post[3], POST, atol=1e-6, rtol=0)
    torch.testing.assert_close(comb[3], COMB, atol=2e-6, rtol=0)
    collapsed = PRE @ STREAM[0]
    expected = collapsed / (collapsed.square().mean() + EPS).sqrt()
    torch.testing.assert_close(x[3], expected, atol=1e-5, rtol=0)


def test_balancing_ends_with_the_columns() -> None:
    logits = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(0)) * 3
    comb = balance(logits, 20, EPS)
    torch.testing.assert_close(comb.sum(1), torch.ones(8, 4), atol=1e-5, rtol=0)


def test_expanding_sums_over_the_first_index() -> None:
    y = torch.tensor([[10.0, 20.0]]).expand(8, -1)
    out = hyper_expand(y, STREAM, POST.expand(8, -1), COMB.expand(8, -1, -1))
    expected = POST[:, None] * y[0] + COMB.t() @ STREAM[0]
    torch.testing.assert_close(out[5], expected, atol=1e-5, rtol=0)


def test_head_collapses_with_its_own_weights() -> None:
    fn, base = FN[:4], BASE[:4]
    out = hyper_head(STREAM, fn, torch.tensor([0.5]), base, torch.tensor([1.0, 2.0]), hc_eps=EPS, norm_eps=EPS)
    collapsed = PRE @ STREAM[0]
    expected = collapsed / (collapsed.square().mean() + EPS).sqrt() * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=0)


def test_a_tile_of_a_batch_equals_the_tile_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    stream, fn = torch.randn(40, 4, 64, generator=generator), torch.randn(24, 256, generator=generator)
    batch = mix(stream, fn)
    for first in range(0, 40, 8):
        rows = slice(first, first + 8)
        assert all(torch.equal(alone, all_[rows]) for alone, all_ in zip(mix(stream[rows], fn), batch, strict=True))
