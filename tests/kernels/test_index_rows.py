"""Queries and keys of the indexer: the twin and the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import index_rows as kernel
from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference._hadamard import hadamard, hadamard_matrix
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


BF16_STEP = 2.0**-8
HEADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the kernel is given."""

    product: Tensor
    cos: Tensor
    sin: Tensor
    heads: int

    def rows(self, chosen: list[int]) -> Step:
        product = self.product[:, chosen].contiguous()
        return replace(self, product=product, cos=self.cos[chosen], sin=self.sin[chosen])


def draw_step(rows: int, heads: int, width: int, splits: int, device: torch.device) -> Step:
    """Rows 2^16 apart, one of them of zeros at the start."""
    generator = torch.Generator().manual_seed(19)
    size = torch.exp2(8.0 * (torch.arange(rows) % 3) - 8)[:, None]
    product = torch.randn(splits, rows, heads * width, generator=generator) * size
    product[:, 0, : 3 * width] = 0.0
    angle = torch.rand(rows, 32, generator=generator) * 6
    return Step(
        product=product.to(device),
        cos=angle.cos().repeat_interleave(2, -1).to(device),
        sin=torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2).to(device),
        heads=heads,
    )


def run(step: Step, *, index_fp4: bool = True) -> Tensor:
    """[T, Hi, d]; holds the kernel to its own rows and to every element of them."""
    _, rows, line = step.product.shape
    room = torch.full((rows + 1, step.heads, line // step.heads), torch.nan, device=step.product.device).bfloat16()
    kernel.index_rows(step.product, step.cos, step.sin, heads=step.heads, index_fp4=index_fp4, out=room[:-1])
    assert room[-1].isnan().all() and not room[:-1].isnan().any()
    return room[:-1]


def require_twin(step: Step, *, index_fp4: bool) -> None:
    """Nearly all as the twin with the contract's roundings in between; the rest beside a boundary of one of them."""
    total = step.product[0]
    for part in step.product[1:]:
        total = total + part
    x = total.bfloat16().double().unflatten(-1, (step.heads, -1))
    turned = index_rows(x, step.cos.double(), step.sin.double(), index_fp4=False)
    found = run(step, index_fp4=index_fp4).double()
    if not index_fp4:
        pair = turned.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
        assert bool(((found - turned).abs() <= BF16_STEP * pair).all())
        return
    exact = round_fp4(hadamard(turned.bfloat16().double().cpu().float()).bfloat16().float()).double()
    blocks = exact.unflatten(-1, (-1, 32))
    error = (found.cpu().unflatten(-1, (-1, 32)) - blocks).abs() / blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert float(error.max()) <= 1 / 3
    assert float((error > 0).double().mean()) < 0.02


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "splits"), [(1, 2), (3, 1)])
@pytest.mark.parametrize("index_fp4", [True, False])
def test_the_kernel_matches_the_twin(rows: int, splits: int, index_fp4: bool, place: torch.device) -> None:
    require_twin(draw_step(rows, HEADS, 64, splits, place), index_fp4=index_fp4)


@pytest.mark.kernels
def test_the_kernels_rounding_has_the_values_and_ties_of_e2m1(place: torch.device) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([*ties, *(-t for t in ties), *(t * 0.99 for t in ties), *(t * 1.01 for t in ties[:7]), 0.1])
    width = 64
    rows = x.repeat(2).bfloat16().float()
    # the matrix is its own inverse: given the rotated row, the kernel rounds the row itself, where that is exact
    given = (rows.double() @ hadamard_matrix(width).double()).float()
    still = torch.ones(1, width, device=place), torch.zeros(1, width, device=place)
    product = given.repeat(16)[None, None].to(place)
    found = kernel.index_rows(product, *still, heads=16, index_fp4=True)[0, 0].float().cpu()
    turned = hadamard(given.bfloat16().float()[None, None])[0, 0].bfloat16().float()
    assert torch.equal(found, round_fp4(turned))


def unequal_rows(step: Step, batches: list[list[int]]) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    found = 0
    for batch in batches:
        together = run(step.rows(batch))
        for place, row in enumerate(batch):
            alone = run(step.rows([row]))[0]
            assert bool((alone != 0).any())
            found += not torch.equal(together[place], alone)
    return found


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    assert unequal_rows(draw_step(3, HEADS, 64, 2, place), [[0, 1, 2], [2, 1], [0, 1, 2] * 3]) == 0


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    step = draw_step(2, HEADS, 64, 2, place)
    cases: list[tuple[Step, str]] = [
        (replace(step, product=step.product[0]), r"product must be \[S, T, N\]"),
        (replace(step, product=torch.zeros(1, 4097, 1024, device=place)), "product must have 1 to 4096 rows; got 4097"),
        (replace(step, product=step.product.double()), "product must be torch.float32"),
        (
            replace(step, product=step.product.transpose(0, 1).contiguous().transpose(0, 1)),
            "product must be contiguous",
        ),
        (replace(step, heads=12), "heads must be a multiple of 16; got 12"),
        (replace(step, heads=32), "a head must be 64, 128 or 256 wide"),
        (replace(step, cos=step.cos[:1].clone()), "cos must have shape"),
        (replace(step, sin=step.sin.double()), "sin must be torch.float32"),
    ]
    for bad, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.index_rows(bad.product, bad.cos, bad.sin, heads=bad.heads, index_fp4=True)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16"):
        out = torch.zeros(2, 16, 64, device=place)
        kernel.index_rows(step.product, step.cos, step.sin, heads=16, index_fp4=True, out=out)


@pytest.mark.gpu
def test_m28_the_models_rows_are_close_and_row_invariant() -> None:
    step = draw_step(8, 64, 128, 1, torch.device("cuda"))
    for index_fp4 in (True, False):
        require_twin(step, index_fp4=index_fp4)
    assert unequal_rows(step, [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6] * 40]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_rows_follow_their_inputs(rows: int) -> None:
    device = torch.device("cuda")
    step = draw_step(rows, 64, 128, 1, device)
    outs = [torch.empty(rows, 64, 128, dtype=torch.bfloat16, device=device) for _ in range(3)]

    def chain() -> None:
        for out in outs:
            kernel.index_rows(step.product, step.cos, step.sin, heads=64, index_fp4=True, out=out, dependent=True)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for turn in range(3):
        step.product.copy_(step.product.roll(100 * turn + 1, 2))
        expected = run(step)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
