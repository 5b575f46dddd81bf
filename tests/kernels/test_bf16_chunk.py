"""A chunk's rows times a bfloat16 matrix: the twin, and the kernel on the packed layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import bf16_chunk as kernel
from dsv4nb_kernels.bf16_rows import Bf16Matrix, pack, unpack
from dsv4nb_kernels.reference.bf16_chunk import bf16_chunk
from dsv4nb_kernels.reference.bf16_rows import bf16_rows

pytestmark = pytest.mark.kernels

CUT = kernel.Tuning(rows=16, columns=16, depth=64)
# a cut, and a matrix of several programs for it
CASES = [
    pytest.param(CUT, 32, 256, id="one split"),
    pytest.param(replace(CUT, columns=32, splits=2), 64, 256, id="two splits"),
]
LIMIT = 3e-5  # of a row's length: the tensor cores cut off what they shift out
N, K = 32, 256


def draw(rows: int, width: int, seed: int) -> Tensor:
    """bfloat16 values over sixteen binades."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-8, 9, (rows, width), generator=generator).float())
    return (torch.randn(rows, width, generator=generator) * sizes).bfloat16()


def draw_matrix(n: int, k: int, device: torch.device) -> Bf16Matrix:
    return pack(draw(n, k, 0).to(device))


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= LIMIT


def test_the_twin_is_that_of_the_decode_rows() -> None:
    x, weight = draw(16, K, 1).double(), draw(N, K, 0).double()
    torch.testing.assert_close(bf16_chunk(x, weight), bf16_rows(x, weight), atol=1e-9, rtol=1e-12)


@pytest.mark.parametrize(("cut", "n", "k"), CASES)
@pytest.mark.parametrize("rows", [1, 19])
def test_matches_the_twin_in_float64(cut: kernel.Tuning, n: int, k: int, rows: int, place: torch.device) -> None:
    matrix, x = draw_matrix(n, k, place), draw(rows, k, 1).to(place)
    room = torch.full((3, cut.splits, rows, n), torch.nan, device=place)
    kernel.launch(x, matrix, cut, out=room[1])
    assert room[0].isnan().all() and room[2].isnan().all() and not room[1].isnan().any()
    require_close(room[1].sum(0), bf16_chunk(x.double(), unpack(matrix).double()))


def unequal_rows(x: Tensor, product: Callable[[Tensor], Tensor]) -> int:
    """How many rows of shorter chunks, of one row too, differ from the row of the whole in any bit."""
    whole = product(x)
    assert bool((whole != 0).any(-1).all())
    counts = (1, 2, x.shape[0] - 1)
    return sum(int((product(x[:count]) != whole[:, :count]).any(-1).any(0).sum()) for count in counts)


def test_m28_a_row_does_not_depend_on_how_many_there_are(place: torch.device) -> None:
    matrix, x = draw_matrix(N, K, place), draw(19, K, 1).to(place)
    assert unequal_rows(x, lambda rows: kernel.launch(rows, matrix, CUT)) == 0


def test_m28_a_cut_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    matrix, x = draw_matrix(N, K, place), draw(3, K, 1).to(place)

    def product(rows: Tensor) -> Tensor:
        cut = CUT if rows.shape[0] == 1 else replace(CUT, splits=2)
        return kernel.launch(rows, matrix, cut).sum(0, keepdim=True)

    assert unequal_rows(x, product) > 0


def test_refuses_by_name(place: torch.device) -> None:
    matrix, x = draw_matrix(N, K, place), draw(2, K, 1).to(place)
    many = torch.zeros(4097, K, dtype=torch.bfloat16, device=place)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.bf16_chunk(x[:0], matrix), "x must be 1 to 4096 rows"),
        (lambda: kernel.bf16_chunk(many, matrix), r"x must be 1 to 4096 rows; got \(4097, 256\)"),
        (lambda: kernel.bf16_chunk(x[:, :128].contiguous(), matrix), "x must have shape"),
        (lambda: kernel.bf16_chunk(torch.cat((x, x), 1)[:, :K], matrix), "x must be contiguous"),
        (lambda: kernel.bf16_chunk(x.float(), matrix), "x must be torch.bfloat16"),
        (lambda: kernel.bf16_chunk(x, replace(matrix, n=64)), "words must have shape"),
        (lambda: kernel.bf16_chunk(x, matrix, out=x.float()[None]), "out must have shape"),
        (lambda: kernel.launch(x, matrix, replace(CUT, columns=64)), "N must be a multiple of 64; got 32"),
        (lambda: kernel.launch(x, matrix, replace(CUT, splits=8)), "K must be a multiple of 512; got 256"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", sorted(kernel.TUNINGS), ids=str)
def test_m28_the_models_matrices_are_close_and_row_invariant(shape: tuple[int, int]) -> None:
    device, (n, k) = torch.device("cuda"), shape
    weight = torch.randn(n, k, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
    matrix, x = pack(weight), draw(150, k, 1).to(device)
    assert unequal_rows(x, lambda rows: kernel.bf16_chunk(rows, matrix)) == 0
    order = torch.randperm(150, device=device)
    assert torch.equal(kernel.bf16_chunk(x[order], matrix), kernel.bf16_chunk(x, matrix)[:, order])
    require_close(kernel.bf16_chunk(x, matrix).double().sum(0), bf16_chunk(x.double(), weight.double()))


@pytest.mark.gpu
def test_captured_launches_follow_their_inputs() -> None:
    device, (n, k) = torch.device("cuda"), (2048, 4096)
    matrix, x = pack(draw(n, k, 0).to(device)), draw(150, k, 1).to(device)
    outs = [torch.empty(1, 150, n, device=device) for _ in range(3)]

    def chain(dependent: bool) -> None:
        for out in outs:
            kernel.bf16_chunk(x, matrix, out=out, dependent=dependent)

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(3):
        x.mul_(-0.75)
        chain(False)
        expected = outs[0].clone()
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs) and bool((expected != 0).any())
