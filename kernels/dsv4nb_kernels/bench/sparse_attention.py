"""Attention of V4-Flash: window and picked entries, all heads and those of one GPU of a pair."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import sparse_attention
from dsv4nb_kernels._kv_records import record_bytes
from dsv4nb_kernels._launch import runs_ptx
from dsv4nb_kernels._rounded_rows import RoundedRows
from dsv4nb_kernels.bench._driver import ROTATED_BYTES, Arm, Launch, require_close
from dsv4nb_kernels.bench._records import random_records
from dsv4nb_kernels.reference._records import unpack_records
from dsv4nb_kernels.reference._rotary import rotate_tail
from dsv4nb_kernels.reference.sparse_attention import sparse_attention as twin
from dsv4nb_kernels.sparse_attention import Keys, Partials, Tuning

OP = "sparse_attention"
WIDTH, TAIL = 512, 64
# heads, keys of the window, picked entries
SHAPES = {"half": (32, 128, 512), "whole": (64, 128, 512), "half, window": (32, 128, 0)}
ROWS = (1, 2, 4, 6)
SWEPT_ROWS = (1, 6)
CUTS = [
    Tuning(keys=keys, heads=heads, warps=warps, eager=eager)
    for keys, heads, warps in (
        (32, 16, (4, 4)), (32, 16, (4, 2)), (32, 16, (4, 8)), (32, 16, (2, 4)), (32, 16, (8, 4)), (16, 16, (4, 4)),
        (64, 16, (8, 4)), (64, 16, (4, 4)), (64, 32, (8, 4)),
    )
    for eager in (False, True)
]  # fmt: skip
LIMIT = 2e-3
SCALE = WIDTH**-0.5


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape and T, and the other cuts at T = 1 and 6."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    product = sparse_attention.TUNING

    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=rows * sum(SHAPES[shape][1:]) * record_bytes(WIDTH, TAIL),
            make=partial(_make, device, shape, rows, cut, dependent),
            compile=partial(_compile, shape, cut, dependent),
            check=partial(_check, device, shape, rows, cut),
            is_product=cut == product and dependent,
        )

    yield arm(product)
    if rows in SWEPT_ROWS and shape == "half":
        yield from (arm(cut) for cut in CUTS if cut != product)
        yield arm(product, dependent=False)


def _compile(shape: str, cut: Tuning, dependent: bool) -> None:
    heads, window, entries = SHAPES[shape]
    splits = window // cut.keys, entries // cut.keys
    f32, u8, i32 = torch.float32, torch.uint8, torch.int32
    sparse_attention._attend_kernel.warmup(
        torch.bfloat16, u8, i32, u8, i32, f32, f32, f32, SCALE, grid=(1,), num_warps=cut.warps[0],
        launch_pdl=dependent,
        **sparse_attention.attend_constants(cut, *splits, heads, WIDTH, TAIL, True, dependent),
    )  # fmt: skip
    sparse_attention._combine_kernel.warmup(
        f32, f32, f32, f32, f32, f32, torch.float16, f32, grid=(1,), num_warps=cut.warps[1],
        launch_pdl=dependent, **sparse_attention.combine_constants(cut, sum(splits), heads, WIDTH, TAIL, dependent),
    )  # fmt: skip


@functools.cache
def _cache(device: torch.device) -> Tensor:
    return random_records(2 * ROTATED_BYTES // record_bytes(WIDTH, TAIL), WIDTH, TAIL, device)


def _places(device: torch.device, rows: int, count: int, first: int) -> Tensor:
    """Places of the rows of one step, all different, in a part of the cache that other copies do not read."""
    if count == 0:
        return torch.empty(rows, 0, dtype=torch.int32, device=device)
    order = torch.randperm(rows * count, device=device).view(rows, count)
    return (order + first).to(torch.int32).sort(1).values.contiguous()


def _steps(
    device: torch.device, shape: str, rows: int, count: int
) -> tuple[Tensor, list[tuple[Keys, Keys | None]], tuple[Tensor, Tensor, Tensor]]:
    heads, window, entries = SHAPES[shape]
    cache = _cache(device)
    generator = torch.Generator(device).manual_seed(rows)
    query = torch.randn(rows, heads, WIDTH, generator=generator, device=device).bfloat16()
    size = rows * (window + entries)
    lists = []
    for i in range(count):
        first = i * size % (cache.shape[0] - size)
        seen = Keys(cache=cache, places=_places(device, rows, window, first))
        picked = Keys(cache=cache, places=_places(device, rows, entries, first + rows * window)) if entries else None
        lists.append((seen, picked))
    angle = torch.rand(rows, TAIL // 2, generator=generator, device=device) * 6
    cos = angle.cos().repeat_interleave(2, -1)
    sin = torch.stack((angle.sin(), -angle.sin()), -1).flatten(-2)
    return query, lists, (torch.zeros(heads, device=device), cos, sin)


def _make(device: torch.device, shape: str, rows: int, cut: Tuning, dependent: bool, count: int) -> Launch:
    heads, window, entries = SHAPES[shape]
    query, lists, rest = _steps(device, shape, rows, count)
    partials = Partials.empty(rows, (window + entries) // cut.keys, heads, WIDTH, device)
    out = RoundedRows.empty(rows, heads * WIDTH, device)

    def launch(i: int) -> RoundedRows:
        return sparse_attention.launch(
            query, *lists[i % count], *rest, cut, scale=SCALE, partials=partials, out=out, dependent=dependent
        )

    return launch


def _check(device: torch.device, shape: str, rows: int, cut: Tuning) -> None:
    assert runs_ptx(device)
    query, lists, (sink, cos, sin) = _steps(device, shape, rows, 1)
    out = sparse_attention.launch(query, *lists[0], sink, cos, sin, cut, scale=SCALE)
    splits = [
        (unpack_records(keys.cache[keys.places.long()], WIDTH, TAIL).double(), keys.places < 0)
        for keys in lists[0]
        if keys is not None
    ]
    exact = rotate_tail(twin(query.double(), splits, sink.double(), scale=SCALE), cos[:, None], sin[:, None])
    found = out.codes.double() * out.scales[:, :rows].t().double().repeat_interleave(128, 1)
    require_close(found, exact.flatten(1), LIMIT)
