"""The experts' upper halves; the SwiGLU vector of model.md section 9."""

import torch

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_up import clamped_swiglu, expert_up


def test_clamps_before_the_activation_and_the_gate_only_above() -> None:
    out = clamped_swiglu(torch.tensor([[12.0, -15.0, 3.0, 11.0, -12.0, 2.0]]), 10.0)
    torch.testing.assert_close(out, torch.tensor([[99.99546, 4.588534e-5, 5.715445]]), atol=0, rtol=1e-5)


def test_each_tile_meets_its_expert_and_each_row_its_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    x, up = torch.randn(8, 128, generator=generator), torch.randn(3, 64, 128, generator=generator) * 0.2
    rows = torch.randint(0, 8, (32,), generator=generator)
    weights = torch.rand(32, generator=generator)
    spans = [(0, 0, 1), (2, 1, 4)]
    for act_fp8 in (False, True):
        inner = expert_up(x, rows, weights, up, spans, limit=1.5, act_fp8=act_fp8).flatten(0, 1)
        source = round_fp8(x, 128) if act_fp8 else x
        for place in range(32):
            gate_up = up[0 if place < 8 else 2] @ source[rows[place]]
            expected = clamped_swiglu(gate_up, 1.5) * weights[place]
            torch.testing.assert_close(inner[place], expected, atol=1e-5, rtol=1e-4)
