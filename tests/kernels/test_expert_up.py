"""The experts' upper halves: the twin, the packed layout, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb_kernels import expert_up as kernel
from dsv4nb_kernels._expert_rows import ExpertRows, round_rows
from dsv4nb_kernels._expert_weights import Stored, UpWeights, pack_up, unpack_up
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_up import clamped_swiglu, expert_up

pytestmark = pytest.mark.kernels

LIMIT = 1.5
UNROUNDED = 1e-6  # of a line's length
HIDDEN, INNER, EXPERTS, CHOICES = 512, 128, 6, 2  # two warps, one program of eight inner columns sixteen times
HALF_MODEL = (4096, 1024, 12, 6)
SHAPES = [HALF_MODEL, (4096, 2048, 12, 6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the checkpoint has it."""

    gate: Stored
    up: Stored
    shared_gate: Stored
    shared_up: Stored

    def packed(self) -> UpWeights:
        return pack_up(self.gate, self.up, self.shared_gate, self.shared_up)

    def matrices(self) -> Tensor:
        """[E + 1, 2I, D] float64, the shared expert last."""
        routed = torch.cat((unpack_fp4(*self.gate), unpack_fp4(*self.up)), dim=1)
        shared = torch.cat((unpack_fp8(*self.shared_gate), unpack_fp8(*self.shared_up)))
        return torch.cat((routed, shared[None])).double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The rows of one step and where they go."""

    x: Tensor
    experts: Tensor
    weights: Tensor

    def rows(self, chosen: list[int]) -> Step:
        return Step(x=self.x[chosen], experts=self.experts[chosen], weights=self.weights[chosen])

    def to(self, device: torch.device) -> Step:
        return Step(x=self.x.to(device), experts=self.experts.to(device), weights=self.weights.to(device))


def draw_layer(hidden: int, inner: int, experts: int, device: torch.device) -> Layer:
    """Every code of both formats but NaN; scales such that gate and up pass the clamps on either side."""
    generator = torch.Generator(device).manual_seed(0)

    def draw_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8, device=device)

    def draw_routed() -> Stored:
        return draw_bytes(0, 256, experts, inner, hidden // 2), draw_bytes(117, 123, experts, inner, hidden // 32)

    def draw_shared() -> Stored:
        raw = draw_bytes(0, 256, inner, hidden)
        raw = torch.where((raw & 0x7F) == 0x7F, 0, raw)
        return raw.view(torch.float8_e4m3fn), draw_bytes(111, 116, inner // 128, hidden // 128)

    return Layer(gate=draw_routed(), up=draw_routed(), shared_gate=draw_shared(), shared_up=draw_shared())


def draw_step(rows: int, hidden: int, experts: int, choices: int) -> Step:
    """Rows whose blocks differ by up to 2^8, as long at every width; each row names its experts in ascending order."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-4, 5, (rows, hidden // 128, 1), generator=generator).float())
    x = (torch.randn(rows, hidden // 128, 128, generator=generator) * sizes).flatten(1) * (512 / hidden) ** 0.5
    named = [torch.randperm(experts, generator=generator)[:choices].sort().values for _ in range(rows)]
    return Step(
        x=x, experts=torch.stack(named).to(torch.int32), weights=torch.rand(rows, choices, generator=generator) + 0.1
    )


def run(step: Step, weights: UpWeights, ptx: bool | None = None, cut: kernel.Tuning | None = None) -> Tensor:
    """[T, K+1, I]; holds the kernel to its own lines, every element of them, and a last one of zeros."""
    rows, choices = step.experts.shape
    room = torch.full((rows * (choices + 1) + 3, weights.inner), torch.nan, device=step.x.device)
    cut = cut or kernel.tuning(weights.hidden, weights.inner)
    out = room[1:-1]
    kernel.launch(round_rows(step.x), step.experts, step.weights, weights, cut, limit=LIMIT, out=out, ptx=ptx)
    assert room[0].isnan().all() and room[-1].isnan().all()
    assert out.isfinite().all() and not out[-1].any()
    return out[:-1].view(rows, choices + 1, weights.inner)


def by_twin(step: Step, matrices: Tensor) -> Tensor:
    """[T, K+1, I] float64: the twin on the rounded rows, one tile for each choice."""
    rows, choices = step.experts.shape
    shared = torch.full_like(step.experts[:, :1], matrices.shape[0] - 1)
    named = torch.cat((step.experts, shared), dim=1).flatten().long()
    order = named.sort(stable=True).indices
    ends = named.bincount(minlength=matrices.shape[0]).cumsum(0).tolist()
    spans = [(e, first, last) for e, (first, last) in enumerate(zip([0, *ends], ends, strict=False)) if first < last]
    share = torch.cat((step.weights, torch.ones_like(step.weights[:, :1])), dim=1).flatten()[order]
    inner = expert_up(
        round_fp8(step.x, 128).double(),
        (order // (choices + 1)).repeat_interleave(8),
        share.double().repeat_interleave(8),
        matrices,
        spans,
        limit=LIMIT,
        act_fp8=False,
    )
    out = torch.empty_like(inner[:, 0])
    out[order] = inner[:, 0]
    return out.view(rows, choices + 1, -1)


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED


def require_rows_alone(step: Step, runs: Callable[[Step], Tensor], batches: list[list[int]]) -> None:
    """A row's bits are those of the row alone, whoever stands beside it."""
    alone = {row: runs(step.rows([row]))[0] for batch in batches for row in batch}
    for batch in batches:
        out = runs(step.rows(batch))
        for place, row in enumerate(batch):
            assert (alone[row] != 0).any(-1).all()
            assert torch.equal(out[place], alone[row]), f"row {row} of {batch}"


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


def test_packing_keeps_the_checkpoint() -> None:
    layer = draw_layer(512, 256, 3, torch.device("cpu"))
    parts = (layer.gate, layer.up, layer.shared_gate, layer.shared_up)
    for stored, again in zip(parts, unpack_up(pack_up(*parts)), strict=True):
        for mine, theirs in zip(stored, again, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 3])
def test_rounds_rows_as_the_twin(rows: int, form: Any) -> None:
    step = draw_step(rows, 512, 6, 2)
    rounded = round_rows(step.x.to(form.device))
    values = rounded.values.cpu().double()[:, :rows].permute(1, 0, 2).flatten(1)
    assert torch.equal(values * rounded.scales.cpu().double()[:rows, None], round_fp8(step.x, 128).double())


@pytest.mark.parametrize("rows", [1, 3])
def test_matches_the_twin(rows: int, form: Any) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, form.device)
    step = draw_step(rows, HIDDEN, EXPERTS, CHOICES).to(form.device)
    matrices = layer.matrices()
    gate, up = (matrices @ round_fp8(step.x, 128).double().t()).chunk(2, 1)
    assert (gate > LIMIT).any() and (gate < -LIMIT).any() and (up > LIMIT).any() and (up < -LIMIT).any()
    require_close(run(step, layer.packed(), form.ptx), by_twin(step, matrices))


def test_m28_a_row_of_a_step_equals_the_row_alone(form: Any) -> None:
    if not form.ptx:
        pytest.skip("without PTX every row takes the same path")
    weights = draw_layer(HIDDEN, INNER, 3, form.device).packed()
    step = draw_step(3, HIDDEN, 3, CHOICES).to(form.device)
    require_rows_alone(step, lambda s: run(s, weights, True), [[2, 0], [1, 2, 0, 2, 1]])


def test_m28_a_cut_that_depends_on_the_number_of_rows_is_caught(form: Any) -> None:
    if not form.ptx:
        pytest.skip("one form will do")
    weights = draw_layer(HIDDEN, INNER, 3, form.device).packed()
    step = draw_step(2, HIDDEN, 3, CHOICES).to(form.device)

    def keyed(rows: Step) -> Tensor:
        return run(rows, weights, True, kernel.Tuning(warps=2 if rows.x.shape[0] == 1 else 1))

    with pytest.raises(AssertionError, match="row 0 of"):
        require_rows_alone(step, keyed, [[0, 1]])


def test_m28_few_rows_columns_change_no_bit(form: Any) -> None:
    """One, two and three rows choose an expert; weights on their way or all there."""
    if not form.ptx:
        pytest.skip("without PTX every row takes the same path")
    weights = draw_layer(1024, INNER, 4, form.device).packed()
    step = draw_step(3, 1024, 4, CHOICES).to(form.device)
    step.experts.copy_(torch.tensor([[0, 3], [1, 3], [0, 3]]))
    plain = run(step, weights, True, kernel.Tuning(warps=2, few=False))
    for depth in (1, 2):
        assert torch.equal(run(step, weights, True, kernel.Tuning(warps=2, depth=depth)), plain)


def test_refuses_by_name(form: Any) -> None:
    device = form.device
    weights = draw_layer(HIDDEN, INNER, EXPERTS, device).packed()
    step = draw_step(2, HIDDEN, EXPERTS, CHOICES).to(device)
    x, experts, shares = round_rows(step.x), step.experts, step.weights
    many = torch.zeros(8, 9, dtype=torch.int32, device=device)
    shifted = torch.zeros(5, dtype=torch.int32, device=device)[1:].view(2, 2)
    short = replace(weights, routed=weights.routed[:, :, :1].contiguous())

    def up(*given: Any, **named: Any) -> Tensor:
        return kernel.expert_up(*given, **{"limit": LIMIT, **named})

    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: up(x, experts[:1].contiguous(), shares[:1].contiguous(), weights), "rows must be 1"),
        (lambda: up(x, experts.long(), shares, weights), "experts must be torch.int32"),
        (lambda: up(x, experts.flatten(), shares, weights), r"experts must be \[T, K\]"),
        (lambda: up(x, many, many.float(), weights), "experts must hold 1 to 64"),
        (lambda: up(x, many.repeat(2, 1), many.float(), weights), "experts must have 1 to 8 rows"),
        (lambda: up(x, shifted, shares, weights), "experts must start on"),
        (lambda: up(x, experts, shares.t(), weights), "weights must be contiguous"),
        (lambda: up(x, experts, shares.half(), weights), "weights must be torch.float32"),
        (lambda: up(ExpertRows.empty(2, 256, device), experts, shares, weights), "values must have shape"),
        (lambda: up(x, experts, shares, short), "routed must have shape"),
        (lambda: up(x, experts, shares, weights, limit=0.0), "limit must be > 0"),
        (lambda: up(x, experts, shares, weights, out=torch.empty(7, 8, device=device)), "out must have shape"),
        (lambda: round_rows(torch.zeros(9, 256, device=device)), "T from 1 to 8"),
        (lambda: round_rows(torch.zeros(1, 200, device=device)), "multiple of 128 columns"),
        (lambda: round_rows(torch.zeros(1, 256, device=device).half()), "x must be float32 or bfloat16"),
    ]
    for refused, message in refusals:
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_twin_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), shape
    layer = draw_layer(hidden, inner, experts, device)
    weights, matrices = layer.packed(), layer.matrices()
    for rows in (1, 2, 3, 6, 8):
        step = draw_step(rows, hidden, experts, choices).to(device)
        require_close(run(step, weights), by_twin(step, matrices))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_m28_rows_of_one_to_eight_equal_the_row_alone_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), shape
    weights = draw_layer(hidden, inner, experts, device).packed()
    step = draw_step(8, hidden, experts, choices).to(device)
    batches = [list(range(rows)) for rows in range(1, 9)]
    require_rows_alone(step, lambda s: run(s, weights), [*batches, [5, 3, 0, 7, 1, 6], [7, 7, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_m28_few_rows_columns_change_no_bit_on_the_gpu(depth: int) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), HALF_MODEL
    weights = draw_layer(hidden, inner, experts, device).packed()
    for rows in range(1, 9):
        step = draw_step(rows, hidden, experts, choices).to(device)
        out = run(step, weights, cut=kernel.Tuning(depth=depth))
        assert torch.equal(out, run(step, weights, cut=kernel.Tuning(few=False))), f"{rows} rows"


@pytest.mark.gpu
def test_m28_a_cut_that_depends_on_the_number_of_rows_is_caught_on_the_gpu() -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), HALF_MODEL
    weights = draw_layer(hidden, inner, experts, device).packed()
    step = draw_step(4, hidden, experts, choices).to(device)

    def keyed(rows: Step) -> Tensor:
        return run(rows, weights, cut=kernel.Tuning(warps=4 if rows.x.shape[0] < 4 else 2))

    with pytest.raises(AssertionError, match="row 0 of"):
        require_rows_alone(step, keyed, [[0, 1, 2, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_a_captured_chain_follows_its_inputs_on_the_gpu(rows: int) -> None:
    device, (hidden, inner, experts, choices) = torch.device("cuda"), HALF_MODEL
    weights = draw_layer(hidden, inner, experts, device).packed()
    step = draw_step(rows, hidden, experts, choices).to(device)
    rounded = ExpertRows.empty(rows, hidden, device)
    outs, more = torch.empty(2, 6, rows * (choices + 1) + 1, inner, device=device)

    def chain() -> None:
        for out in outs:
            round_rows(step.x, out=rounded, dependent=True)
            kernel.expert_up(rounded, step.experts, step.weights, weights, limit=LIMIT, out=out, dependent=True)
        for out in more:  # the rows do not change
            kernel.expert_up(
                rounded, step.experts, step.weights, weights, limit=LIMIT, out=out, dependent=True, rows_are_older=True
            )

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for turn in range(3):
        step.x.mul_(-1.25)
        step.experts.copy_((step.experts + turn) % experts)
        outs.fill_(torch.nan)
        more.fill_(torch.nan)
        graph.replay()
        expected = kernel.expert_up(round_rows(step.x), step.experts, step.weights, weights, limit=LIMIT)
        assert all(torch.equal(out, expected) for out in (*outs, *more))
