"""Attention of a chunk of V4-Flash's prompt: each kind of layer, at its begin and far into a context."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import _chunk_attention_lanes, chunk_attention
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.chunk_attention import Entries, Tuning, Window
from dsv4nb_kernels.reference._rotary import rotate_tail
from dsv4nb_kernels.reference.chunk_attention import chunk_attention as twin

OP = "chunk_attention"
WIDTH, TAIL, SEEN, CHOSEN = 512, 64, 128, 512
ROWS = 2048
RATIOS = {"window": 0, "4": 4, "128": 128}
POSITIONS = {"0": 0, "8K": 8192, "64K": 65536}
HEADS = {"half": 32, "whole": 64}
SWEPT = ("half, 4 at 64K", "half, 128 at 64K", "half, window at 64K", "whole, 4 at 64K", "whole, 128 at 64K")
# of the plain form
CUTS = [
    chunk_attention.PLAIN,
    *(
        Tuning(keys=64, part=part, heads=heads, warps=warps, stages=stages)
        for part, heads, warps, stages in (
            (128, 32, 4, 2), (256, 32, 4, 2), (512, 32, 4, 2), (128, 16, 4, 2), (128, 32, 8, 2), (128, 32, 4, 1),
            (128, 64, 8, 2), (256, 64, 8, 2),
        )
    ),
]  # fmt: skip
PRODUCT = f"{chunk_attention.LANES}, for Hopper"
LIMIT = 2e-3
SCALE = WIDTH**-0.5
CHECKED = 64  # rows


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every problem, and other cuts on three of them."""
    return [
        arm
        for name, heads in HEADS.items()
        for kind, ratio in RATIOS.items()
        for place, position in POSITIONS.items()
        for arm in _own(device, f"{name}, {kind} at {place}", heads, ratio, position)
    ]


def keys_of(ratio: int, position: int, rows: int = ROWS) -> int:
    """Return how many keys the rows of a chunk attend to, all together."""
    positions = torch.arange(position, position + rows)
    seen = (positions + 1).clamp_max(SEEN)
    entries = (positions + 1) // ratio if ratio else torch.zeros_like(positions)
    return int((seen + (entries.clamp_max(CHOSEN) if ratio == 4 else entries)).sum())


def _own(device: torch.device, shape: str, heads: int, ratio: int, position: int) -> Iterator[Arm]:
    def arm(cut: Tuning | None) -> Arm:
        return Arm(
            op=OP,
            shape=shape,
            rows=ROWS,
            name=PRODUCT if cut is None else str(cut),
            bytes_read=keys_of(ratio, position) * WIDTH * 2,
            make=partial(_make, device, heads, ratio, position, cut),
            compile=partial(_compile, heads, ratio, cut),
            check=partial(_check, device, heads, ratio, position, cut),
            is_product=cut is None,
            copies=1,
        )

    yield arm(None)
    if shape in SWEPT:
        yield from (arm(cut) for cut in CUTS if heads % cut.heads == 0 and (cut.stages > 1 or ratio == 4))


def _compile(heads: int, ratio: int, cut: Tuning | None) -> None:
    bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
    types = (bf16, bf16, bf16, i32, i32, f32, f32, f32, bf16, 16, 16, SCALE)
    shape = (SEEN, ratio, ratio == 4, heads, WIDTH, TAIL)
    if cut is None:
        _chunk_attention_lanes.chunk_attention_lanes_kernel.warmup(
            *types, grid=(1,), num_warps=chunk_attention.LANES.warps, **chunk_attention.lane_constants(*shape)
        )
    else:
        chunk_attention._chunk_attention_kernel.warmup(
            *types, grid=(1,), num_warps=cut.warps, **chunk_attention.constants(cut, *shape)
        )


@functools.cache
def _cache(device: torch.device, count: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(count, WIDTH, generator=generator, device=device, dtype=torch.bfloat16)


def draw(
    device: torch.device, heads: int, ratio: int, position: int, rows: int
) -> tuple[Tensor, Window, Entries | None]:
    """Queries, window and entries of a chunk; chosen ones at random among what each row sees."""
    generator = torch.Generator(device).manual_seed(position)
    query = torch.randn(rows, heads, WIDTH, generator=generator, device=device).bfloat16()
    window = Window(ring=_cache(device, rows + SEEN), width=SEEN)
    if ratio == 0:
        return query, window, None
    count = max((position + rows) // ratio, CHOSEN)
    if ratio != 4:
        return query, window, Entries(cache=_cache(device, count), ratio=ratio)
    places = torch.empty(rows, CHOSEN, dtype=torch.int32, device=device)
    visible = (torch.arange(position, position + rows, device=device) + 1) // ratio
    for first in range(0, rows, 256):
        seen = visible[first : first + 256, None]
        order = torch.rand(seen.shape[0], count, generator=generator, device=device)
        chosen = (order + (torch.arange(count, device=device) >= seen)).argsort(1)[:, :CHOSEN]
        chosen = chosen.masked_fill(chosen >= seen, count).sort(1).values
        places[first : first + 256] = chosen.masked_fill(chosen == count, -1)
    return query, window, Entries(cache=_cache(device, count), ratio=ratio, places=places)


def turns(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """Angles of the rows: cosines and sines."""
    angle = torch.rand(rows, TAIL // 2, generator=torch.Generator(device).manual_seed(1), device=device) * 6
    return angle.cos().repeat_interleave(2, -1), torch.stack((angle.sin(), -angle.sin()), -1).flatten(-2)


def _make(device: torch.device, heads: int, ratio: int, position: int, cut: Tuning | None, count: int) -> Launch:
    query, window, entries = draw(device, heads, ratio, position, ROWS)
    first = torch.tensor([position], dtype=torch.int32, device=device)
    sink, out = torch.zeros(heads, device=device), torch.empty_like(query)
    rest = sink, *turns(device, ROWS), cut or chunk_attention.LANES
    return lambda i: chunk_attention.launch(
        query, first, window, entries, *rest, scale=SCALE, out=out, lanes=cut is None
    )


def _check(device: torch.device, heads: int, ratio: int, position: int, cut: Tuning | None) -> None:
    query, window, entries = draw(device, heads, ratio, position, CHECKED)
    first = torch.tensor([position], dtype=torch.int32, device=device)
    sink, (cos, sin) = torch.linspace(-5, 5, heads, device=device), turns(device, CHECKED)
    form = cut or chunk_attention.LANES
    out = chunk_attention.launch(query, first, window, entries, sink, cos, sin, form, scale=SCALE, lanes=cut is None)
    exact = twin(
        query.double(), position, window.ring.double(), SEEN, None if entries is None else entries.cache.double(),
        ratio, None if entries is None or entries.places is None else entries.places.long(), sink.double(), scale=SCALE,
    )  # fmt: skip
    require_close(out.flatten(1), rotate_tail(exact, cos[:, None], sin[:, None]).flatten(1), LIMIT)
