"""The parts of a layer against hand-checked numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from dsv4nb.contract import FP32_PLAIN
from dsv4nb.reference.layers import Balance, Compressor, Expand, Mode, best_entries, clamped_swiglu
from dsv4nb.toy.shape import model_config

CONFIG = model_config()


def test_hyper_connection_coefficients_match_the_vector() -> None:
    stream = torch.tensor([[0.25 * (2 * j + c) - 0.5 for c in range(2)] for j in range(4)])
    fn = torch.tensor([[float(torch.sin(torch.tensor(8.0 * a + b))) for b in range(8)] for a in range(24)])
    flat = stream.flatten()
    mix = (fn @ flat) * torch.rsqrt(flat.square().mean() + 1e-6)
    pre, post, comb = Balance(CONFIG)(mix, torch.tensor([0.5, 1.0, 2.0]), 0.1 * torch.arange(24) - 1)
    torch.testing.assert_close(pre, torch.tensor([0.17744707, 0.45814785, 0.38241345, 0.17865227]))
    torch.testing.assert_close(post, torch.tensor([0.63689780, 1.53628373, 0.64900130, 0.26001382]))
    expected = [
        [0.04853741, 0.67208534, 0.27418578, 0.00519068],
        [0.40974721, 0.29508099, 0.22658284, 0.06858798],
        [0.44200438, 0.03024686, 0.19424762, 0.33350012],
        [0.09970997, 0.00258582, 0.30498284, 0.59272027],
    ]
    torch.testing.assert_close(comb, torch.tensor(expected), rtol=2e-6, atol=2e-7)


def test_few_differentiated_iterations_give_the_same_values_and_nearly_the_same_gradient() -> None:
    g = torch.Generator().manual_seed(3)
    mix, base, upstream = (torch.randn(*s, generator=g) for s in ((32, 24), (24,), (32, 4, 4)))
    found = []
    for few in (None, 3):
        balance, x = Balance(CONFIG), mix.clone().requires_grad_()
        balance.differentiated = few
        comb = balance(x, torch.ones(3), base)[2]
        (comb * upstream).sum().backward()
        assert x.grad is not None
        found.append((comb.detach(), x.grad[:, 8:].flatten()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert F.cosine_similarity(found[1][1], found[0][1], dim=0) > 0.995


def test_streams_mix_along_the_first_index() -> None:
    stream, comb = torch.eye(4)[None], torch.zeros(1, 4, 4)
    comb[0, 1, 2] = 1.0  # from stream 1 to stream 2
    out = Expand()(torch.zeros(1, 4), stream, torch.zeros(1, 4), comb)
    assert torch.equal(out[0, 2], stream[0, 1])
    assert out[0, [0, 1, 3]].abs().max() == 0


def test_swiglu_clamps_before_the_activation() -> None:
    out = clamped_swiglu(torch.tensor([12.0, -15.0, 3.0]), torch.tensor([11.0, -12.0, 2.0]), 10.0)
    torch.testing.assert_close(out, torch.tensor([99.99546, 4.588534e-5, 5.715445]), rtol=1e-6, atol=0)


def test_ratio_4_pools_the_early_half_of_the_window_before() -> None:
    config = replace(CONFIG, hidden_size=2)
    compressor = Compressor(config, 4, 1, Mode(FP32_PLAIN))
    with torch.no_grad():
        compressor.wkv.weight.copy_(torch.eye(2))
        compressor.wgate.weight.zero_()
    pooled: list[torch.Tensor] = []
    compressor.norm.register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    rows = torch.tensor([[float(i), 10.0 * i] for i in range(1, 9)])[None]
    compressor(rows, torch.zeros(0))
    assert pooled[0][0, :, 0].tolist() == [25.0, 33.75]


def test_router_score_matches_the_vector() -> None:
    score = F.softplus(torch.tensor([2.0, -1.0, 0.5, -20.0])).sqrt()
    torch.testing.assert_close(score, torch.tensor([1.4583992, 0.5596979, 0.9869534, 4.539993e-5]), rtol=1e-5, atol=0)


def test_ties_go_to_the_lowest_entry() -> None:
    score = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0]]])
    keep = best_entries(score, torch.ones(1, 5, dtype=torch.bool), 2)
    assert keep[0, 0].tolist() == [False, True, True, False, False]


def test_an_invisible_entry_is_never_picked() -> None:
    visible = torch.tensor([[True, False, False]])
    assert best_entries(torch.tensor([[[-5.0, 9.0, 9.0]]]), visible, 2)[0, 0].tolist() == [True, False, False]
