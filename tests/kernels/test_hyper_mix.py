"""Residual streams: the twin, by the vector of model.md section 9, and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import hyper_mix as kernel
from dsv4nb_kernels._expert_rows import ExpertRows, round_rows
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference.hyper_mix import balance, hyper_collapse, hyper_expand, hyper_head, hyper_mix

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


COEFFICIENT = 2e-6  # absolute, of coefficients that are at most 2
BF16_STEP = 2.0**-8
ITERATIONS = 20 if torch.cuda.is_available() else 5  # the interpreter takes its time for each
CUT = kernel.Tuning(channels=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a boundary is given; `before` is None where no sublayer ran."""

    y: Tensor | None
    stream: Tensor
    before: kernel.Boundary | None
    weights: kernel.HyperWeights

    def rows(self, chosen: list[int]) -> Step:
        before = self.before and replace(
            self.before, post=self.before.post[chosen].contiguous(), comb=self.before.comb[chosen].contiguous()
        )
        y = None if self.y is None else self.y[:, chosen].contiguous()
        return replace(self, y=y, stream=self.stream[chosen].contiguous(), before=before)


def draw_step(rows: int, width: int, splits: int, device: torch.device, n: int = kernel.COEFFICIENTS) -> Step:
    """Channels of very different size, rows 2^8 apart, and coefficients from one end of a sigmoid to the other."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size = torch.exp2(torch.arange(rows) % 3 * 4.0 - 4)[:, None, None]
    weights = kernel.HyperWeights(
        fn=(draw(n, 4 * width) * width**-0.5).to(device),
        scale=torch.linspace(0.3, 2, n).to(device),
        base=draw(n).to(device),
        norm=(draw(width) * 0.3 + 1).to(device),
    )
    stream = (draw(rows, 4, width) * size * torch.exp2(draw(width) * 2)).bfloat16().to(device)
    if splits == 0:
        return Step(y=None, stream=stream, before=None, weights=weights)
    before = kernel.Boundary.empty(rows, width, device)
    before.post.copy_(torch.rand(rows, 4, generator=generator) * 2)
    before.comb.copy_(balance(draw(rows, 4, 4), ITERATIONS, EPS))
    return Step(y=(draw(splits, rows, width) * size[:, 0]).to(device), stream=stream, before=before, weights=weights)


def run(step: Step, cut: kernel.Tuning = CUT, act_fp8: bool = True) -> kernel.Boundary:
    """Holds the kernel to its own rows and to every element of them."""
    rows, _, width = step.stream.shape
    room = kernel.Boundary.empty(rows, width, step.stream.device, cut.channels)
    arranged = () if room.arranged is None else (room.arranged.values, room.arranged.scales)
    for tensor in (room.stream, room.x, room.rounded.codes, room.rounded.scales, room.post, room.comb, *arranged):
        tensor.fill_(torch.nan)
    out = kernel.launch(
        step.y, step.stream, step.before, step.weights, cut, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS,
        act_fp8=act_fp8, out=room,
    )  # fmt: skip
    assert out.rounded.scales[:, len(out.rounded.codes) :].isnan().all()
    return out


def padded(x: Tensor) -> Tensor:
    """float64, with rows to whole tiles of the twin."""
    return torch.cat((x, x.new_zeros(-x.shape[0] % 8, *x.shape[1:]))).double()


def require_boundary(step: Step, out: kernel.Boundary) -> None:
    """Compare each part with the twin in float64 on what the part was made of."""
    rows = step.stream.shape[0]
    weights, n = step.weights, step.weights.fn.shape[0]
    stream = step.stream.double()
    if step.y is not None and step.before is not None:
        y = step.y[0]
        for part in step.y[1:]:
            y = y + part
        stream = hyper_expand(y.bfloat16().double(), stream, step.before.post.double(), step.before.comb.double())
    torch.testing.assert_close(out.stream.double(), stream, rtol=BF16_STEP, atol=1e-6 * float(stream.abs().max()))
    given = (padded(out.stream), weights.fn.double(), weights.scale.double(), weights.base.double())
    norm = weights.norm.double()
    if n == kernel.COEFFICIENTS:
        _, post, comb = hyper_mix(*given, norm, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS)
        torch.testing.assert_close(out.post.double(), post[:rows], atol=COEFFICIENT, rtol=0)
        torch.testing.assert_close(out.comb.double(), comb[:rows], atol=COEFFICIENT, rtol=0)
    stream64, fn, scale, base = given
    collapsed = hyper_collapse(stream64, fn[:4], scale[:4], base[:4], hc_eps=EPS, norm_eps=EPS)
    x = rms_norm(collapsed[:rows].bfloat16().double(), norm, EPS)
    # a collapsed value beside a boundary of bfloat16 may fall to either side of it: two steps; the last rounding: one
    torch.testing.assert_close(out.x.double(), x, rtol=3 * BF16_STEP, atol=0)
    assert float(((out.x.double() - x).abs() > BF16_STEP * x.abs()).double().mean()) < 0.01


def rounded_values(out: kernel.Boundary) -> Tensor:
    rows = out.x.shape[0]
    if out.arranged is not None:
        # place 16i + 8h + 2t + e of 32 holds column 8t + 4i + 2h + e
        places = out.arranged.values.double().unflatten(-1, (-1, 2, 2, 4, 2)).permute(0, 1, 4, 2, 3, 5)
        return places.flatten(1) * out.arranged.scales[:, None]
    return out.rounded.codes.double() * out.rounded.scales[:, :rows].t().double().repeat_interleave(128, 1)


def parts_of(out: kernel.Boundary) -> list[Tensor]:
    return [out.stream, out.x, out.post, out.comb, rounded_values(out)]


def unequal_rows(step: Step, runs: Callable[[Step], list[Tensor]], batches: list[list[int]]) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    alone = {row: runs(step.rows([row])) for row in {row for batch in batches for row in batch}}
    assert all(bool((part != 0).any()) for parts in alone.values() for part in parts)
    found = 0
    for batch in batches:
        together = runs(step.rows(batch))
        for place, row in enumerate(batch):
            found += any(not torch.equal(part[place], one[0]) for part, one in zip(together, alone[row], strict=True))
    return found


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "splits", "n"), [(1, 4, 24), (2, 1, 24), (2, 0, 24), (2, 2, 4)])
def test_the_kernel_matches_the_twin(rows: int, splits: int, n: int, place: torch.device) -> None:
    step = draw_step(rows, 128 if rows == 1 else 384, splits, place, n)
    out = run(step)
    require_boundary(step, out)
    assert torch.equal(rounded_values(out).cpu(), round_fp8(out.x.float().cpu(), 128).double())
    assert torch.equal(rounded_values(run(step, act_fp8=False)), out.x.double())


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 3])
def test_the_rows_for_the_experts_are_those_that_they_round_themselves(rows: int, place: torch.device) -> None:
    step = draw_step(rows, 384, 1, place)
    spread = ExpertRows.empty(rows, 384, place)
    out = kernel.launch(
        step.y, step.stream, step.before, step.weights, CUT, iterations=1, hc_eps=EPS, norm_eps=EPS, act_fp8=True,
        spread=spread,
    )  # fmt: skip
    alone = round_rows(out.x)
    assert torch.equal(spread.values[:, :rows], alone.values[:, :rows])
    assert torch.equal(spread.scales[:rows], alone.scales[:rows]) and bool((spread.scales[:rows] > 0).all())


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    step = draw_step(4, 128, 2, place)
    assert unequal_rows(step, lambda s: parts_of(run(s)), [[0, 1, 2, 3], [3, 1], [0, 1, 2, 3] * 4 + [2, 0]]) == 0


@pytest.mark.kernels
@pytest.mark.parametrize("act_fp8", [True, False])
def test_a_chunk_hands_on_the_values_of_its_rows(act_fp8: bool, place: torch.device) -> None:
    step = draw_step(9, 128, 1, place)
    out = run(step, act_fp8=act_fp8)
    exact = round_fp8(out.x.float().cpu(), 128) if act_fp8 else out.x.float().cpu()
    assert torch.equal(rounded_values(out).cpu(), exact.double())


@pytest.mark.kernels
def test_m28_a_cut_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    step = draw_step(2, 128, 2, place)

    def keyed(step: Step) -> list[Tensor]:
        return parts_of(run(step, replace(CUT, channels=32 if step.stream.shape[0] == 1 else 128)))

    assert unequal_rows(step, keyed, [[0, 1]]) > 0


@pytest.mark.kernels
def test_everything_may_be_changed_in_place(place: torch.device) -> None:
    step = draw_step(2, 128, 2, place)
    assert step.before is not None
    apart = run(step)
    room = replace(step.before, stream=step.stream, parts=apart.parts)
    kernel.launch(
        step.y, step.stream, step.before, step.weights, CUT, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS,
        act_fp8=True, out=room,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(parts_of(room), parts_of(apart), strict=True))


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    step = draw_step(2, 128, 2, place)
    assert step.y is not None and step.before is not None
    weights, before = step.weights, step.before
    many = torch.zeros(4097, 4, 128, dtype=torch.bfloat16, device=place)
    strided = torch.zeros(128, 4, 2, dtype=torch.bfloat16, device=place).permute(2, 1, 0)
    cases: list[tuple[Step, str]] = [
        (replace(step, stream=many), "stream must have 1 to 4096 rows; got 4097"),
        (replace(step, stream=step.stream[:, :3].contiguous()), r"stream must be \[T, 4, D\]"),
        (replace(step, stream=step.stream.float()), "stream must be torch.bfloat16"),
        (replace(step, stream=strided), "stream must be contiguous"),
        (replace(step, stream=step.stream[..., :64].contiguous()), "stream must have a multiple of 128 channels"),
        (replace(step, y=None), "y and before must be given together"),
        (replace(step, y=step.y[0]), r"y must be \[S, T, D\]"),
        (replace(step, y=step.y.bfloat16()), "y must be torch.float32"),
        (replace(step, before=replace(before, comb=before.comb[:1])), "before.comb must have shape"),
        (replace(step, weights=replace(weights, fn=weights.fn[:5].contiguous())), "fn must have 4 or 24 rows; got 5"),
        (replace(step, weights=replace(weights, base=weights.base[:4].contiguous())), "base must have shape"),
        (replace(step, weights=replace(weights, norm=weights.norm.bfloat16())), "norm must be torch.float32"),
    ]
    for bad, named in cases:
        with pytest.raises(ValueError, match=named):
            run(bad)
    for spread, act_fp8, named in (
        (ExpertRows.empty(3, 128, place), True, "rows must be 2; got 3"),
        (ExpertRows.empty(2, 128, place), False, "act_fp8 must be true for the rows of the experts"),
    ):
        with pytest.raises(ValueError, match=named):
            kernel.launch(
                step.y, step.stream, before, weights, CUT, iterations=1, hc_eps=EPS, norm_eps=EPS, act_fp8=act_fp8,
                spread=spread,
            )  # fmt: skip
    with pytest.raises(ValueError, match="iterations must be positive; got 0"):
        kernel.launch(step.y, step.stream, before, weights, CUT, iterations=0, hc_eps=EPS, norm_eps=EPS, act_fp8=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("splits", "n"), [(4, 24), (8, 24), (0, 24), (4, 4)])
def test_m28_the_models_boundary_is_close_and_row_invariant(splits: int, n: int) -> None:
    step = draw_step(8, 4096, splits, torch.device("cuda"), n)
    require_boundary(step, run(step, kernel.TUNING))
    if n == kernel.COEFFICIENTS:
        batches = [list(range(rows)) for rows in range(1, 9)]
        runs = [*batches, [5, 3, 0, 7, 1, 6]]
        assert unequal_rows(step, lambda s: parts_of(run(s, kernel.TUNING)), runs) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_boundaries_follow_their_inputs(rows: int) -> None:
    step = draw_step(rows, 4096, 4, torch.device("cuda"))
    assert step.y is not None
    rooms = [kernel.Boundary.empty(rows, 4096, step.stream.device) for _ in range(3)]

    def chain(dependent: bool) -> None:
        stream, before = step.stream, step.before
        for room in rooms:
            kernel.hyper_mix(
                step.y, stream, before, step.weights, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS, act_fp8=True,
                out=room, dependent=dependent,
            )  # fmt: skip
            stream, before = room.stream, room

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(3):
        step.stream.mul_(-0.75)
        step.y.mul_(1.25)
        chain(False)
        expected = [part.clone() for room in rooms for part in parts_of(room)]
        for _ in range(3):
            for room in rooms:
                room.x.fill_(torch.nan)
                room.comb.fill_(torch.nan)
            graph.replay()
            found = [part for room in rooms for part in parts_of(room)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
