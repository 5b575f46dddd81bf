"""The experts' upper halves on a chunk of V4-Flash: as one GPU of a pair holds them, and whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import _chunk_lanes, expert_up_chunk
from dsv4nb_kernels._chunk_plan import Plan, plan_chunk, row_peaks
from dsv4nb_kernels._chunk_rows import ChunkRows, column_order
from dsv4nb_kernels._expert_weights import UpWeights
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close
from dsv4nb_kernels.bench.expert_up import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    INNER,
    LIMIT,
    bytes_read,
    e2m1_values,
    routed_words,
    shared_matrices,
)
from dsv4nb_kernels.bench.fp8_chunk import chunk_rows, row_values
from dsv4nb_kernels.fp8_rows import unpack
from dsv4nb_kernels.reference.expert_up_chunk import expert_up_chunk as twin

OP = "expert_up_chunk"
ROWS = (2048, 4096)
UNROUNDED = 1e-6
CHECKED = 192  # rows


def arms(device: torch.device) -> list[Arm]:
    """Return the product with and without the plan that it needs, and the peer."""
    return [arm for size in INNER for rows in ROWS for arm in _arms(device, size, rows)]


def _arms(device: torch.device, size: str, rows: int) -> Iterator[Arm]:
    inner = INNER[size]
    # per row, an expert's upper half
    flop = 2.0 * rows * 2 * inner * HIDDEN
    for plans in (False, True):
        yield Arm(
            op=OP,
            shape=size,
            rows=rows,
            name="256 x 64, and the plan" if plans else "256 x 64",
            bytes_read=bytes_read(inner, EXPERTS),
            flop=flop * (CHOICES + 1),
            make=partial(_make, device, inner, rows, plans),
            compile=partial(_compile, inner),
            check=partial(_check, device, inner),
            is_product=not plans,
            copies=1,
        )
    if size == "half":
        yield Arm(
            op=OP,
            shape=size,
            rows=rows,
            name="torch._grouped_mm, bfloat16, without the shared expert",
            bytes_read=EXPERTS * 2 * inner * HIDDEN * 2,
            flop=flop * CHOICES,
            make=partial(grouped_mm, device, rows, 2 * inner, HIDDEN),
            is_peer=True,
            copies=1,
        )


def _compile(inner: int) -> None:
    for routed in (False, True):
        expert_up_chunk._expert_up_chunk_lanes_kernel.warmup(
            torch.int32, torch.uint8, torch.float32, torch.float16, torch.float32, torch.float32, torch.int32,
            torch.int32, torch.int32, torch.int32, torch.float16, 1, LIMIT, grid=(1,),
            **expert_up_chunk.constants(HIDDEN, inner, CHOICES), ROUTED=routed, num_warps=_chunk_lanes.WARPS,
        )  # fmt: skip


@functools.cache
def routes(device: torch.device, rows: int) -> Tensor:
    """Return [T, K] int32 choices of rows that choose independently."""
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.rand(rows, EXPERTS, generator=generator).argsort(1)[:, :CHOICES]
    return drawn.to(device, torch.int32)


@functools.cache
def _chunk(device: torch.device, rows: int) -> tuple[ChunkRows, Tensor, Plan]:
    generator = torch.Generator(device).manual_seed(rows)
    shares = torch.rand(rows, CHOICES, device=device, generator=generator) + 0.1
    return chunk_rows(device, rows, HIDDEN), shares, plan_chunk(routes(device, rows), EXPERTS)


@functools.cache
def up_weights(device: torch.device, inner: int) -> tuple[UpWeights, Tensor]:
    """Return 256 experts and the shared one, and their peaks."""
    routed = routed_words(device, 2 * inner, HIDDEN)
    return UpWeights(routed=routed, shared=shared_matrices(device, 2 * inner, HIDDEN, 1)[0]), row_peaks(routed)


def _make(device: torch.device, inner: int, rows: int, plans: bool, count: int) -> Launch:
    up, peaks = up_weights(device, inner)
    x, shares, plan = _chunk(device, rows)
    out = torch.empty(rows * (CHOICES + 1), inner, dtype=torch.float16, device=device)

    def launch(i: int) -> Tensor:
        if plans:
            plan_chunk(routes(device, rows), EXPERTS, out=plan)
        return expert_up_chunk.launch(x, plan, shares, up, peaks, limit=LIMIT, out=out)

    return launch


class Dequantised:
    """float64 matrices by expert, made when they are asked for; the last is the shared one."""

    def __init__(self, routed: Tensor, shared: Tensor, order: Tensor) -> None:
        self.routed, self.shared, self.order = routed, shared, order

    def __getitem__(self, expert: int, /) -> Tensor:
        return self.shared if expert == -1 else e2m1_values(self.routed[expert])[self.order]


def _check(device: torch.device, inner: int) -> None:
    up, peaks = up_weights(device, inner)
    x, shares, plan = _chunk(device, CHECKED)
    out = expert_up_chunk.launch(x, plan, shares, up, peaks, limit=LIMIT, rounds=False)
    # tiles of sixteen rows: eight of the gate, eight of the other
    halves = torch.arange(2 * inner, device=device).view(-1, 2, 8).transpose(0, 1).reshape(-1)
    scales = up.shared.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)  # the gate's, then the up's
    matrices = Dequantised(up.routed, unpack(up.shared)[0].double()[halves] * scales, halves)
    named = routes(device, CHECKED).long()
    exact = twin(row_values(x), named, shares.double(), matrices, limit=LIMIT, act_fp8=False)
    columns = column_order(inner).argsort().to(device)
    routed = out[plan.places.long()].unflatten(0, (CHECKED, CHOICES))
    found = torch.cat((routed, out[-CHECKED:, None]), dim=1)[:, :, columns]
    require_close(found.flatten(0, 1), exact.flatten(0, 1), UNROUNDED)


def grouped_mm(device: torch.device, rows: int, n: int, k: int, count: int) -> Launch:
    """Return cuBLAS's or CUTLASS's product of sorted rows with the same experts in bfloat16: four times the bytes."""
    weights = random_words(device, EXPERTS * n * k // 2, ~0x40004000).view(torch.bfloat16).view(EXPERTS, n, k)
    x = torch.randn(rows * CHOICES, k, device=device).bfloat16()
    ends = plan_chunk(routes(device, rows), EXPERTS).ends

    def launch(i: int) -> Tensor:
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)

    return launch
