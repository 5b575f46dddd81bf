"""The experts' lower halves and their sum: the twin, the packed layout, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb_kernels import expert_down as kernel
from dsv4nb_kernels._expert_rows import ExpertRows, round_inner, round_rows
from dsv4nb_kernels._expert_weights import DownWeights, Stored, UpWeights, pack_down, unpack_down
from dsv4nb_kernels.expert_up import expert_up
from dsv4nb_kernels.fp8_rows import Fp8Matrix
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_down import expert_down

pytestmark = pytest.mark.kernels

UNROUNDED = 1e-6  # of a row's length
HIDDEN, EXPERTS, CHOICES = 128, 7, 3
CUTS = [(256, kernel.Tuning(warps=2)), (512, kernel.Tuning(warps=2))]  # a warp takes one chunk of each expert, or two
SHAPES = [(4096, 1024, 16, 6), (4096, 2048, 16, 6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the checkpoint has it."""

    down: Stored
    shared: Stored

    def packed(self) -> DownWeights:
        return pack_down(self.down, self.shared)

    def matrices(self) -> Tensor:
        """[E + 1, D, I] float64, the shared expert last."""
        return torch.cat((unpack_fp4(*self.down), unpack_fp8(*self.shared)[None])).double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the upper halves hand over: [T, K+1, I] and [T, K]."""

    inner: Tensor
    experts: Tensor

    def rows(self, chosen: list[int]) -> Step:
        return Step(inner=self.inner[chosen], experts=self.experts[chosen])

    def lines(self) -> Tensor:
        """[T · (K+1) + 1, I] as `expert_up` writes them."""
        return torch.cat((self.inner.flatten(0, 1), torch.zeros_like(self.inner[0, :1])))


def draw_layer(hidden: int, inner: int, experts: int, device: torch.device) -> Layer:
    """Every code of both formats but NaN, and scales that differ by up to 2^12."""
    generator = torch.Generator(device).manual_seed(0)

    def draw_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8, device=device)

    raw = draw_bytes(0, 256, hidden, inner)
    shared = torch.where((raw & 0x7F) == 0x7F, 0, raw).view(torch.float8_e4m3fn)
    return Layer(
        down=(draw_bytes(0, 256, experts, hidden, inner // 2), draw_bytes(114, 127, experts, hidden, inner // 32)),
        shared=(shared, draw_bytes(108, 121, hidden // 128, inner // 128)),
    )


def draw_step(rows: int, inner: int, experts: int, choices: int, device: torch.device) -> Step:
    """Lines from 2^-20 to the largest that float16 carries; blocks of zeros and of less than a scale's floor."""
    generator = torch.Generator(device).manual_seed(1)
    blocks = (rows, choices + 1, inner // 128)
    exponents = torch.randint(-20, 9, (*blocks, 1), generator=generator, device=device)
    values = torch.rand(*blocks, 128, generator=generator, device=device) * 2 - 1
    lines = (values * torch.exp2(exponents.float())).flatten(2)
    lines[0, 0, 128:256] = 0.0
    lines[0, -1, :64] *= 2.0**-30
    named = torch.rand(rows, experts, generator=generator, device=device).topk(choices).indices.sort().values
    return Step(inner=lines.clamp(-150, 150), experts=named.to(torch.int32))


def run(
    step: Step, weights: DownWeights, cut: kernel.Tuning, ptx: bool | None = None, *, early: bool = False
) -> Tensor:
    """[T, D]; holds the kernel to its own rows and to every element of them."""
    lines = step.lines() if early else round_inner(step.lines())
    room = torch.full((step.experts.shape[0] + 2, weights.hidden), torch.nan, device=lines.device)
    kernel.launch(lines, step.experts, weights, cut, out=room[1:-1], ptx=ptx)
    assert room[0].isnan().all() and room[-1].isnan().all() and room[1:-1].isfinite().all()
    return room[1:-1]


def by_twin(step: Step, matrices: Tensor) -> Tensor:
    """[T, D] float64: the twin on the rounded lines, one tile for each choice."""
    rows, choices = step.experts.shape
    shared = torch.full_like(step.experts[:, :1], matrices.shape[0] - 1)
    named = torch.cat((step.experts, shared), dim=1).flatten().long()
    order = named.sort(stable=True).indices
    ends = named.bincount(minlength=matrices.shape[0]).cumsum(0).tolist()
    spans = [(e, first, last) for e, (first, last) in enumerate(zip([0, *ends], ends, strict=False)) if first < last]
    tiles = round_fp8(step.inner, 128).double().flatten(0, 1)[order]
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device) * 8
    return expert_down(tiles[:, None].repeat(1, 8, 1), places.view(rows, choices + 1), matrices, spans, act_fp8=False)


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED


