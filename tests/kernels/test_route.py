"""The router: the twin, by the vectors of model.md section 9, and the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import route as kernel
from dsv4nb_kernels.reference.route import affinity, route


def test_affinity_matches_the_hand_checked_vector_and_survives_extremes() -> None:
    given = torch.tensor([2.0, -1.0, 0.5, -20.0])
    expected = torch.tensor([1.4583992, 0.5596979, 0.9869534, 4.539993e-5])
    torch.testing.assert_close(affinity(given), expected, atol=0, rtol=1e-6)
    extremes = affinity(torch.tensor([-60.0, 20.0, 21.0, 200.0]))
    torch.testing.assert_close(extremes, torch.tensor([math.exp(-30), 20**0.5, 21**0.5, 200**0.5]), rtol=1e-5, atol=0)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, 9.0, 9.0, 9.0, 9.0]])
    bias = torch.tensor([0.0, -5.0, 0.0, 5.0, *[-math.inf] * 4])
    experts, weights = route(logits, bias=bias, table=None, k=2, factor=1.5)
    assert experts.tolist() == [[0, 3]]
    share = affinity(torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(weights[0], share / share.sum() * 1.5)


def test_equal_affinities_go_to_the_lowest_ids() -> None:
    experts, weights = route(torch.ones(1, 8), bias=torch.zeros(8), table=None, k=3, factor=1.5)
    assert experts.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 0.5))


def test_a_table_chooses_and_the_scores_weigh() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0]]).expand(2, -1)
    experts, weights = route(logits, bias=None, table=torch.tensor([[3, 0], [2, 3]]), k=2, factor=1.5)
    assert experts.tolist() == [[0, 3], [2, 3]]
    share = affinity(torch.tensor([[0.0, 2.0], [1.0, 2.0]]))
    torch.testing.assert_close(weights, share / share.sum(-1, keepdim=True) * 1.5)


SHARE = 1e-6  # relative, of a weight
FACTOR = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the kernel is given; with a table, `bias` is None."""

    logits: Tensor
    bias: Tensor | None
    table: Tensor | None
    tokens: Tensor | None
    k: int

    def rows(self, chosen: list[int]) -> Step:
        tokens = None if self.tokens is None else self.tokens[chosen].contiguous()
        return replace(self, logits=self.logits[:, chosen].contiguous(), tokens=tokens)


