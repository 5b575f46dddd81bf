"""Pooling: the twin, by the vector of model.md section 9, and the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import compress as kernel
from dsv4nb_kernels._kv_records import record_bytes
from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference._hadamard import hadamard
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference._records import pack_records, unpack_records
from dsv4nb_kernels.reference.compress import compress
from dsv4nb_kernels.reference.norm_rope_write import rope_entries


def test_equal_scores_give_the_mean_and_missing_rows_take_no_part() -> None:
    early, late = torch.arange(1.0, 9.0), 10 * torch.arange(1.0, 9.0)
    # overlapping windows of four: the early half of the window before, the late half of the own one
    values = torch.stack((torch.cat((early[:4], late[:4])), torch.cat((early[:4], late[4:]))))[:, :, None]
    scores = torch.zeros_like(values)
    scores[0, :4] = -math.inf
    assert compress(values, scores).flatten().tolist() == [25.0, 33.75]


def test_softmax_runs_per_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    values, scores = torch.randn(3, 128, 32, generator=generator), torch.randn(3, 128, 32, generator=generator) * 5
    expected = (scores.double().softmax(1) * values.double()).sum(1)
    torch.testing.assert_close(compress(values, scores), expected.float(), atol=1e-5, rtol=1e-5)


def test_a_window_of_a_batch_equals_the_window_alone() -> None:
    for rows in (8, 128):
        generator = torch.Generator().manual_seed(1)
        values, scores = (torch.randn(9, rows, 128, generator=generator) for _ in range(2))
        batch = compress(values, scores)
        for n in (1, 2, 5):
            assert torch.equal(compress(values[3 : 3 + n], scores[3 : 3 + n]), batch[3 : 3 + n])


EPS = 1e-6
BF16_STEP = 2.0**-8
WIDTH, TAIL = 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All source rows of a context as parts, and what a compressor adds to them."""

    parts: Tensor  # [S, positions, line]
    offset: Tensor
    norm: Tensor
    cos: Tensor  # [windows, rd]
    sin: Tensor
    halves: int

    @property
    def ratio(self) -> int:
        return self.offset.shape[0]


def draw_context(positions: int, ratio: int, device: torch.device, width: int = WIDTH, splits: int = 3) -> Context:
    generator = torch.Generator().manual_seed(17)
    halves = 2 if ratio == 4 else 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    angle = torch.rand(positions // ratio + 1, TAIL // 2, generator=generator).to(device) * 6
    parts = draw(splits, positions, 2 * halves * width)
    parts[..., halves * width :] *= 4  # scores: from even shares to one row that takes all
    return Context(
        parts=parts,
        offset=draw(ratio, 2 * halves * width),
        norm=draw(width) + 1,
        cos=angle.cos().repeat_interleave(2, -1),
        sin=torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2),
        halves=halves,
    )


