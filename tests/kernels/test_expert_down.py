"""The experts' lower halves and their sum."""

import torch

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_down import expert_down


def test_adds_up_what_belongs_to_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    inner, down = torch.randn(3, 8, 128, generator=generator), torch.randn(3, 32, 128, generator=generator)
    places = torch.tensor([[0, 9, 16], [1, 15, 23]])
    spans = [(0, 0, 1), (1, 1, 2), (2, 2, 3)]
    for act_fp8 in (False, True):
        source = (round_fp8(inner, 128) if act_fp8 else inner).flatten(0, 1)
        expected = torch.stack(
            [torch.stack([down[e] @ source[p] for e, p in enumerate(row)]).sum(0) for row in places.tolist()]
        )
        out = expert_down(inner, places, down, spans, act_fp8=act_fp8)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_adds_from_left_to_right() -> None:
    inner = torch.zeros(3, 8, 1)
    inner[:, 0, 0] = torch.tensor([1e8, 1.0, -1e8])
    down, spans = torch.ones(1, 1, 1), [(0, 0, 3)]
    inner_places = [[0, 8, 16], [0, 16, 8]]
    totals = [expert_down(inner, torch.tensor([p]), down, spans, act_fp8=False).item() for p in inner_places]
    assert totals == [0.0, 1.0]
