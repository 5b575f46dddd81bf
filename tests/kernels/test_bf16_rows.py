"""Rows times a bfloat16 matrix: the twin, the packed layout, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import bf16_rows as kernel
from dsv4nb_kernels._launch import Tuning
from dsv4nb_kernels.reference.bf16_rows import bf16_rows

pytestmark = pytest.mark.kernels

# a cut, and a matrix of two programs for it
CASES = [
    pytest.param(Tuning(depth=2), 32, 512, id="two warps"),
    pytest.param(Tuning(tiles=2, warps=1, depth=4, ahead=4), 64, 256, id="two tiles"),
    pytest.param(Tuning(splits=2, depth=3, ahead=1), 16, 1024, id="two splits"),
]
UNROUNDED = 1e-6  # of a row's length, before its result is rounded
N, K = 16, 512


def draw(rows: int, width: int, seed: int) -> Tensor:
    """bfloat16 values over sixteen binades."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-8, 9, (rows, width), generator=generator).float())
    return (torch.randn(rows, width, generator=generator) * sizes).bfloat16()


def draw_matrix(n: int, k: int, device: torch.device) -> kernel.Bf16Matrix:
    return kernel.pack(draw(n, k, 0).to(device))


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED


def test_multiplies_strided_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    wide, weight = torch.randn(16, 96, generator=generator), torch.randn(24, 32, generator=generator)
    for part in wide.chunk(3, 1):
        assert torch.equal(bf16_rows(part, weight), bf16_rows(part.contiguous(), weight))
        torch.testing.assert_close(bf16_rows(part, weight), part @ weight.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (256, 1024)], ids=str)
