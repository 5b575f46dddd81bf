"""Query heads and cache rows: the twin and the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import norm_rope_write as kernel
from dsv4nb_kernels._chunk_rows import ChunkRows
from dsv4nb_kernels._kv_records import record_bytes
from dsv4nb_kernels._rounded_rows import RoundedRows
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference._records import pack_records, unpack_records
from dsv4nb_kernels.reference._rotary import rotate_tail
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


BF16_STEP = 2.0**-8
LATENT, WIDTH, TAIL, RING = 256, 128, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the kernels are given: the product of the low rows, and that of the heads."""

    low: Tensor
    heads: Tensor
    latent_norm: Tensor
    kv_norm: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor

    def rows(self, chosen: list[int]) -> Step:
        return replace(
            self,
            low=self.low[:, chosen].contiguous(),
            heads=self.heads[:, chosen].contiguous(),
            cos=self.cos[chosen],
            sin=self.sin[chosen],
            slots=self.slots[chosen],
        )


def draw_step(
    rows: int, splits: int, device: torch.device, sizes: tuple[int, int, int] = (LATENT, WIDTH, TAIL), heads: int = 3
) -> Step:
    """Rows 2^16 apart, with blocks of nothing and of almost nothing."""
    latent, width, tail = sizes
    generator = torch.Generator().manual_seed(13)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size = torch.exp2(8.0 * (torch.arange(rows) % 3) - 8)[:, None]
    low = draw(splits, rows, latent + width) * size
    low[:, 0, latent : latent + 64] = 0.0
    low[:, -1, :100] *= 1e-7
    angle = torch.rand(rows, tail // 2, generator=generator) * 6
    return Step(
        low=low.to(device),
        heads=(draw(splits, rows, heads * width) * size).to(device),
        latent_norm=(draw(latent) + 1).to(device),
        kv_norm=(draw(width) + 1).to(device),
        cos=angle.cos().repeat_interleave(2, -1).to(device),
        sin=torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2).to(device),
        slots=((torch.arange(rows) * 5 + 3) % RING).to(torch.int32).to(device),
    )


def empty_ring(step: Step, *, records: bool = True) -> Tensor:
    """NaN everywhere."""
    width, tail, device = step.kv_norm.shape[0], step.cos.shape[1], step.low.device
    if records:
        return torch.full((RING, record_bytes(width, tail)), 0xFF, dtype=torch.uint8, device=device)
    return torch.full((RING, width), torch.nan, dtype=torch.bfloat16, device=device)


def all_rows(step: Step, ring: Tensor) -> Tensor:
    """[C, hd] bfloat16."""
    return ring if ring.dtype == torch.bfloat16 else unpack_records(ring, step.kv_norm.shape[0], step.cos.shape[1])


def rows_of(step: Step, ring: Tensor) -> Tensor:
    """[T, hd] bfloat16, those that were written."""
    return all_rows(step, ring)[step.slots.long()]


def run(step: Step, *, act_fp8: bool = True, kv_fp8: bool = True) -> list[Tensor]:
    """The latent rows, the written rows and the heads; holds the kernels to what they may write."""
    rows, device, width = step.low.shape[1], step.low.device, step.kv_norm.shape[0]
    ring = empty_ring(step, records=kv_fp8)
    make = kernel.norm_rope_rows if rows <= 8 else kernel.norm_rope_chunk
    latent = make(
        step.low,
        step.latent_norm,
        step.kv_norm,
        step.cos,
        step.sin,
        step.slots,
        ring,
        eps=EPS,
        act_fp8=act_fp8,
        kv_fp8=kv_fp8,
    )
    written = rows_of(step, ring)
    assert int(all_rows(step, ring).isnan().sum()) == (RING - rows) * width and not written.isnan().any()
    count = step.heads.shape[2] // width
    room = torch.full((rows + 1, count, width), torch.nan, dtype=torch.bfloat16, device=device)
    kernel.norm_rope_heads(step.heads, step.cos, step.sin, heads=count, eps=EPS, out=room[:-1])
    assert room[-1].isnan().all() and not room[:-1].isnan().any()
    return [values(latent), written, room[:-1]]


def values(out: RoundedRows | ChunkRows) -> Tensor:
    if isinstance(out, ChunkRows):
        # place 16i + 8h + 2t + e of 32 holds column 8t + 4i + 2h + e
        places = out.values.double().unflatten(-1, (-1, 2, 2, 4, 2)).permute(0, 1, 4, 2, 3, 5)
        return places.flatten(1) * out.scales[:, None]
    rows = out.codes.shape[0]
    return out.codes.double() * out.scales[:, :rows].t().double().repeat_interleave(128, 1)


