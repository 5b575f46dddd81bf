"""The experts' lower halves on a chunk: the twin, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb_kernels import expert_down_chunk as kernel
from dsv4nb_kernels._chunk_plan import Plan, plan_chunk, row_peaks
from dsv4nb_kernels._chunk_rows import column_order
from dsv4nb_kernels._expert_weights import Stored, pack_down
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_down_chunk import expert_down_chunk

pytestmark = pytest.mark.kernels

UNROUNDED = 1e-6  # of a row's length
HIDDEN, INNER, EXPERTS, CHOICES = 256, 256, 6, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the checkpoint has it."""

    down: Stored
    shared: Stored

    def matrices(self) -> Tensor:
        """[E + 1, D, I] float64, the shared expert last."""
        return torch.cat((unpack_fp4(*self.down), unpack_fp8(*self.shared)[None])).double()


def draw_layer(hidden: int, inner: int, experts: int, device: torch.device, first: int = 117) -> Layer:
    generator = torch.Generator().manual_seed(0)

    def draw_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8).to(device)

    raw = draw_bytes(0, 256, hidden, inner)
    codes = torch.where((raw & 0x7F) == 0x7F, 0, raw).view(torch.float8_e4m3fn)
    return Layer(
        down=(draw_bytes(0, 256, experts, hidden, inner // 2), draw_bytes(first, 123, experts, hidden, inner // 32)),
        shared=(codes, draw_bytes(111, 116, hidden // 128, inner // 128)),
    )


def draw_choices(rows: int, experts: int, choices: int) -> Tensor:
    """[T, K] int32 in no order."""
    generator = torch.Generator().manual_seed(rows)
    named = [torch.randperm(experts, generator=generator)[:choices] for _ in range(rows)]
    return torch.stack(named).to(torch.int32)


def draw_inner(rows: int, choices: int, inner: int) -> Tensor:
    """[T, K+1, I], rounded."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-4, 5, (rows, choices + 1, inner // 128, 1), generator=generator).float())
    x = (torch.randn(rows, choices + 1, inner // 128, 128, generator=generator) * sizes).flatten(2)
    return round_fp8(x, 128)


def lines_of(inner: Tensor, plan: Plan) -> Tensor:
    """Lines as `expert_up_chunk` leaves them: in the plan's order, columns in that of the instructions."""
    routed = inner[:, :-1].flatten(0, 1)[plan.order.long()]
    return (torch.cat((routed, inner[:, -1]))[:, column_order(inner.shape[2]).to(inner.device)] * 128).half()


def forms(device: torch.device) -> list[tuple[kernel.Tuning, bool]]:
    """The forms that run there: cuts for Hopper, and the plain one."""
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
    cuts = [kernel.Tuning(rows=1), kernel.Tuning(rows=2)] if on_hopper else []
    return [(kernel.TUNING, False), *((cut, True) for cut in cuts)]


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED, float(error.max())


def test_each_row_adds_its_experts_to_the_shared_one() -> None:
    generator = torch.Generator().manual_seed(0)
    inner, down = torch.randn(4, 3, 128, generator=generator), torch.randn(4, 32, 128, generator=generator)
    experts = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 2]])
    for act_fp8 in (False, True):
        out = expert_down_chunk(inner, experts, down, act_fp8=act_fp8)
        source = round_fp8(inner, 128) if act_fp8 else inner
        for row in range(4):
            a, b = experts[row].tolist()
            expected = down[3] @ source[row, 2] + down[a] @ source[row, 0] + down[b] @ source[row, 1]
            torch.testing.assert_close(out[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first", [117, 60])
def test_matches_the_twin_in_float64(first: int, place: torch.device) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, place, first)
    packed = pack_down(layer.down, layer.shared)
    rows = 3 if place.type == "cpu" else 300
    experts = draw_choices(rows, EXPERTS, CHOICES).to(place)
    inner = draw_inner(rows, CHOICES, INNER).to(place)
    exact = expert_down_chunk(inner.double(), experts.long(), layer.matrices(), act_fp8=False)
    plan, peaks = plan_chunk(experts, EXPERTS), row_peaks(packed.routed)
    for cut, lanes in forms(place):
        room = torch.full((rows + 2, HIDDEN), torch.nan, device=place)
        kernel.launch(lines_of(inner, plan), plan, packed, peaks, cut, rows=rows, out=room[1:-1], lanes=lanes)
        assert room[0].isnan().all() and room[-1].isnan().all()
        require_close(room[1:-1], exact)


def test_adds_up_by_ascending_expert_after_the_shared_one(place: torch.device) -> None:
    rows, total = 5, 4
    experts = torch.tensor([[3, 0, 2], [0, 1, 2], [2, 1, 0], [1, 3, 2], [3, 2, 1]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    products = torch.randn(rows, total + 1, HIDDEN, generator=generator) * 1.7 ** torch.arange(total + 1)[:, None]
    plan = plan_chunk(experts.to(place), total)
    parts = torch.empty(rows * 4, HIDDEN)
    for row in range(rows):
        parts[rows * 3 + row] = products[row, total]
        for choice, expert in enumerate(experts[row].tolist()):
            parts[plan.places[row * 3 + choice]] = products[row, expert]
    out = torch.empty(rows, HIDDEN, device=place)
    kernel.add_parts(parts.to(place), plan, out)
    for row in range(rows):
        expected = products[row, total]
        for expert in sorted(experts[row].tolist()):
            expected = expected + products[row, expert]
        assert torch.equal(out[row].cpu(), expected)


def test_a_row_does_not_depend_on_those_beside_it(place: torch.device) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, place)
    packed = pack_down(layer.down, layer.shared)
    rows = 4 if place.type == "cpu" else 200
    experts, inner = draw_choices(rows, EXPERTS, CHOICES).to(place), draw_inner(rows, CHOICES, INNER).to(place)
    peaks = row_peaks(packed.routed)

    def run(chosen: list[int], cut: kernel.Tuning, lanes: bool) -> Tensor:
        plan = plan_chunk(experts[chosen], EXPERTS)
        lines = lines_of(inner[chosen], plan)
        return kernel.launch(lines, plan, packed, peaks, cut, rows=len(chosen), lanes=lanes)

    chosen = [rows - 1, 0, 2]
    for cut, lanes in forms(place):
        whole = run(list(range(rows)), cut, lanes)
        assert (whole != 0).any(-1).all()
        assert torch.equal(run(chosen, cut, lanes), whole[chosen])


def test_refuses_by_name(place: torch.device) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, place)
    packed = pack_down(layer.down, layer.shared)
    plan, peaks = plan_chunk(draw_choices(9, EXPERTS, CHOICES).to(place), EXPERTS), row_peaks(packed.routed)
    inner = lines_of(draw_inner(9, CHOICES, INNER).to(place), plan)

    def run(
        inner: Tensor = inner, plan: Plan = plan, peaks: Tensor = peaks, rows: int = 9, out: Tensor | None = None
    ) -> Tensor:
        return kernel.expert_down_chunk(inner, plan, packed, peaks, rows=rows, out=out)

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: run(inner=inner[1:]), "inner must have shape"),
        (lambda: run(inner=inner.float()), "inner must be torch.float16"),
        (lambda: run(rows=0), "rows must be 1 to 4096; got 0"),
        (lambda: run(rows=8), "plan.order must have shape"),
        (lambda: run(rows=2), "plan must hold 1 to 8 choices a row; got 9"),
        (lambda: run(plan=replace(plan, ends=plan.ends[1:])), "plan.ends must have shape"),
        (lambda: run(peaks=peaks.int()), "peaks must be torch.uint8"),
        (lambda: run(out=torch.empty(9, 2 * HIDDEN, device=place)), "out must have shape"),
        (
            lambda: kernel.expert_down_chunk(
                inner, plan, packed, peaks, rows=9, parts=torch.empty(9, HIDDEN, device=place)
            ),
            "parts must have shape",
        ),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [1024, 2048])
def test_the_models_experts_are_exact_and_replay_in_a_graph(inner: int) -> None:
    device, rows, total = torch.device("cuda"), 500, 12
    layer = draw_layer(4096, inner, total, device)
    packed = pack_down(layer.down, layer.shared)
    experts = draw_choices(rows, total, 6).to(device)
    plan, peaks = plan_chunk(experts, total), row_peaks(packed.routed)
    values = draw_inner(rows, 6, inner).to(device)
    lines, out = lines_of(values, plan), torch.empty(rows, 4096, device=device)
    parts = torch.empty(rows * 7, 4096, device=device)

    def chunk() -> None:
        plan_chunk(experts, total, out=plan)
        kernel.expert_down_chunk(lines, plan, packed, peaks, rows=rows, parts=parts, out=out)

    chunk()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk()
    experts.copy_(experts.flip(0))  # other experts, other tiles
    experts[:100] = experts[:1].clone()
    plan_chunk(experts, total, out=plan)
    lines.copy_(lines_of(values, plan))
    out.fill_(torch.nan)
    graph.replay()
    require_close(out, expert_down_chunk(values.double(), experts.long(), layer.matrices(), act_fp8=False))