def test_packing_keeps_the_checkpoint(shape: tuple[int, int]) -> None:
    words = torch.randint(-(1 << 15), 1 << 15, shape, generator=torch.Generator().manual_seed(0)).to(torch.int16)
    again = kernel.unpack(kernel.pack(words.view(torch.bfloat16)))
    assert torch.equal(again.view(torch.int16), words)


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (torch.zeros(17, 256, dtype=torch.bfloat16), "16 rows.*17"),
        (torch.zeros(16, 128, dtype=torch.bfloat16), "256 columns.*128"),
        (torch.zeros(16, 256), "bfloat16.*float32"),
    ],
)
def test_packing_refuses_by_name(weight: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kernel.pack(weight)


@pytest.mark.parametrize(("cut", "n", "k"), CASES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_matches_the_twin_in_float64(cut: Tuning, n: int, k: int, rows: int, form: Any) -> None:
    matrix, x = draw_matrix(n, k, form.device), draw(rows, k, 1)
    out = kernel.launch(x.to(form.device), matrix, cut, ptx=form.ptx).sum(0).cpu()
    padded = torch.cat((x, x.new_zeros(8 - rows, k))).double()
    require_close(out, bf16_rows(padded, kernel.unpack(matrix).cpu().double())[:rows])


def unequal_rows(x: Tensor, product: Callable[[Tensor], Tensor]) -> int:
    """How many rows of the steps of 1 … 8 of these rows differ from the row alone, in any bit."""
    alone = [product(x[i : i + 1]) for i in range(8)]
    assert all(bool((row != 0).any()) for row in alone)
    steps = {rows: product(x[:rows]) for rows in range(1, 9)}
    return sum(not torch.equal(step[:, i : i + 1], alone[i]) for rows, step in steps.items() for i in range(rows))


@pytest.mark.parametrize(("cut", "n", "k"), CASES)
def test_m28_a_row_of_a_step_is_the_row_alone(cut: Tuning, n: int, k: int, form: Any) -> None:
    matrix, x = draw_matrix(n, k, form.device), draw(8, k, 1).to(form.device)
    assert unequal_rows(x, lambda rows: kernel.launch(rows, matrix, cut, ptx=form.ptx)) == 0


def test_m28_a_cut_by_the_number_of_rows_is_caught(form: Any) -> None:
    matrix, x = draw_matrix(N, K, form.device), draw(8, K, 1).to(form.device)

    def product(rows: Tensor) -> Tensor:
        return kernel.launch(rows, matrix, Tuning(warps=1 if rows.shape[0] == 1 else 2), ptx=form.ptx)

    assert unequal_rows(x, product) > 0


def test_m28_every_number_of_token_columns_sums_in_one_order(form: Any) -> None:
    matrix, x = draw_matrix(N, K, form.device), draw(1, K, 1).to(form.device)
    outs = [kernel.launch(x, matrix, Tuning(), ptx=form.ptx, token_columns=c) for c in (1, 2, 4, 8)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_writes_every_element_and_nothing_else(form: Any) -> None:
    matrix, x = draw_matrix(N, K, form.device), draw(5, K, 1).to(form.device)
    room = torch.full((3, 2, 5, N), torch.nan, device=form.device)
    kernel.launch(x, matrix, Tuning(warps=1, splits=2), out=room[1], ptx=form.ptx)
    assert not room[1].isnan().any()
    assert room[0].isnan().all() and room[2].isnan().all()


def test_refuses_by_name(form: Any) -> None:
    matrix, x = draw_matrix(N, K, form.device), draw(2, K, 1).to(form.device)
    shifted = torch.zeros(2 * K + 1, dtype=torch.bfloat16, device=form.device)[1:].view(2, K)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.bf16_rows(x[:0], matrix), "x must be 1 to 8 rows"),
        (lambda: kernel.bf16_rows(torch.cat([x] * 5), matrix), r"x must be 1 to 8 rows; got \(10, 512\)"),
        (lambda: kernel.bf16_rows(x[:, :256].contiguous(), matrix), "x must have shape"),
        (lambda: kernel.bf16_rows(shifted, matrix), "x must start on a 16-byte boundary"),
        (lambda: kernel.bf16_rows(torch.cat((x, x), 1)[:, :K], matrix), "x must be contiguous"),
        (lambda: kernel.bf16_rows(x.float(), matrix), "x must be torch.bfloat16"),
        (lambda: kernel.bf16_rows(x, matrix, out=x.float()[None]), "out must have shape"),
        (lambda: kernel.launch(x, matrix, Tuning(warps=4)), "K must be a multiple of 256 for every warp"),
        (lambda: kernel.launch(x, matrix, Tuning(tiles=2)), "N must be a multiple"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


REAL = sorted(shape for shape in kernel.TUNINGS if shape[0] < 100_000)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_m28_the_models_matrices_are_exact_and_row_invariant(shape: tuple[int, int]) -> None:
    device, (n, k) = torch.device("cuda"), shape
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(n, k, device=device, generator=generator).bfloat16()
    matrix, x = kernel.pack(weight), draw(8, k, 1).to(device)
    assert unequal_rows(x, lambda rows: kernel.bf16_rows(rows, matrix)) == 0
    order = [5, 3, 0, 7, 1, 6]
    assert torch.equal(kernel.bf16_rows(x[order], matrix), kernel.bf16_rows(x, matrix)[:, order])
    require_close(kernel.bf16_rows(x, matrix).sum(0), x.double() @ weight.double().t())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_a_chain_of_dependent_launches_replays_in_a_graph(rows: int) -> None:
    device, (n, k) = torch.device("cuda"), (2048, 4096)
    matrices = [kernel.pack(draw(n, k, seed).to(device)) for seed in range(2)]
    xs = [torch.empty(rows, k, dtype=torch.bfloat16, device=device) for _ in range(9)]
    outs = [torch.empty(kernel.tuning(n, k).splits, rows, n, device=device) for _ in range(8)]
    xs[0].copy_(draw(rows, k, 1))

    def chain(dependent: bool) -> None:
        for i, out in enumerate(outs):
            kernel.bf16_rows(xs[i], matrices[i % 2], out=out, dependent=dependent)
            xs[i + 1].copy_((out.sum(0) * 2.0**-11).repeat(1, 2))

    chain(dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(dependent=True)
    for seed in range(3):
        xs[0].copy_(draw(rows, k, seed))
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        replayed = [out.clone() for out in outs]
        chain(dependent=False)
        assert all(torch.equal(a, b) for a, b in zip(replayed, outs, strict=True))
        assert bool((outs[-1] != 0).any()) and bool(outs[-1].isfinite().all())
