"""The experts' upper halves on a chunk: the twin, the plan, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb_kernels import expert_up_chunk as kernel
from dsv4nb_kernels._chunk_plan import Plan, plan_chunk, row_peaks, tiles
from dsv4nb_kernels._chunk_rows import ChunkRows, column_order
from dsv4nb_kernels._expert_weights import Stored, pack_up
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_up import clamped_swiglu
from dsv4nb_kernels.reference.expert_up_chunk import expert_up_chunk

pytestmark = pytest.mark.kernels

LIMIT = 1.5
UNROUNDED = 1e-6  # of a line's length
HIDDEN, INNER, EXPERTS, CHOICES = 256, 128, 6, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the checkpoint has it."""

    gate: Stored
    up: Stored
    shared_gate: Stored
    shared_up: Stored

    def matrices(self) -> Tensor:
        """[E + 1, 2I, D] float64, the shared expert last."""
        routed = torch.cat((unpack_fp4(*self.gate), unpack_fp4(*self.up)), dim=1)
        shared = torch.cat((unpack_fp8(*self.shared_gate), unpack_fp8(*self.shared_up)))
        return torch.cat((routed, shared[None])).double()


def draw_layer(hidden: int, inner: int, experts: int, device: torch.device, first: int = 117) -> Layer:
    """Every code of both formats but NaN; scales such that gate and up pass the clamps on either side."""
    generator = torch.Generator().manual_seed(0)

    def draw_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8).to(device)

    def draw_routed() -> Stored:
        return draw_bytes(0, 256, experts, inner, hidden // 2), draw_bytes(first, 123, experts, inner, hidden // 32)

    def draw_shared() -> Stored:
        raw = draw_bytes(0, 256, inner, hidden)
        raw = torch.where((raw & 0x7F) == 0x7F, 0, raw)
        return raw.view(torch.float8_e4m3fn), draw_bytes(111, 116, inner // 128, hidden // 128)

    return Layer(gate=draw_routed(), up=draw_routed(), shared_gate=draw_shared(), shared_up=draw_shared())


def draw_choices(rows: int, experts: int, choices: int) -> tuple[Tensor, Tensor]:
    """[T, K] int32 in no order, none of them the expert 1, and weights."""
    generator = torch.Generator().manual_seed(rows)
    others = torch.tensor([e for e in range(experts) if e != 1])
    named = [others[torch.randperm(experts - 1, generator=generator)[:choices]] for _ in range(rows)]
    return torch.stack(named).to(torch.int32), torch.rand(rows, choices, generator=generator) + 0.1


def draw_rows(rows: int, hidden: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-4, 5, (rows, hidden // 128, 1), generator=generator).float())
    return (torch.randn(rows, hidden // 128, 128, generator=generator) * sizes).flatten(1) * (256 / hidden) ** 0.5


def arranged(x: Tensor) -> ChunkRows:
    """Rows rounded and in the order of the instructions, as the kernel ahead leaves them."""
    values = round_fp8(x, 128)
    scales = torch.exp2(values.abs().amax(1).clamp_min(1e-9).log2().ceil() - 15)
    codes = (values / scales[:, None])[:, column_order(x.shape[1]).to(x.device)]
    return ChunkRows(values=codes.half(), scales=scales)


def by_choice(lines: Tensor, plan: Plan, rows: int) -> Tensor:
    """[T · (K+1), I] in the plan's order -> [T, K+1, I] in the order of the choices."""
    routed = lines[plan.places.long()].unflatten(0, (rows, -1))
    return torch.cat((routed, lines[-rows:][:, None]), dim=1)


def forms(device: torch.device) -> list[bool]:
    """The forms that run there, the one for Hopper among them or not."""
    return [False, True] if device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9 else [False]


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED, float(error.max())


def test_each_row_meets_its_experts_and_the_shared_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, up = torch.randn(5, 128, generator=generator), torch.randn(4, 64, 128, generator=generator) * 0.2
    experts, weights = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 2], [2, 0]]), torch.rand(5, 2, generator=generator)
    for act_fp8 in (False, True):
        out = expert_up_chunk(x, experts, weights, up, limit=1.5, act_fp8=act_fp8)
        source = round_fp8(x, 128) if act_fp8 else x
        for row in range(5):
            for choice, share in enumerate([*weights[row].tolist(), 1.0]):
                matrix = up[int(experts[row, choice]) if choice < 2 else 3]
                expected = clamped_swiglu(matrix @ source[row], 1.5) * share
                torch.testing.assert_close(out[row, choice], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "choices", "experts"), [(1, 1, 2), (5, 2, 6), (300, 6, 9), (2000, 6, 256)])
def test_the_plan_sorts_choices_by_expert(rows: int, choices: int, experts: int, place: torch.device) -> None:
    if place.type == "cpu" and experts > 9:
        pytest.skip("slow in the interpreter")
    named, _ = draw_choices(rows, experts, choices)
    plan = plan_chunk(named.to(place), experts)
    order = named.flatten().sort(stable=True).indices
    assert torch.equal(plan.order.cpu().long(), order)
    assert torch.equal(plan.places.cpu().long(), order.argsort())
    counts = named.flatten().bincount(minlength=experts)
    assert torch.equal(plan.ends.cpu().long(), counts.cumsum(0))
    expected = [
        (e, int(end - count) + 64 * i)
        for e, (count, end) in enumerate(zip(counts, counts.cumsum(0), strict=True))
        for i in range(-(-int(count) // 64))
    ]
    assert list(zip(plan.tile_experts.tolist(), plan.tile_places.tolist(), strict=True))[: len(expected)] == expected
    assert len(expected) <= len(plan.tile_experts) == tiles(rows, choices, experts)
    assert (plan.tile_experts[len(expected) :] == -1).all()


def test_peaks_are_the_largest_scale_bytes_of_packed_rows() -> None:
    layer = draw_layer(512, 128, 3, torch.device("cpu"))
    packed = pack_up(layer.gate, layer.up, layer.shared_gate, layer.shared_up)
    peaks = row_peaks(packed.routed).view(3, 16, 2, 8)
    assert torch.equal(peaks[:, :, 0].flatten(1), layer.gate[1].amax(2) + 14)
    assert torch.equal(peaks[:, :, 1].flatten(1), layer.up[1].amax(2) + 14)


@pytest.mark.parametrize("first", [117, 60])
def test_matches_the_twin_in_float64(first: int, place: torch.device) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, place, first)
    packed = pack_up(layer.gate, layer.up, layer.shared_gate, layer.shared_up)
    rows = 3 if place.type == "cpu" else 300
    x, (experts, weights) = draw_rows(rows, HIDDEN).to(place), draw_choices(rows, EXPERTS, CHOICES)
    experts, weights = experts.to(place), weights.to(place)
    source = round_fp8(x, 128).double()
    exact = expert_up_chunk(source, experts.long(), weights.double(), layer.matrices(), limit=LIMIT, act_fp8=False)
    plan, peaks = plan_chunk(experts, EXPERTS), row_peaks(packed.routed)
    lines = rows * (CHOICES + 1)
    for lanes in forms(place):
        room = torch.full((lines + 2, INNER), torch.nan, device=place)
        out = room[1:-1]
        kernel.launch(arranged(x), plan, weights, packed, peaks, limit=LIMIT, out=out, lanes=lanes, rounds=False)
        assert room[0].isnan().all() and room[-1].isnan().all()
        require_close(by_choice(out, plan, rows)[:, :, column_order(INNER).argsort()], exact)
        # rounded, and then exactly so: the twin's rounding of what the kernel found
        rounded = kernel.launch(arranged(x), plan, weights, packed, peaks, limit=LIMIT, lanes=lanes)
        assert torch.equal(rounded.float() / 128, round_fp8(out, 128))


def test_a_row_does_not_depend_on_those_beside_it(place: torch.device) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, place)
    packed = pack_up(layer.gate, layer.up, layer.shared_gate, layer.shared_up)
    rows = 4 if place.type == "cpu" else 200
    x, (experts, weights) = draw_rows(rows, HIDDEN).to(place), draw_choices(rows, EXPERTS, CHOICES)
    peaks = row_peaks(packed.routed)

    def run(chosen: list[int], lanes: bool) -> Tensor:
        plan = plan_chunk(experts[chosen].to(place), EXPERTS)
        shares = weights[chosen].to(place)
        out = kernel.launch(arranged(x[chosen]), plan, shares, packed, peaks, limit=LIMIT, lanes=lanes)
        return by_choice(out, plan, len(chosen))

    chosen = [rows - 1, 0, 2]
    for lanes in forms(place):
        whole = run(list(range(rows)), lanes)
        assert (whole != 0).any(-1).all()
        assert torch.equal(run(chosen, lanes), whole[chosen])


def test_refuses_by_name(place: torch.device) -> None:
    layer = draw_layer(HIDDEN, INNER, EXPERTS, place)
    packed = pack_up(layer.gate, layer.up, layer.shared_gate, layer.shared_up)
    experts, weights = (each.to(place) for each in draw_choices(9, EXPERTS, CHOICES))
    x, plan, peaks = arranged(draw_rows(9, HIDDEN).to(place)), plan_chunk(experts, EXPERTS), row_peaks(packed.routed)

    def run(
        x: ChunkRows = x, plan: Plan = plan, weights: Tensor = weights, peaks: Tensor = peaks, limit: float = LIMIT
    ) -> Tensor:
        return kernel.expert_up_chunk(x, plan, weights, packed, peaks, limit=limit)

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: run(x=ChunkRows.empty(8, HIDDEN, place)), "values must have shape"),
        (lambda: run(x=replace(x, scales=x.scales[1:])), "scales must have shape"),
        (lambda: run(weights=weights.double()), "weights must be torch.float32"),
        (lambda: run(weights=weights[:, 0]), r"weights must be \[T, K\]"),
        (lambda: run(plan=Plan.empty(9, 3, EXPERTS, place)), "plan.order must have shape"),
        (lambda: run(plan=replace(plan, tile_experts=plan.tile_experts[:-1])), "plan.tile_experts must have shape"),
        (lambda: run(peaks=peaks[:-1]), "peaks must have shape"),
        (lambda: run(limit=0.0), "limit must be > 0"),
        (lambda: plan_chunk(experts.long(), EXPERTS), "experts must be torch.int32"),
        (lambda: plan_chunk(experts, 2000), "experts_total must be 1 to 1024; got 2000"),
        (lambda: plan_chunk(experts.repeat(1, 5), EXPERTS), "1 to 8 choices a row; got 10"),
        (lambda: plan_chunk(experts.new_zeros(4097, 2), EXPERTS), "1 to 4096 rows; got 4097"),
        (lambda: row_peaks(packed.routed.flatten(2)), "routed must be"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()
    empty = torch.empty(27, INNER, device=place)
    with pytest.raises(ValueError, match=r"out must be torch.float16"):
        kernel.expert_up_chunk(x, plan, weights, packed, peaks, limit=LIMIT, out=empty)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [1024, 2048])
def test_the_models_experts_are_exact_and_replay_in_a_graph(inner: int) -> None:
    device, rows, total = torch.device("cuda"), 500, 12
    layer = draw_layer(4096, inner, total, device)
    packed = pack_up(layer.gate, layer.up, layer.shared_gate, layer.shared_up)
    x, (experts, weights) = draw_rows(rows, 4096).to(device), draw_choices(rows, total, 6)
    experts, weights = experts.to(device), weights.to(device)
    plan, peaks, given = plan_chunk(experts, total), row_peaks(packed.routed), arranged(x)
    out = torch.empty(rows * 7, inner, device=device)

    def chunk() -> None:
        plan_chunk(experts, total, out=plan)
        kernel.launch(given, plan, weights, packed, peaks, limit=LIMIT, out=out, rounds=False)

    chunk()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk()
    experts.copy_(experts.flip(0))  # other experts, other tiles
    experts[:100] = experts[:1].clone()
    out.fill_(torch.nan)
    graph.replay()
    source = round_fp8(x, 128).double()
    exact = expert_up_chunk(source, experts.long(), weights.double(), layer.matrices(), limit=LIMIT, act_fp8=False)
    require_close(by_choice(out, plan, rows)[:, :, column_order(inner).argsort()], exact)
