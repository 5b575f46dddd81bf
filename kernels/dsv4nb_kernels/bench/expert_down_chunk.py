"""The experts' lower halves on a chunk of V4-Flash: as one GPU of a pair holds them, and whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import _chunk_lanes, expert_down_chunk
from dsv4nb_kernels._chunk_plan import plan_chunk, row_peaks
from dsv4nb_kernels._chunk_rows import column_order
from dsv4nb_kernels._expert_weights import DownWeights
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.bench.expert_up import CHOICES, EXPERTS, HIDDEN, INNER, e4m3_values, routed_words, shared_matrices
from dsv4nb_kernels.bench.expert_up_chunk import CHECKED, ROWS, UNROUNDED, Dequantised, grouped_mm, routes
from dsv4nb_kernels.expert_down_chunk import Tuning
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_down_chunk import expert_down_chunk as twin

OP = "expert_down_chunk"
CUTS = (Tuning(rows=2), Tuning(rows=1))


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut and another, and the peer."""
    return [arm for size in INNER for rows in ROWS for arm in _arms(device, size, rows)]


def _arms(device: torch.device, size: str, rows: int) -> Iterator[Arm]:
    inner = INNER[size]
    flop = 2.0 * rows * inner * HIDDEN  # per row, an expert's lower half
    for cut in CUTS:
        yield Arm(
            op=OP,
            shape=size,
            rows=rows,
            name=str(cut),
            bytes_read=EXPERTS * HIDDEN * inner * 17 // 32 + HIDDEN * inner,
            flop=flop * (CHOICES + 1),
            make=partial(_make, device, inner, rows, cut),
            compile=partial(_compile, inner, cut),
            check=partial(_check, device, inner, cut),
            is_product=cut == expert_down_chunk.TUNING,
            copies=1,
        )
    if size == "half":
        yield Arm(
            op=OP,
            shape=size,
            rows=rows,
            name="torch._grouped_mm, bfloat16, without the shared expert and the sum",
            bytes_read=EXPERTS * HIDDEN * inner * 2,
            flop=flop * CHOICES,
            make=partial(grouped_mm, device, rows, HIDDEN, inner),
            is_peer=True,
            copies=1,
        )


def _compile(inner: int, cut: Tuning) -> None:
    for routed in (False, True):
        expert_down_chunk._expert_down_chunk_lanes_kernel.warmup(
            torch.int32, torch.uint8, torch.float32, torch.float16, torch.int32, torch.int32, torch.int32,
            torch.float32, 1, torch.int32, 1, EXPERTS, grid=(1,),
            **expert_down_chunk.constants(HIDDEN, inner, CHOICES),
            **expert_down_chunk.lane_constants(cut, routed, EXPERTS), num_warps=_chunk_lanes.WARPS,
        )  # fmt: skip


@functools.cache
def _weights(device: torch.device, inner: int) -> tuple[DownWeights, Tensor]:
    routed = routed_words(device, HIDDEN, inner)
    return DownWeights(routed=routed, shared=shared_matrices(device, HIDDEN, inner, 1)[0]), row_peaks(routed)


def _lines(device: torch.device, rows: int, inner: int) -> Tensor:
    """Rounded lines as the upper halves leave them; the order of their columns is nobody's business here."""
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows * (CHOICES + 1), inner, device=device, generator=generator)
    return (round_fp8(x, 128) * 128).half()


def _make(device: torch.device, inner: int, rows: int, cut: Tuning, count: int) -> Launch:
    down, peaks = _weights(device, inner)
    lines, plan = _lines(device, rows, inner), plan_chunk(routes(device, rows), EXPERTS)
    parts = torch.empty(rows * (CHOICES + 1), HIDDEN, device=device)
    out = torch.empty(rows, HIDDEN, device=device)
    return lambda i: expert_down_chunk.launch(lines, plan, down, peaks, cut, rows=rows, parts=parts, out=out)


def _check(device: torch.device, inner: int, cut: Tuning) -> None:
    down, peaks = _weights(device, inner)
    named = routes(device, CHECKED)
    lines, plan = _lines(device, CHECKED, inner), plan_chunk(named, EXPERTS)
    out = expert_down_chunk.launch(lines, plan, down, peaks, cut, rows=CHECKED)
    ordered = lines[:, column_order(inner).argsort().to(device)].double() / 128
    routed = ordered[plan.places.long()].unflatten(0, (CHECKED, CHOICES))
    values = torch.cat((routed, ordered[-CHECKED:, None]), dim=1)
    matrices = Dequantised(down.routed, e4m3_values(down.shared), torch.arange(HIDDEN, device=device))
    require_close(out, twin(values, named.long(), matrices, act_fp8=False), UNROUNDED)
