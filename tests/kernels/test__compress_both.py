"""Both compressors of a layer at once: the bits of one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import _compress_both as kernel
from dsv4nb_kernels import compress
from dsv4nb_kernels.reference._records import pack_records

pytestmark = pytest.mark.kernels
EPS, RATIO, TAIL, SPLITS = 1e-6, 4, 64, 3


def draw(width: int, ring: int, rounding: compress.Rounding, device: torch.device) -> kernel.Cache:
    generator = torch.Generator().manual_seed(width)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    entries = numbers(8, width).bfloat16()
    return kernel.Cache(
        offset=numbers(RATIO, 4 * width),
        ring=numbers(ring, 4 * width),
        norm=numbers(width),
        entries=pack_records(entries.cpu().float(), TAIL).to(device) if rounding == "kv" else entries,
        rounding=rounding,
    )


def copied(cache: kernel.Cache) -> kernel.Cache:
    return replace(cache, ring=cache.ring.clone(), entries=cache.entries.clone())


def draw_step(rows: int, first: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A product that is wider than both, the position, and angles."""
    generator = torch.Generator().manual_seed(rows + first)
    product = torch.randn(SPLITS, rows, width, generator=generator).to(device)
    angle = torch.rand(rows, TAIL // 2, generator=generator).to(device) * 6
    cos, sin = angle.cos().repeat_interleave(2, 1), torch.stack((-angle.sin(), angle.sin()), -1).flatten(1)
    return product, torch.tensor([first], dtype=torch.int32, device=device), cos.contiguous(), sin.contiguous()


def require_alike(rows: int, first: int, widths: tuple[int, int], place: torch.device, rounded: bool) -> None:
    own = draw(widths[0], 16, "kv" if rounded else "none", place)
    keys = draw(widths[1], 20, "index" if rounded else "none", place)
    lines = 4 * widths[0], 4 * widths[1]
    product, position, cos, sin = draw_step(rows, first, sum(lines) + 64, place)
    wanted = [copied(own), copied(keys)]
    for each, part in zip(wanted, product[..., : sum(lines)].split(lines, -1), strict=True):
        compress.compress(
            part.contiguous(), each.offset, position, each.ring, each.norm, cos, sin, each.entries,
            eps=EPS, rounding=each.rounding,
        )  # fmt: skip
    kernel.compress_both(product, position, cos, sin, own, keys, eps=EPS)
    for found, each in zip((own, keys), wanted, strict=True):
        assert torch.equal(found.ring, each.ring) and torch.equal(found.entries, each.entries)


@pytest.mark.parametrize(("rows", "first"), [(1, 3), (1, 5), (6, 8)])
@pytest.mark.parametrize("rounded", [True, False])
def test_m28_rings_entries_and_keys_have_the_bits_of_one_after_the_other(
    rows: int, first: int, rounded: bool, place: torch.device
) -> None:
    require_alike(rows, first, (256, 128), place, rounded)


def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    own, keys = draw(256, 16, "kv", place), draw(128, 16, "index", place)
    product, position, cos, sin = draw_step(2, 3, 1600, place)
    cases: list[tuple[Tensor, kernel.Cache, str]] = [
        (product[0], keys, r"product must be \[S, T, N\]"),
        (product[..., :1024].contiguous(), keys, "product must be 1536 wide at least; got 1024"),
        (product.double(), keys, "product must be torch.float32"),
        (torch.zeros(1, 9, 1600, device=place), keys, "product must have 1 to 8 rows; got 9"),
        (product, replace(keys, ring=keys.ring[:8]), "ring must have at least 10 rows; got 8"),
        (
            product,
            replace(keys, offset=keys.offset.repeat(2, 1), ring=keys.ring.repeat(2, 1)),
            "windows that are alike",
        ),
    ]
    for given, other, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.compress_both(given, position, cos, sin, own, other, eps=EPS)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "first"), [(1, 7), (1, 9), (6, 1021), (8, 4)])
def test_m28_the_models_entries_and_keys_have_the_bits_of_one_after_the_other(rows: int, first: int) -> None:
    device = torch.device("cuda")
    own, keys = draw(512, 64, "kv", device), draw(128, 64, "index", device)
    own, keys = (replace(each, entries=each.entries.repeat(64, 1)) for each in (own, keys))
    product, position, cos, sin = draw_step(rows, first, 2624, device)
    wanted = [copied(own), copied(keys)]
    for each, part in zip(wanted, product[..., :2560].split((2048, 512), -1), strict=True):
        compress.compress(
            part.contiguous(), each.offset, position, each.ring, each.norm, cos, sin, each.entries,
            eps=EPS, rounding=each.rounding,
        )  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    kernel.compress_both(product, position, cos, sin, own, keys, eps=EPS, dependent=True)
    torch.cuda.synchronize()
    for each in (own, keys):
        each.entries.zero_()
    for each in wanted:
        each.entries[: first // RATIO] = 0
        each.entries[(first + rows) // RATIO :] = 0
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernel.compress_both(product, position, cos, sin, own, keys, eps=EPS, dependent=True)
    graph.replay()
    for found, each in zip((own, keys), wanted, strict=True):
        assert torch.equal(found.ring, each.ring) and torch.equal(found.entries, each.entries)