def run(context: Context, steps: list[int], *, rounding: kernel.Rounding = "kv") -> Tensor:
    """The entries [n, d] after steps of so many rows; holds the kernel to its own entries and ring rows."""
    device, ratio, width = context.parts.device, context.ratio, context.norm.shape[0]
    reach = context.halves * ratio
    ring = torch.full((reach + max(8, *steps), context.offset.shape[1]), torch.nan, device=device)
    entries = empty_entries(context, context.cos.shape[0] + 1, rounding)
    first = 0
    for rows in steps:
        window = torch.arange(first, first + rows, device=device) // ratio
        kernel.compress(
            context.parts[:, first : first + rows].contiguous(), context.offset,
            torch.tensor([first], dtype=torch.int32, device=device), ring, context.norm,
            context.cos[window].contiguous(), context.sin[window].contiguous(), entries, eps=EPS, rounding=rounding,
        )  # fmt: skip
        first += rows
        done = first // ratio
        held = rows_of(entries, width)
        assert held[done:].isnan().all() and not held[:done].isnan().any()
        slots = torch.arange(max(0, first - len(ring)), first, device=device)
        assert torch.equal(ring[slots % len(ring)], sources(context)[slots])
    return rows_of(entries, width)[: first // ratio]


def empty_entries(context: Context, count: int, rounding: kernel.Rounding) -> Tensor:
    """NaN everywhere."""
    width, device = context.norm.shape[0], context.parts.device
    if rounding == "kv":
        return torch.full((count, record_bytes(width, TAIL)), 0xFF, dtype=torch.uint8, device=device)
    return torch.full((count, width), torch.nan, dtype=torch.bfloat16, device=device)


def rows_of(entries: Tensor, width: int) -> Tensor:
    """[E, d] bfloat16."""
    return entries if entries.dtype == torch.bfloat16 else unpack_records(entries, width, TAIL)


def sources(context: Context) -> Tensor:
    """[positions, line] float32."""
    out = context.parts[0]
    for part in context.parts[1:]:
        out = out + part
    return out + context.offset[torch.arange(out.shape[0], device=out.device) % context.ratio]


def by_twin(context: Context, *, rounding: kernel.Rounding) -> Tensor:
    """[n, d] float64, with the roundings of the contract in between."""
    rows, ratio, width = sources(context).double(), context.ratio, context.norm.shape[0]
    values, scores = rows.chunk(2, -1)
    count = rows.shape[0] // ratio
    values, scores = values[: count * ratio].view(count, ratio, -1), scores[: count * ratio].view(count, ratio, -1)
    if context.halves == 2:
        nothing = torch.zeros_like(values[:1, :, :width])
        values = torch.cat((torch.cat((nothing, values[:-1, :, :width])), values[:, :, width:]), 1)
        scores = torch.cat((torch.cat((nothing - math.inf, scores[:-1, :, :width])), scores[:, :, width:]), 1)
    normed = rms_norm(compress(values, scores).bfloat16().double(), context.norm.double(), EPS).bfloat16().double()
    turn = context.cos[:count].double(), context.sin[:count].double()
    turned = rope_entries(normed, *turn, kv_fp8=False)
    if rounding == "none":
        return turned
    rounded = turned.bfloat16().float().cpu()
    if rounding == "index":
        return round_fp4(hadamard(rounded[:, None])[:, 0].bfloat16().float()).double().to(turned.device)
    still = torch.ones(count, TAIL), torch.zeros(count, TAIL)
    return rope_entries(rounded, *still, kv_fp8=True).double().to(turned.device)


def require_twin(context: Context, found: Tensor, *, rounding: kernel.Rounding) -> None:
    """Nearly all as the rounded twin; the rest stood beside a boundary of a rounding before the last."""
    exact = by_twin(context, rounding=rounding)
    step = torch.full((exact.shape[1],), BF16_STEP, device=exact.device)
    if rounding == "index":  # a step of e2m1 at the end of a block, of all that is in it
        blocks = exact.unflatten(-1, (-1, 32))
        error = (found.double().unflatten(-1, (-1, 32)) - blocks).abs() / blocks.abs().amax(-1, keepdim=True)
        assert float(error.max()) <= 1 / 3 and float((error > 0).double().mean()) < 0.02
        return
    if rounding == "kv":
        step[:-TAIL] = 2.0**-4
    pair = exact.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    error, size = (found.double() - exact).abs(), pair.clamp_min(1e-3 * exact.abs().amax(-1, keepdim=True))
    # the pooled row, its norm and its rotation are rounded one after the other
    assert bool((error <= 5 * step * size).all())
    assert float((error > BF16_STEP * size).double().mean()) < 0.02


@pytest.mark.kernels
def test_records_hold_the_bfloat16_entry_rounded(place: torch.device) -> None:
    context = draw_context(16, 4, place)
    exact, rounded = (run(context, [8, 8], rounding=rounding) for rounding in ("none", "kv"))
    assert torch.equal(rounded.cpu(), unpack_records(pack_records(exact.cpu().float(), TAIL), WIDTH, TAIL))


def unequal_entries(context: Context, runs: Callable[[list[int]], Tensor], groupings: list[list[int]]) -> int:
    """How many entries differ in any bit from those of a context that came row by row."""
    alone = runs([1] * context.parts.shape[1])
    assert bool((alone != 0).any(-1).all())
    return sum(
        not torch.equal(one, other) for steps in groupings for one, other in zip(runs(steps), alone, strict=True)
    )


@pytest.mark.kernels
@pytest.mark.parametrize(("ratio", "steps"), [(4, [6, 1, 4, 2]), (8, [3, 8, 1, 5])])
@pytest.mark.parametrize("rounding", ["none", "kv", "index"])
def test_the_kernel_matches_the_twin(
    ratio: int, steps: list[int], rounding: kernel.Rounding, place: torch.device
) -> None:
    context = draw_context(sum(steps), ratio, place)
    require_twin(context, run(context, steps, rounding=rounding), rounding=rounding)


@pytest.mark.kernels
def test_m28_entries_do_not_depend_on_the_grouping_of_their_rows(place: torch.device) -> None:
    context = draw_context(16, 4, place)
    assert unequal_entries(context, lambda steps: run(context, steps), [[8, 8], [3, 6, 1, 6], [16], [5, 11]]) == 0


@pytest.mark.kernels
def test_m28_a_sum_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    context = draw_context(16, 4, place)
    size = torch.exp2(torch.tensor([0.0, 12.0, 12.0], device=place))[:, None, None]
    context = replace(context, parts=torch.stack((context.parts[0], context.parts[1], -context.parts[1])) * size)
    turned = replace(context, parts=context.parts.flip(0))

    def keyed(steps: list[int]) -> Tensor:
        return run(context if len(steps) == 16 else turned, steps)

    assert unequal_entries(context, keyed, [[8, 8]]) > 0


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    context = draw_context(8, 4, place)
    given = {
        "product": context.parts[:, :3].contiguous(),
        "offset": context.offset,
        "position": torch.zeros(1, dtype=torch.int32, device=place),
        "ring": torch.zeros(16, context.offset.shape[1], device=place),
        "norm": context.norm,
        "cos": torch.ones(3, TAIL, device=place),
        "sin": torch.zeros(3, TAIL, device=place),
        "entries": empty_entries(context, 8, "kv"),
    }
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"product": given["product"][0]}, r"product must be \[S, T, N\]"),
        ({"product": torch.zeros(1, 4097, 512, device=place)}, "product must have 1 to 4096 rows; got 4097"),
        ({"product": given["product"].half()}, "product must be torch.float32"),
        ({"product": given["product"][..., :384].contiguous()}, "product must be 256 or 512 wide; got 384"),
        ({"offset": context.offset[:2].clone()}, "a window must have a multiple of 8 rows; got 4"),
        ({"offset": context.offset.double()}, "offset must be torch.float32"),
        ({"position": given["position"].long()}, "position must be torch.int32"),
        ({"ring": given["ring"][:10].clone()}, "ring must have at least 11 rows; got 10"),
        ({"ring": given["ring"].t().contiguous().t()}, "ring must be contiguous"),
        ({"norm": context.norm[:96].clone()}, "norm must be a power of two from 128 on; got 96"),
        ({"cos": given["cos"][:2].clone()}, "cos must have shape"),
        ({"cos": torch.ones(3, 32, device=place), "sin": torch.ones(3, 32, device=place)}, "d - rd must be a multiple"),
        ({"entries": given["entries"].float()}, "entries must be torch.uint8"),
        ({"entries": empty_entries(context, 8, "none")}, "entries must have shape"),
    ]
    for bad, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.compress(**{**given, **bad}, eps=EPS, rounding="kv")