def draw_step(rows: int, experts: int, splits: int, device: torch.device, *, hashed: bool = False, k: int = 6) -> Step:
    """Logits from the sqrt of nothing to the linear end, ties among the best, and experts that must not be chosen."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(splits, rows, experts, generator=generator) * 8
    logits[:, :, 3] = logits[:, :, 9] = logits[:, :, 7] = 7.0
    logits[0, 0, :4] = torch.tensor([-80.0, 90.0, 0.0, -30.0])
    bias = torch.randn(experts, generator=generator) * 0.1
    bias[[3, 7, 9]] = 0.5
    bias[1::5] = -math.inf
    table = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(11)]).to(torch.int32)
    tokens = (torch.arange(rows) * 3 % 11).to(torch.int32)
    return Step(
        logits=logits.to(device),
        bias=None if hashed else bias.to(device),
        table=table.to(device) if hashed else None,
        tokens=tokens.to(device) if hashed else None,
        k=k,
    )


def run(step: Step) -> tuple[Tensor, Tensor]:
    """Holds the kernel to its own rows and to every element of them."""
    rows, device = step.logits.shape[1], step.logits.device
    ids = torch.full((rows + 1, 4 * step.k), -7, dtype=torch.int32, device=device)
    room = torch.full((rows + 1, 4 * step.k), torch.nan, device=device)
    out = ids.flatten()[: rows * step.k].view(rows, step.k), room.flatten()[: rows * step.k].view(rows, step.k)
    kernel.route(step.logits, bias=step.bias, table=step.table, tokens=step.tokens, k=step.k, factor=FACTOR, out=out)
    assert (ids.flatten()[rows * step.k :] == -7).all() and room.flatten()[rows * step.k :].isnan().all()
    return out


def by_twin(step: Step) -> tuple[Tensor, Tensor]:
    """In float64, on the float32 sum of the parts."""
    logits = step.logits[0]
    for part in step.logits[1:]:
        logits = logits + part
    lines = None if step.table is None or step.tokens is None else step.table.cpu()[step.tokens.cpu()].long()
    bias = None if step.bias is None else step.bias.cpu().double()
    return route(logits.cpu().double(), bias=bias, table=lines, k=step.k, factor=FACTOR)


def require_twin(step: Step) -> None:
    experts, weights = run(step)
    ids, shares = by_twin(step)
    assert experts.tolist() == ids.tolist()
    torch.testing.assert_close(weights.cpu().double(), shares, rtol=SHARE, atol=1e-30)


def unequal_rows(step: Step, batches: list[list[int]], runs: Callable[[Step], tuple[Tensor, Tensor]] = run) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    found = 0
    for batch in batches:
        together = runs(step.rows(batch))
        for place, row in enumerate(batch):
            alone = runs(step.rows([row]))
            found += any(not torch.equal(part[place], one[0]) for part, one in zip(together, alone, strict=True))
    return found


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "experts", "splits"), [(1, 32, 1), (3, 40, 4)])
@pytest.mark.parametrize("hashed", [False, True])
def test_the_kernel_matches_the_twin(rows: int, experts: int, splits: int, hashed: bool, place: torch.device) -> None:
    require_twin(draw_step(rows, experts, splits, place, hashed=hashed, k=3 if hashed else 6))


@pytest.mark.kernels
def test_the_kernels_affinity_survives_extremes(place: torch.device) -> None:
    logits = torch.tensor([[[-60.0, -20.0, -1.0, 0.0, 1e-3, 19.9, 20.0, 200.0]]], device=place)
    step = Step(logits=logits, bias=torch.zeros(8, device=place), table=None, tokens=None, k=8)
    require_twin(step)


@pytest.mark.kernels
def test_the_kernel_gives_equal_affinities_to_the_lowest_ids(place: torch.device) -> None:
    logits = torch.zeros(1, 2, 16, device=place)
    logits[0, 1, 5:] = -0.0
    step = Step(logits=logits, bias=torch.zeros(16, device=place), table=None, tokens=None, k=3)
    assert run(step)[0].tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    assert unequal_rows(draw_step(4, 32, 2, place), [[0, 1, 2, 3], [3, 1], [0, 1, 2, 3] * 3]) == 0


@pytest.mark.kernels
def test_m28_a_sum_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    step = draw_step(8, 32, 4, place)
    step = replace(step, logits=step.logits * 0.137)

    def keyed(step: Step) -> tuple[Tensor, Tensor]:
        order = [3, 2, 1, 0] if step.logits.shape[1] == 1 else [0, 1, 2, 3]
        return run(replace(step, logits=step.logits[order].contiguous()))

    assert unequal_rows(step, [list(range(8))], keyed) > 0


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    step, hashed = draw_step(2, 32, 2, place), draw_step(2, 32, 2, place, hashed=True)
    assert step.bias is not None and hashed.table is not None and hashed.tokens is not None
    cases: list[tuple[Step, str]] = [
        (replace(step, logits=step.logits[0]), r"logits must be \[S, T, E\]"),
        (replace(step, logits=torch.zeros(1, 4097, 32, device=place)), "logits must have 1 to 4096 rows; got 4097"),
        (replace(step, logits=torch.zeros(1, 1, 2048, device=place)), "logits must have at most 1024 experts"),
        (replace(step, logits=step.logits.double()), "logits must be torch.float32"),
        (replace(step, logits=step.logits.transpose(1, 2).contiguous().transpose(1, 2)), "logits must be contiguous"),
        (replace(step, k=9), "k must be 1 to 8; got 9"),
        (replace(step, bias=None), "exactly one of bias and table"),
        (replace(step, bias=step.bias[:8].contiguous()), "bias must have shape"),
        (replace(hashed, tokens=None), "table and tokens must be given together"),
        (replace(hashed, tokens=hashed.tokens.long()), "tokens must be torch.int32"),
        (replace(hashed, table=hashed.table[:, :4].contiguous()), "table must have shape"),
    ]
    for bad, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.route(bad.logits, bias=bad.bias, table=bad.table, tokens=bad.tokens, k=bad.k, factor=FACTOR)
    with pytest.raises(ValueError, match=r"out experts must be torch\.int32"):
        out = torch.zeros(2, 6, device=place), torch.zeros(2, 6, device=place)
        kernel.route(step.logits, bias=step.bias, table=None, tokens=None, k=6, factor=FACTOR, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("experts", [160, 256])
def test_m28_the_models_router_is_exact_and_row_invariant(experts: int, hashed: bool) -> None:
    step = draw_step(8, experts, 8, torch.device("cuda"), hashed=hashed)
    require_twin(step)
    assert unequal_rows(step, [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6] * 40]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_routes_follow_their_inputs(rows: int) -> None:
    device = torch.device("cuda")
    step = draw_step(rows, 256, 8, device)
    outs = [run(step) for _ in range(3)]

    def chain(dependent: bool) -> None:
        for out in outs:
            kernel.route(
                step.logits, bias=step.bias, table=None, tokens=None, k=6, factor=FACTOR, out=out, dependent=dependent
            )

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for turn in range(3):
        step.logits.copy_(step.logits.roll(turn + 1, 2))
        expected = [part.clone() for part in run(step)]
        for _ in range(3):
            for out in outs:
                out[0].fill_(-1)
                out[1].fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(a, b) for out in outs for a, b in zip(out, expected, strict=True))
