"""The rows of a chunk times an FP8 matrix: the twin, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import fp8_chunk as kernel
from dsv4nb_kernels._chunk_rows import ChunkRows, column_order
from dsv4nb_kernels._e8m0 import scales_of
from dsv4nb_kernels._round_chunk import round_chunk
from dsv4nb_kernels.fp8_rows import Fp8Matrix, pack, unpack
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.fp8_chunk import fp8_chunk
from dsv4nb_kernels.reference.fp8_rows import fp8_rows

pytestmark = pytest.mark.kernels

UNROUNDED = 1e-6  # of a row's length
CUTS = [kernel.Tuning(), kernel.Tuning(rows=2, columns=1), kernel.Tuning(rows=1, columns=1)]


def draw_matrix(n: int, k: int, device: torch.device, first: int = 112, last: int = 142) -> Fp8Matrix:
    """Every e4m3 code but the two NaNs."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    codes = torch.where((raw & 0x7F) == 0x7F, 0, raw).view(torch.float8_e4m3fn)
    scale_bytes = torch.randint(first, last, (n // 128, k // 128), generator=generator, dtype=torch.uint8)
    return pack(codes.to(device), scale_bytes.to(device))


def draw_rows(rows: int, width: int) -> Tensor:
    """bfloat16 rows whose blocks of 128 differ by up to 2^16."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp2(torch.randint(-8, 9, (rows, width // 128, 1), generator=generator).float())
    return (torch.randn(rows, width // 128, 128, generator=generator) * sizes).flatten(1).bfloat16()


def arranged(x: Tensor) -> ChunkRows:
    return round_chunk(x, act_fp8=True)


def values(matrix: Fp8Matrix) -> Tensor:
    codes, scale_bytes = unpack(matrix)
    return codes.double() * scales_of(scale_bytes).double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def forms(device: torch.device) -> list[tuple[kernel.Tuning, bool | None]]:
    """The forms that run there: cuts for Hopper, and the plain one."""
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return [(kernel.Tuning(), False), *((cut, True) for cut in CUTS if on_hopper)]


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED, float(error.max())


def test_is_the_product_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 256, generator=generator), torch.randn(32, 256, generator=generator)
    for act_fp8 in (False, True):
        torch.testing.assert_close(
            fp8_chunk(x, weight, act_fp8=act_fp8), fp8_rows(x, weight, act_fp8=act_fp8), atol=1e-4, rtol=1e-5
        )
    halves = fp8_chunk(x, weight[:, :128], act_fp8=False, groups=2)
    torch.testing.assert_close(halves[:, 16:], x[:, 128:] @ weight[16:, :128].t(), atol=1e-4, rtol=1e-5)


def test_the_order_of_columns_is_that_of_the_instructions() -> None:
    order = column_order(256)
    assert order[:18].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27, 4, 5]
    assert torch.equal(order.sort().values, torch.arange(256))
    assert torch.equal(order[32:64], order[:32] + 32)


def test_matches_the_twin_in_float64(place: torch.device) -> None:
    matrix, x = draw_matrix(256, 512, place), draw_rows(67, 512).to(place)
    exact = fp8_chunk(round_fp8(x.float(), 128).double(), values(matrix), act_fp8=False)
    room = torch.full((3, 1, 67, 256), torch.nan, device=place)
    for cut, lanes in forms(place):
        room.fill_(torch.nan)
        kernel.launch(arranged(x), matrix, cut, out=room[1], lanes=lanes)
        require_close(room[1, 0], exact)
        assert room[0].isnan().all() and room[2].isnan().all()


def test_each_group_of_rows_of_the_matrix_meets_its_columns(place: torch.device) -> None:
    matrix, x = draw_matrix(256, 256, place), draw_rows(5, 512).to(place)
    exact = fp8_chunk(round_fp8(x.float(), 128).double(), values(matrix), act_fp8=False, groups=2)
    for cut, lanes in forms(place):
        if cut.rows == 1:
            require_close(kernel.launch(arranged(x), matrix, cut, groups=2, lanes=lanes)[0], exact)


def test_a_row_does_not_depend_on_those_beside_it(place: torch.device) -> None:
    matrix, x = draw_matrix(256, 256, place), draw_rows(70, 256).to(place)
    for cut, lanes in forms(place):
        whole = kernel.launch(arranged(x), matrix, cut, lanes=lanes)[0]
        chosen = [69, 3, 64]
        assert torch.equal(kernel.launch(arranged(x[chosen]), matrix, cut, lanes=lanes)[0], whole[chosen])


def test_refuses_by_name(place: torch.device) -> None:
    matrix, x = draw_matrix(128, 256, place), arranged(draw_rows(9, 256).to(place))
    strided = replace(x, values=x.values.new_zeros(256, 9).t())
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.fp8_chunk(ChunkRows.empty(9, 512, place), matrix), "values must have shape"),
        (lambda: kernel.fp8_chunk(ChunkRows.empty(4097, 256, place), matrix), "rows must be 1 to 4096; got 4097"),
        (lambda: kernel.fp8_chunk(strided, matrix), "values must be contiguous"),
        (lambda: kernel.fp8_chunk(replace(x, scales=x.scales[:8]), matrix), "scales must have shape"),
        (lambda: kernel.fp8_chunk(replace(x, values=x.values.float()), matrix), "values must be torch.float16"),
        (lambda: kernel.fp8_chunk(x, matrix, out=torch.empty(9, 128, device=place)), "out must have shape"),
        (lambda: kernel.fp8_chunk(ChunkRows.empty(9, 768, place), matrix, groups=3), "N must be a multiple of 128"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 1024, 1), (4096, 4096, 4), (1536, 4096, 1)], ids=str)
def test_the_models_matrices_are_exact_and_replay_in_a_graph(shape: tuple[int, int, int]) -> None:
    device, (n, k, groups) = torch.device("cuda"), shape
    matrix, x = draw_matrix(n, k, device), draw_rows(300, groups * k).to(device)
    room = ChunkRows.empty(300, groups * k, device)
    out = torch.empty(1, 300, n, device=device)

    def chunk() -> None:
        kernel.fp8_chunk(round_chunk(x, act_fp8=True, out=room), matrix, groups=groups, out=out)

    chunk()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk()
    x.copy_(x.flip(0))
    out.fill_(torch.nan)
    graph.replay()
    rows = round_fp8(x.float(), 128).double()
    require_close(out[0], fp8_chunk(rows, values(matrix), act_fp8=False, groups=groups))