def require_rows_alone(step: Step, runs: Callable[[Step], Tensor], batches: list[list[int]]) -> None:
    """A row's bits are those of the row alone, whoever stands beside it."""
    alone = {row: runs(step.rows([row]))[0] for batch in batches for row in batch}
    for batch in batches:
        out = runs(step.rows(batch))
        for place, row in enumerate(batch):
            assert (alone[row] != 0).any()
            assert torch.equal(out[place], alone[row]), f"row {row} of {batch}"


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


def test_packing_keeps_the_checkpoint() -> None:
    layer = draw_layer(256, 512, 3, torch.device("cpu"))
    for stored, again in zip((layer.down, layer.shared), unpack_down(layer.packed()), strict=True):
        for mine, theirs in zip(stored, again, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_rounds_lines_as_the_twin(form: Any) -> None:
    lines = draw_step(3, 512, EXPERTS, CHOICES, form.device).lines()
    assert torch.equal(round_inner(lines).double() * 2.0**-7, round_fp8(lines, 128).double())


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_matches_the_twin(rows: int, cut: tuple[int, kernel.Tuning], form: Any) -> None:
    inner, tuning = cut
    layer = draw_layer(HIDDEN, inner, EXPERTS, form.device)
    step = draw_step(rows, inner, EXPERTS, CHOICES, form.device)
    require_close(run(step, layer.packed(), tuning, form.ptx), by_twin(step, layer.matrices()))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_m28_a_row_of_a_step_equals_the_row_alone(cut: tuple[int, kernel.Tuning], form: Any) -> None:
    if not form.ptx:
        pytest.skip("without PTX every row takes the same path")
    inner, tuning = cut
    weights = draw_layer(HIDDEN, inner, EXPERTS, form.device).packed()
    step = draw_step(3, inner, EXPERTS, CHOICES, form.device)
    require_rows_alone(step, lambda s: run(s, weights, tuning, True), [[2, 1], [2, 0, 1], [1, 2, 0, 2, 1]])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rounding_early_changes_no_bit(rows: int, cut: tuple[int, kernel.Tuning], form: Any) -> None:
    if not form.ptx:
        pytest.skip("without PTX the lines are rounded before")
    inner, tuning = cut
    weights = draw_layer(HIDDEN, inner, EXPERTS, form.device).packed()
    step = draw_step(rows, inner, EXPERTS, CHOICES, form.device)
    assert torch.equal(run(step, weights, tuning, True, early=True), run(step, weights, tuning, True))


def test_m28_a_cut_that_depends_on_the_number_of_rows_is_caught(form: Any) -> None:
    if not form.ptx:
        pytest.skip("one form will do")
    weights = draw_layer(HIDDEN, 512, EXPERTS, form.device).packed()
    step = draw_step(2, 512, EXPERTS, CHOICES, form.device)

    def keyed(rows: Step) -> Tensor:
        return run(rows, weights, kernel.Tuning(warps=2 if rows.inner.shape[0] == 1 else 4), True)

    with pytest.raises(AssertionError, match="row 0 of"):
        require_rows_alone(step, keyed, [[0, 1]])


def test_the_order_in_which_a_row_names_its_experts_changes_nothing(form: Any) -> None:
    weights = draw_layer(HIDDEN, 256, EXPERTS, form.device).packed()
    step = draw_step(1, 256, EXPERTS, CHOICES, form.device)
    turned = Step(inner=step.inner[:, [2, 0, 1, 3]], experts=step.experts[:, [2, 0, 1]])
    cut = kernel.Tuning(warps=2)
    assert torch.equal(run(turned, weights, cut, form.ptx), run(step, weights, cut, form.ptx))


def test_refuses_by_name(form: Any) -> None:
    device, inner = form.device, 256
    weights = draw_layer(HIDDEN, inner, EXPERTS, device).packed()
    step = draw_step(3, inner, EXPERTS, CHOICES, device)
    lines, experts = step.lines(), step.experts
    short = replace(weights, routed=weights.routed[:, :4].contiguous())
    cut = kernel.Tuning(warps=2)
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.expert_down(lines[:-1].clone(), experts, weights), "inner must have shape"),
        (lambda: kernel.expert_down(lines.double(), experts, weights), "inner must be torch.float32"),
        (lambda: kernel.expert_down(lines.half(), experts, weights), "inner must be torch.float32"),
        (lambda: kernel.expert_down(lines, experts.long(), weights), "experts must be torch.int32"),
        (lambda: kernel.expert_down(lines, experts.flatten(), weights), r"experts must be \[T, K\]"),
        (lambda: kernel.expert_down(lines, experts, short), "routed must have shape"),
        (lambda: kernel.expert_down(lines, experts, weights, out=torch.empty(3, 8, device=device)), "out must have"),
        (lambda: kernel.expert_down(lines, experts, weights, rounded=lines), "rounded must be torch.float16"),
        (lambda: kernel.launch(lines, experts, weights, cut, ptx=True), "inner must be float16 for more than 2 rows"),
        (lambda: kernel.launch(lines, experts, weights, cut, ptx=False), "inner must be float16 where there is no PTX"),
        (lambda: kernel.launch(round_inner(lines), experts, weights, kernel.Tuning(warps=4)), "I must be 128 or 256"),
        (lambda: round_inner(torch.zeros(2, 200, device=device)), "multiple of 128 columns"),
    ]
    for refused, message in refusals:
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_twin_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), shape
    layer = draw_layer(hidden, inner, experts, device)
    weights, matrices, cut = layer.packed(), layer.matrices(), kernel.tuning(hidden, inner)
    for rows in (1, 2, 3, 6, 8):
        step = draw_step(rows, inner, experts, choices, device)
        require_close(run(step, weights, cut), by_twin(step, matrices))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_m28_rows_of_one_to_eight_equal_the_row_alone_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), shape
    weights, cut = draw_layer(hidden, inner, experts, device).packed(), kernel.tuning(hidden, inner)
    step = draw_step(8, inner, experts, choices, device)
    batches = [list(range(rows)) for rows in range(1, 9)]
    require_rows_alone(step, lambda s: run(s, weights, cut), [*batches, [5, 3, 0, 7, 1, 6], [7, 7, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_early_changes_no_bit_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), shape
    weights, cut = draw_layer(hidden, inner, experts, device).packed(), kernel.tuning(hidden, inner)
    for rows in (1, 2):
        step = draw_step(rows, inner, experts, choices, device)
        assert torch.equal(run(step, weights, cut, early=True), run(step, weights, cut))


@pytest.mark.gpu
def test_m28_a_cut_that_depends_on_the_number_of_rows_is_caught_on_the_gpu() -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), SHAPES[0]
    weights = draw_layer(hidden, inner, experts, device).packed()
    step = draw_step(4, inner, experts, choices, device)

    def keyed(rows: Step) -> Tensor:
        return run(rows, weights, kernel.Tuning(warps=8 if rows.inner.shape[0] < 4 else 4))

    with pytest.raises(AssertionError, match="row 0 of"):
        require_rows_alone(step, keyed, [[0, 1, 2, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_layers_follow_their_inputs_on_the_gpu(rows: int) -> None:
    """Three upper and lower halves in a chain, every kernel started before the one ahead of it has ended."""
    device, (hidden, inner, experts, choices) = torch.device("cuda"), SHAPES[0]
    generator = torch.Generator(device).manual_seed(2)
    down = draw_layer(hidden, inner, experts, device).packed()
    flipped = draw_layer(inner, 2 * hidden, experts, device).packed()  # as many bytes; which ones does not matter
    up = UpWeights(
        routed=flipped.routed.view(experts, inner // 8, hidden // 256, 544),
        shared=Fp8Matrix(
            words=flipped.shared.words, scales=flipped.shared.scales.view(-1, hidden // 128), n=2 * inner, k=hidden
        ),
    )
    x = torch.randn(rows, hidden, generator=generator, device=device)
    named = torch.rand(rows, experts, generator=generator, device=device).topk(choices).indices.sort().values
    named, shares = named.to(torch.int32), torch.rand(rows, choices, generator=generator, device=device)
    rounded = ExpertRows.empty(rows, hidden, device)
    lines = torch.empty(rows * (choices + 1) + 1, inner, device=device)
    half_lines, out = torch.empty_like(lines, dtype=torch.float16), torch.empty(3, rows, hidden, device=device)

    def layers(dependent: bool) -> None:
        for layer in range(3):
            round_rows(out[layer - 1] if layer else x, out=rounded, dependent=dependent)
            expert_up(rounded, named, shares, up, limit=10.0, out=lines, dependent=dependent)
            kernel.expert_down(lines, named, down, rounded=half_lines, out=out[layer], dependent=dependent)

    layers(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(True)
    for turn in range(3):
        x.mul_(-1.25)
        named.copy_((named + turn) % experts)
        layers(False)
        expected = out.clone()
        assert expected.isfinite().all() and (expected != 0).any(-1).all()
        for _ in range(5):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