def summed(parts: Tensor) -> Tensor:
    """bfloat16 values of the sum, float64."""
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out.bfloat16().double()


def require_bf16(found: Tensor, exact: Tensor, step: float = BF16_STEP) -> None:
    """Nearly all as the rounded twin; the rest beside a boundary of a rounding before: two steps, and one of the last.

    Of a rotated pair the length counts; a row's smallest values are steps of its blocks' largest.
    """
    pair = exact.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    error, size = (found.double() - exact).abs(), pair.clamp_min(1e-3 * exact.abs().amax(-1, keepdim=True))
    assert bool((error <= 3 * step * size).all())
    assert float((error > step * size).double().mean()) < 0.01


def require_twin(step: Step, found: list[Tensor], *, act_fp8: bool, kv_fp8: bool) -> None:
    latent, width, tail = step.latent_norm.shape[0], step.kv_norm.shape[0], step.cos.shape[1]
    low, cos, sin = summed(step.low), step.cos.double(), step.sin.double()
    exact = rms_norm(low[:, :latent], step.latent_norm.double(), EPS)
    require_bf16(found[0], exact, 2.0**-4 if act_fp8 else BF16_STEP)
    exact = rotate_tail(rms_norm(low[:, latent:], step.kv_norm.double(), EPS).bfloat16().double(), cos, sin)
    require_bf16(found[1][:, width - tail :], exact[:, width - tail :])
    plain = exact[:, : width - tail].bfloat16().float()
    rounded = round_fp8(plain.cpu(), 64).to(plain.device) if kv_fp8 else plain
    assert float((found[1][:, : width - tail].float() != rounded).float().mean()) < 0.01
    require_bf16(found[1][:, : width - tail], plain.double(), 2.0**-4 if kv_fp8 else BF16_STEP)
    heads = summed(step.heads).unflatten(-1, (-1, width))
    exact = norm_rope_heads(heads, torch.ones_like(cos), torch.zeros_like(sin), eps=EPS).bfloat16().double()
    require_bf16(found[2], rotate_tail(exact, cos[:, None], sin[:, None]))


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "splits"), [(1, 4), (3, 1)])
@pytest.mark.parametrize("rounds", [True, False])
def test_the_kernels_match_the_twin(rows: int, splits: int, rounds: bool, place: torch.device) -> None:
    step = draw_step(rows, splits, place)
    require_twin(step, run(step, act_fp8=rounds, kv_fp8=rounds), act_fp8=rounds, kv_fp8=rounds)


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [3, 10])
def test_records_hold_the_bfloat16_row_rounded(rows: int, place: torch.device) -> None:
    step = draw_step(rows, 2, place)
    _, exact, _ = run(step, kv_fp8=False)
    _, rounded, _ = run(step)
    records = pack_records(exact.cpu().float(), TAIL)
    assert torch.equal(rounded.cpu(), unpack_records(records, WIDTH, TAIL))


def unequal_rows(step: Step, batches: list[list[int]]) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    found = 0
    for batch in batches:
        together = run(step.rows(batch))
        for place, row in enumerate(batch):
            alone = run(step.rows([row]))
            assert all(bool((part != 0).any()) for part in alone)
            found += any(not torch.equal(part[place], one[0]) for part, one in zip(together, alone, strict=True))
    return found


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    assert unequal_rows(draw_step(4, 2, place), [[0, 1, 2, 3], [3, 1]]) == 0
    assert unequal_rows(draw_step(10, 2, place), [list(range(10))]) == 0


@pytest.mark.kernels
def test_the_parts_are_added_from_left_to_right(place: torch.device) -> None:
    step = draw_step(2, 3, place)
    added = (step.heads[0] + step.heads[1]) + step.heads[2]
    step = replace(step, low=torch.stack((step.low[0], step.low[1], step.low[2] * 3)))
    one = replace(step, low=((step.low[0] + step.low[1]) + step.low[2])[None], heads=added[None])
    assert all(torch.equal(a, b) for a, b in zip(run(step), run(one), strict=True))


