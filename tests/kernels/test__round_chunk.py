"""A chunk's rows between two products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels._chunk_rows import ChunkRows
from dsv4nb_kernels._round_chunk import round_chunk
from dsv4nb_kernels.reference._fp8 import round_fp8

pytestmark = pytest.mark.kernels


def draw(splits: int, rows: int, width: int, device: torch.device) -> Tensor:
    """Rows 2^8 apart, and blocks within 2^8 of each other."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.exp2(torch.arange(rows) % 3 * 8.0 - 8)[:, None, None]
    blocks = torch.exp2(torch.randint(-8, 1, (rows, width // 128, 1), generator=generator).float())
    x = torch.randn(splits, rows, width // 128, 128, generator=generator) * sizes * blocks
    return x.flatten(2).to(device)


def values(rows: ChunkRows) -> Tensor:
    """[T, W] float64; place 16i + 8h + 2t + e of 32 holds column 8t + 4i + 2h + e."""
    places = rows.values.double().unflatten(-1, (-1, 2, 2, 4, 2)).permute(0, 1, 4, 2, 3, 5)
    return places.flatten(1) * rows.scales[:, None].double()


@pytest.mark.parametrize(("splits", "rows", "width"), [(1, 1, 128), (3, 9, 384), (2, 3, 1024)])
@pytest.mark.parametrize("act_fp8", [True, False])
def test_the_values_are_those_of_the_twin(
    splits: int, rows: int, width: int, act_fp8: bool, place: torch.device
) -> None:
    x = draw(splits, rows, width, place)
    added = x[0]
    for part in x[1:]:
        added = added + part
    rounded = added.bfloat16()
    exact = round_fp8(rounded.float().cpu(), 128).double() if act_fp8 else rounded.cpu().double()
    assert torch.equal(values(round_chunk(x, act_fp8=act_fp8)).cpu(), exact)
    assert torch.equal(values(round_chunk(rounded, act_fp8=act_fp8)).cpu(), exact)


def test_writes_every_element_and_nothing_else(place: torch.device) -> None:
    x = draw(1, 3, 384, place)
    room = ChunkRows.empty(5, 384, place)
    room.values.fill_(torch.nan)
    room.scales.fill_(torch.nan)
    inner = ChunkRows(values=room.values[1:4], scales=torch.full((3,), torch.nan, device=place))
    round_chunk(x, act_fp8=True, out=inner)
    assert not inner.values.isnan().any() and not inner.scales.isnan().any()
    assert room.values[0].isnan().all() and room.values[4].isnan().all()


def test_refuses_by_name(place: torch.device) -> None:
    x = draw(1, 2, 256, place)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: round_chunk(x[0, 0], act_fp8=True), r"x must be \[S, T, W\] or \[T, W\]"),
        (lambda: round_chunk(x.double(), act_fp8=True), r"x must be torch\.float32"),
        (lambda: round_chunk(x[0], act_fp8=True), r"x must be torch\.bfloat16"),
        (lambda: round_chunk(x[..., :128], act_fp8=True), "x must be contiguous"),
        (lambda: round_chunk(x[..., :64].contiguous(), act_fp8=True), "x must have a multiple of 128 columns"),
        (lambda: round_chunk(torch.zeros(1, 4097, 128, device=place), act_fp8=True), "x must have 1 to 4096 rows"),
        (lambda: round_chunk(x, act_fp8=True, out=ChunkRows.empty(3, 256, place)), "values must have shape"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "act_fp8"), [(4096, True), (16384, False), (32768, False)])
def test_captured_rows_follow_their_inputs(width: int, act_fp8: bool) -> None:
    device = torch.device("cuda")
    x = draw(1, 150, width, device)
    x = x if act_fp8 else x[0].bfloat16()
    outs = [ChunkRows.empty(150, width, device) for _ in range(3)]

    def chain(dependent: bool) -> None:
        for out in outs:
            round_chunk(x, act_fp8=act_fp8, out=out, dependent=dependent)

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(3):
        x.mul_(-1.5)
        chain(False)
        expected = values(outs[0])
        assert torch.equal(values(round_chunk(x[..., :1, :].contiguous(), act_fp8=act_fp8)), expected[:1])
        for out in outs:
            out.values.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(values(out), expected) for out in outs)
