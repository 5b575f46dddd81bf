"""Query heads and cache rows."""

import torch

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.norm_rope_write import norm_rope_heads, norm_rope_rows, rope_entries, write_rows

EPS = 1e-6
STILL = torch.ones(8, 64), torch.zeros(8, 64)  # no rotation


def rows(width: int = 128) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(0)) * 3


def test_heads_are_normalised_one_by_one_without_a_weight() -> None:
    query = rows().view(8, 1, 128) * torch.tensor([1.0, 100.0])[:, None]
    out = norm_rope_heads(query, *STILL, eps=EPS)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(8, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[:, 0], out[:, 1], atol=1e-4, rtol=0)


def test_rotation_keeps_norms_and_touches_the_tail_alone() -> None:
    angle = torch.arange(8.0)[:, None] * torch.linspace(0, 1, 32)
    cos = angle.cos().repeat_interleave(2, -1)
    sin = torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)
    still, turned = rope_entries(rows(), *STILL, kv_fp8=False), rope_entries(rows(), cos, sin, kv_fp8=False)
    assert torch.equal(still[:, :64], turned[:, :64])
    torch.testing.assert_close(still.norm(dim=-1), turned.norm(dim=-1))
    assert not torch.equal(still[1:, 64:], turned[1:, 64:])


def test_rounding_leaves_the_rotated_tail() -> None:
    weight = torch.linspace(0.5, 1.5, 192)
    exact = norm_rope_rows(rows(192), weight, *STILL, eps=EPS, kv_fp8=False)
    rounded = norm_rope_rows(rows(192), weight, *STILL, eps=EPS, kv_fp8=True)
    assert torch.equal(rounded[:, :128], round_fp8(exact[:, :128], 64))
    assert torch.equal(rounded[:, 128:], exact[:, 128:])
    assert not torch.equal(rounded, exact)


def test_writes_only_its_slots() -> None:
    ring = torch.full((16, 4), torch.nan)
    write_rows(ring, torch.tensor([15, 0, 3]), torch.arange(12.0).view(3, 4))
    assert ring[[15, 0, 3]].flatten().tolist() == list(range(12))
    assert ring.isnan().sum() == 13 * 4