@pytest.mark.gpu
def test_m28_the_models_index_keys_are_close_and_do_not_depend_on_the_grouping() -> None:
    context = draw_context(64, 4, torch.device("cuda"), 128, 8)
    require_twin(context, run(context, [8] * 8, rounding="index"), rounding="index")
    assert unequal_entries(context, lambda steps: run(context, steps, rounding="index"), [[8] * 8, [5, 3] * 8]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("ratio", "positions"), [(4, 64), (128, 384)])
def test_m28_the_models_entries_are_close_and_do_not_depend_on_the_grouping(ratio: int, positions: int) -> None:
    context = draw_context(positions, ratio, torch.device("cuda"), 512, 4)
    require_twin(context, run(context, [8] * (positions // 8)), rounding="kv")
    groupings = [[8] * (positions // 8), [6, 2] * (positions // 8), [5, 1, 7, 3] * (positions // 16), [positions]]
    assert unequal_entries(context, lambda steps: run(context, steps), groupings) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_steps_follow_their_position(rows: int) -> None:
    device = torch.device("cuda")
    context = draw_context(48, 4, device, 512, 4)
    product = context.parts[:, :rows].contiguous()
    position = torch.zeros(1, dtype=torch.int32, device=device)
    ring = torch.zeros(16, context.offset.shape[1], device=device)
    entries = empty_entries(context, 13, "kv")
    cos, sin = context.cos[:rows].clone(), context.sin[:rows].clone()

    def step() -> None:
        kernel.compress(
            product, context.offset, position, ring, context.norm, cos, sin, entries, eps=EPS, rounding="kv",
            dependent=True,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    entries.zero_()
    for first in range(0, 48 - rows + 1, rows):
        window = torch.arange(first, first + rows, device=device) // 4
        product.copy_(context.parts[:, first : first + rows])
        position.fill_(first)
        cos.copy_(context.cos[window])
        sin.copy_(context.sin[window])
        graph.replay()
    assert torch.equal(rows_of(entries[:12], 512), run(context, [1] * 48)) and not entries[12:].any()