@pytest.mark.kernels
def test_the_kernels_refuse_by_name(place: torch.device) -> None:
    step = draw_step(2, 2, place)
    ring = empty_ring(step)
    cases: list[tuple[Step, Tensor, str]] = [
        (replace(step, low=step.low[0]), ring, r"product must be \[S, T, N\]"),
        (replace(step, low=torch.zeros(1, 9, 384, device=place)), ring, "product must have 1 to 8 rows; got 9"),
        (replace(step, low=step.low.bfloat16()), ring, "product must be torch.float32"),
        (replace(step, low=step.low[..., :256].contiguous()), ring, "product must have shape"),
        (
            replace(step, latent_norm=step.latent_norm[:200].clone()),
            ring,
            "latent_norm must be a power of two from 128",
        ),
        (replace(step, kv_norm=step.kv_norm.double()), ring, "kv_norm must be torch.float32"),
        (replace(step, cos=step.cos[:, :32].clone(), sin=step.sin[:, :32].clone()), ring, "hd - rd must be a multiple"),
        (replace(step, sin=step.sin[:, :32].clone()), ring, "sin must have shape"),
        (replace(step, slots=step.slots.long()), ring, "slots must be torch.int32"),
        (step, ring.float(), "ring must be torch.uint8"),
        (step, empty_ring(step, records=False), "ring must have shape"),
        (step, ring.t().contiguous().t(), "ring must be contiguous"),
    ]
    for bad, target, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.norm_rope_rows(
                bad.low, bad.latent_norm, bad.kv_norm, bad.cos, bad.sin, bad.slots, target, eps=EPS, act_fp8=True,
                kv_fp8=True,
            )  # fmt: skip
    with pytest.raises(ValueError, match=r"ring must have shape \(16, 128\)"):
        kernel.norm_rope_rows(
            step.low, step.latent_norm, step.kv_norm, step.cos, step.sin, step.slots, ring, eps=EPS, act_fp8=True,
            kv_fp8=False,
        )  # fmt: skip
    many = torch.zeros(1, 4097, 384, device=place)
    given = (step.latent_norm, step.kv_norm, step.cos, step.sin, step.slots, ring)
    with pytest.raises(ValueError, match="product must have 1 to 4096 rows; got 4097"):
        kernel.norm_rope_chunk(many, *given, eps=EPS, act_fp8=True, kv_fp8=True)
    with pytest.raises(ValueError, match="values must have shape"):
        room = ChunkRows.empty(3, LATENT, place)
        kernel.norm_rope_chunk(step.low, *given, eps=EPS, act_fp8=True, kv_fp8=True, out=room)
    for heads, named in ((5, "product must have whole heads"), (6, "hd must be a power of two from 128 on; got 64")):
        with pytest.raises(ValueError, match=named):
            kernel.norm_rope_heads(step.heads, step.cos, step.sin, heads=heads, eps=EPS)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16"):
        out = torch.zeros(2, 3, WIDTH, device=place)
        kernel.norm_rope_heads(step.heads, step.cos, step.sin, heads=3, eps=EPS, out=out)


@pytest.mark.gpu
def test_m28_the_models_rows_are_close_and_row_invariant() -> None:
    step = draw_step(8, 8, torch.device("cuda"), (1024, 512, 64), heads=32)
    require_twin(step, run(step), act_fp8=True, kv_fp8=True)
    assert unequal_rows(step, [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6]]) == 0
    assert unequal_rows(draw_step(16, 1, torch.device("cuda"), (1024, 512, 64), heads=32), [list(range(16))]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_rows_follow_their_inputs(rows: int) -> None:
    device = torch.device("cuda")
    step = draw_step(rows, 8, device, (1024, 512, 64), heads=32)
    ring = empty_ring(step)
    latent, heads = (
        RoundedRows.empty(rows, 1024, device),
        torch.empty(rows, 32, 512, dtype=torch.bfloat16, device=device),
    )

    def chain() -> None:
        for _ in range(3):
            kernel.norm_rope_rows(
                step.low, step.latent_norm, step.kv_norm, step.cos, step.sin, step.slots, ring, eps=EPS, act_fp8=True,
                kv_fp8=True, out=latent, dependent=True,
            )  # fmt: skip
            kernel.norm_rope_heads(step.heads, step.cos, step.sin, heads=32, eps=EPS, out=heads, dependent=True)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for turn in range(3):
        step.low.mul_(-1.5)
        step.heads.copy_(step.heads.roll(turn + 1, 2))
        step.slots.copy_((step.slots + 1) % RING)
        expected = run(step)
        ring.zero_()
        heads.zero_()
        graph.replay()
        found = [values(latent), rows_of(step, ring), heads]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
