"""Rows times an FP8 matrix: the twin, the packed layout, and the kernel in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import fp8_rows as kernel
from dsv4nb_kernels import index_scores, top_entries
from dsv4nb_kernels._e8m0 import bytes_of, scales_of
from dsv4nb_kernels._launch import Tuning
from dsv4nb_kernels._rounded_rows import RoundedRows, round_rows
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.fp8_rows import fp8_rows

pytestmark = pytest.mark.kernels

# a cut, and a matrix of two programs for it
CASES = [
    pytest.param(Tuning(depth=4, wide=(3, 2, None)), 32, 512, id="two warps"),
    pytest.param(Tuning(tiles=2, warps=1, depth=2, ahead=2), 64, 256, id="two tiles"),
    pytest.param(Tuning(splits=2, depth=4, ahead=8), 16, 1024, id="two splits"),
]
UNROUNDED = 1e-6  # of a row's length, before its result is rounded
N, K = 16, 512


def draw_codes(n: int, k: int, seed: int = 0) -> Tensor:
    """Every e4m3 code but the two NaNs."""
    raw = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, 0, raw).view(torch.float8_e4m3fn)


def draw_scale_bytes(n: int, k: int, first: int = 112, last: int = 142) -> Tensor:
    shape = (-(-n // 128), k // 128)
    return torch.randint(first, last, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def draw_rows(rows: int, width: int) -> Tensor:
    """bfloat16 rows whose blocks of 128 differ by up to 2^16."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp2(torch.randint(-8, 9, (rows, width // 128, 1), generator=generator).float())
    return (torch.randn(rows, width // 128, 128, generator=generator) * sizes).flatten(1).bfloat16()


def draw_matrix(n: int, k: int, device: torch.device) -> kernel.Fp8Matrix:
    return kernel.pack(draw_codes(n, k).to(device), draw_scale_bytes(n, k).to(device))


def values(matrix: kernel.Fp8Matrix) -> Tensor:
    codes, scale_bytes = kernel.unpack(matrix)
    scales = scales_of(scale_bytes).double().repeat_interleave(128, 0)[: matrix.n].repeat_interleave(128, 1)
    return codes.double() * scales


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED


def test_rounds_the_input_only_when_the_contract_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 256, generator=generator), torch.randn(32, 256, generator=generator)
    torch.testing.assert_close(fp8_rows(x, weight, act_fp8=False), x @ weight.t(), atol=1e-4, rtol=1e-5)
    rounded = round_fp8(x, 128)
    assert not torch.equal(rounded, x)
    torch.testing.assert_close(fp8_rows(x, weight, act_fp8=True), rounded @ weight.t(), atol=1e-4, rtol=1e-5)


def test_a_tile_of_a_batch_equals_the_tile_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(40, 128, generator=generator), torch.randn(48, 128, generator=generator)
    batch = fp8_rows(x, weight, act_fp8=True)
    for first in range(0, 40, 8):
        assert torch.equal(fp8_rows(x[first : first + 8], weight, act_fp8=True), batch[first : first + 8])


@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (144, 256), (1536, 1024)], ids=str)
def test_packing_keeps_the_checkpoint(shape: tuple[int, int]) -> None:
    codes, scale_bytes = draw_codes(*shape), draw_scale_bytes(*shape, 0, 241)
    again, again_bytes = kernel.unpack(kernel.pack(codes, scale_bytes))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again_bytes, scale_bytes)


def test_every_scale_byte_is_its_power_of_two() -> None:
    scale_bytes = torch.arange(241, dtype=torch.uint8)
    scales = scales_of(scale_bytes)
    assert torch.equal(scales.double(), torch.exp2(scale_bytes.double() - 127))
    assert torch.equal(bytes_of(scales), scale_bytes)


def with_code(code: int) -> Tensor:
    raw = torch.zeros(16, 256, dtype=torch.uint8)
    raw[3, 5] = code
    return raw.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("codes", "scale_byte", "named"),
    [
        (with_code(0x7F), 127, "NaN"),
        (with_code(0xFF), 127, "NaN"),
        (with_code(0), 241, "e8m0 byte is at most 240.*241"),
        (with_code(0), 255, "e8m0 byte is at most 240.*255"),
        (torch.zeros(17, 256).to(torch.float8_e4m3fn), 127, "16 rows"),
        (torch.zeros(16, 128).to(torch.float8_e4m3fn), 127, "256 columns"),
        (torch.zeros(16, 256), 127, "float8_e4m3fn"),
    ],
)
def test_packing_refuses_by_name(codes: Tensor, scale_byte: int, named: str) -> None:
    scale_bytes = torch.full((1, codes.shape[1] // 128), scale_byte, dtype=torch.uint8)
    with pytest.raises(ValueError, match=named):
        kernel.pack(codes, scale_bytes)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("act_fp8", [True, False])
def test_rounded_rows_are_the_twins(rows: int, act_fp8: bool, form: Any) -> None:
    x = draw_rows(rows, 1280)
    x[0, :128] = 0
    x[-1, 128:256] = 1e-6
    rounded = round_rows(x.to(form.device), act_fp8=act_fp8)
    scales = rounded.scales[:, :rows].t().double().repeat_interleave(128, 1)
    twin = round_fp8(x.float(), 128) if act_fp8 else x
    assert torch.equal((rounded.codes.double() * scales).cpu(), twin.double())


def test_rounding_adds_the_splits_from_left_to_right(form: Any) -> None:
    splits = torch.stack([draw_rows(2, 256).float() * 1.7**i for i in range(4)]).to(form.device)
    added = ((splits[0] + splits[1]) + splits[2]) + splits[3]
    one, other = round_rows(splits, act_fp8=True), round_rows(added.bfloat16(), act_fp8=True)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales[:, :2], other.scales[:, :2])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -0x400000])  # a GPU's own NaN first
@pytest.mark.parametrize("act_fp8", [True, False])
def test_what_is_no_number_stays_none(bits: int, act_fp8: bool, form: Any) -> None:
    x = draw_rows(2, 256).float()[None]
    x.view(torch.int32)[0, 1, 130] = bits
    rounded = round_rows(x.to(form.device), act_fp8=act_fp8)
    values = (rounded.codes.float() * rounded.scales[:, :2].t().repeat_interleave(128, 1)).cpu()
    assert not values[1, 130].isfinite() and bool(values[0].isfinite().all())


@pytest.mark.parametrize(("cut", "n", "k"), CASES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_matches_the_twin_in_float64(cut: Tuning, n: int, k: int, rows: int, form: Any) -> None:
    matrix, x = draw_matrix(n, k, form.device), draw_rows(rows, k)
    rounded = round_rows(x.to(form.device), act_fp8=True)
    out = kernel.launch(rounded, matrix, cut, ptx=form.ptx)
    padded = torch.cat((x, x.new_zeros(8 - rows, k)))
    exact = fp8_rows(padded.double().float(), values(matrix).cpu().float(), act_fp8=True)[:rows]
    assert torch.allclose(out.sum(0).cpu(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    require_close(out.sum(0).cpu(), round_fp8(x.float(), 128).double() @ values(matrix).cpu().t())


def test_each_group_of_rows_of_the_matrix_meets_its_columns(form: Any) -> None:
    matrix, x = draw_matrix(64, 512, form.device), draw_rows(3, 4 * 512)
    rounded = round_rows(x.to(form.device), act_fp8=False)
    out = kernel.launch(rounded, matrix, Tuning(), groups=4, ptx=form.ptx).sum(0).cpu()
    exact = torch.einsum("tgk,gnk->tgn", x.double().view(3, 4, 512), values(matrix).cpu().view(4, 16, 512))
    require_close(out, exact.flatten(1))


def unequal_rows(x: Tensor, product: Callable[[Tensor], Tensor]) -> int:
    """How many rows of the steps of 1 … 8 of these rows differ from the row alone, in any bit."""
    alone = [product(x[i : i + 1]) for i in range(8)]
    assert all(bool((row != 0).any()) for row in alone)
    steps = {rows: product(x[:rows]) for rows in range(1, 9)}
    return sum(not torch.equal(step[:, i : i + 1], alone[i]) for rows, step in steps.items() for i in range(rows))


@pytest.mark.parametrize(("cut", "n", "k"), CASES)
def test_m28_a_row_of_a_step_is_the_row_alone(cut: Tuning, n: int, k: int, form: Any) -> None:
    matrix, x = draw_matrix(n, k, form.device), draw_rows(8, k).to(form.device)
    assert unequal_rows(x, lambda r: kernel.launch(round_rows(r, act_fp8=True), matrix, cut, ptx=form.ptx)) == 0


def test_m28_a_cut_by_the_number_of_rows_is_caught(form: Any) -> None:
    matrix, x = draw_matrix(N, K, form.device), draw_rows(8, K).to(form.device)

    def product(rows: Tensor) -> Tensor:
        cut = Tuning(warps=1 if rows.shape[0] == 1 else 2)
        return kernel.launch(round_rows(rows, act_fp8=True), matrix, cut, ptx=form.ptx)

    assert unequal_rows(x, product) > 0


def test_m28_every_number_of_token_columns_sums_in_one_order(form: Any) -> None:
    matrix = draw_matrix(N, K, form.device)
    x = round_rows(draw_rows(1, K).to(form.device), act_fp8=True)
    outs = [kernel.launch(x, matrix, Tuning(), ptx=form.ptx, token_columns=c) for c in (1, 2, 4, 8)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_writes_every_element_and_nothing_else(form: Any) -> None:
    matrix = draw_matrix(N, K, form.device)
    x = round_rows(draw_rows(5, K).to(form.device), act_fp8=True)
    room = torch.full((3, 2, 5, N), torch.nan, device=form.device)
    kernel.launch(x, matrix, Tuning(warps=1, splits=2), out=room[1], ptx=form.ptx)
    assert not room[1].isnan().any()
    assert room[0].isnan().all() and room[2].isnan().all()


def test_refuses_by_name(form: Any) -> None:
    matrix = draw_matrix(N, K, form.device)
    x = round_rows(draw_rows(2, K).to(form.device), act_fp8=True)
    nine = RoundedRows.empty(9, K, form.device)
    half = RoundedRows.empty(2, K // 2, form.device)
    shifted = replace(x, codes=torch.zeros(2 * K + 1, dtype=torch.float16, device=form.device)[1:].view(2, K))
    strided = replace(x, codes=torch.zeros(K, 2, dtype=torch.float16, device=form.device).t())
    single = replace(x, codes=x.codes.float())
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.fp8_rows(nine, matrix), "rows must be 1 to 8; got 9"),
        (lambda: kernel.fp8_rows(half, matrix), "codes must have shape"),
        (lambda: kernel.fp8_rows(shifted, matrix), "codes must start on a 16-byte boundary"),
        (lambda: kernel.fp8_rows(strided, matrix), "codes must be contiguous"),
        (lambda: kernel.fp8_rows(single, matrix), "codes must be torch.float16"),
        (lambda: kernel.fp8_rows(x, matrix, out=torch.empty(1, 2, 8, device=form.device)), "out must have shape"),
        (lambda: kernel.fp8_rows(x, matrix, groups=3), "N must be a multiple of 3 groups"),
        (lambda: kernel.launch(x, matrix, Tuning(warps=8)), "K must be a multiple of 256 for every warp"),
        (lambda: round_rows(draw_rows(2, K).to(form.device).half(), act_fp8=True), "x must be torch.bfloat16"),
        (lambda: round_rows(x.codes[0], act_fp8=True), r"x must be \[S, T, W\]"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.parametrize(
    "scale_bytes",
    [
        pytest.param(torch.tensor([[0, 240]]), id="ends"),
        pytest.param(torch.arange(242).clamp_max(240).view(121, 2), id="all", marks=pytest.mark.gpu),
    ],
)
def test_a_scale_byte_is_exact(scale_bytes: Tensor, form: Any) -> None:
    n = 16 if len(scale_bytes) == 1 else 128 * len(scale_bytes)
    matrix = kernel.pack(draw_codes(n, 256).to(form.device), scale_bytes.to(form.device, torch.uint8))
    x = torch.zeros(2, 256, dtype=torch.bfloat16, device=form.device)
    x[0, 7] = x[1, 200] = 1.0
    out = kernel.launch(round_rows(x, act_fp8=True), matrix, Tuning(warps=1), ptx=form.ptx)
    assert torch.equal(out[0].double(), values(matrix)[:, [7, 200]].t())


REAL = sorted(kernel.TUNINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_m28_the_models_matrices_are_exact_and_row_invariant(shape: tuple[int, int]) -> None:
    device, (n, k) = torch.device("cuda"), shape
    matrix, x = draw_matrix(n, k, device), draw_rows(8, k).to(device)

    def product(rows: Tensor) -> Tensor:
        return kernel.fp8_rows(round_rows(rows, act_fp8=True), matrix)

    assert unequal_rows(x, product) == 0
    order = [5, 3, 0, 7, 1, 6]
    assert torch.equal(product(x[order]), product(x)[:, order])
    twin = round_fp8(x.float().cpu(), 128).double().to(device)
    require_close(product(x).sum(0), twin @ values(matrix).t())


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_are_older_have_the_same_product(rows: int, form: Any) -> None:
    matrix = draw_matrix(32, 512, form.device)
    rounded = round_rows(draw_rows(rows, 512).to(form.device), act_fp8=True)
    given = rounded, matrix, kernel.tuning(32, 512)
    wanted = kernel.launch(*given, ptx=form.ptx)
    assert torch.equal(kernel.launch(*given, ptx=form.ptx, rows_are_older=True), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_a_product_beside_a_kernel_that_rows_are_older_than_replays_in_a_graph(rows: int) -> None:
    """What is written after it overlaps nothing: rows change in every turn, and so does what is added up last."""
    device, count = torch.device("cuda"), 35_072
    matrix = draw_matrix(16384, 1024, device)
    matrix = replace(matrix, scales=matrix.scales * 2.0**-25)
    x = draw_rows(rows, 1024).to(device)
    keys, query = (torch.randn(*shape, device=device).bfloat16() for shape in ((count, 128), (rows, 64, 128)))
    weights, visible = torch.randn(1, rows, 64, device=device), torch.full((rows,), count, device=device).int()
    scores, scratch = torch.empty(rows, count, device=device), top_entries.Scratch.empty(rows, count, 512, device)
    rounded = RoundedRows.empty(rows, 1024, device)
    picked, sums = torch.empty(rows, 512, dtype=torch.int32, device=device), RoundedRows.empty(rows, 16384, device)
    out = torch.empty(1, rows, 16384, device=device)

    def chain(dependent: bool) -> None:
        for _ in range(4):
            round_rows(x, act_fp8=True, out=rounded, dependent=dependent)
            index_scores.index_scores(query, keys, weights, visible, out=scores, dependent=dependent)
            top_entries.top_entries(scores, visible, 512, scratch=scratch, out=picked, dependent=dependent)
            kernel.fp8_rows(rounded, matrix, out=out, dependent=dependent, rows_are_older=dependent)
            round_rows(out, act_fp8=True, out=sums, dependent=dependent)

    chain(dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(dependent=True)
    for seed in range(5):
        x.copy_(torch.randn(rows, 1024, generator=torch.Generator().manual_seed(seed)))
        query.copy_(query.roll(1, 1))
        graph.replay()
        replayed = [each.clone() for each in (picked, out, sums.codes, sums.scales)]
        chain(dependent=False)
        now = picked, out, sums.codes, sums.scales
        assert all(torch.equal(a, b) for a, b in zip(replayed, now, strict=True))
        assert bool((out != 0).any()) and bool(out.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_a_chain_of_dependent_launches_replays_in_a_graph(rows: int) -> None:
    device, size = torch.device("cuda"), 1024
    matrix = draw_matrix(size, size, device)
    matrix = replace(matrix, scales=matrix.scales * 2.0**-25)  # the rows keep their size along the chain
    x = draw_rows(rows, size).to(device)
    rounded = [RoundedRows.empty(rows, size, device) for _ in range(9)]
    outs = [torch.empty(kernel.tuning(size, size).splits, rows, size, device=device) for _ in range(8)]

    def chain(dependent: bool) -> None:
        round_rows(x, act_fp8=True, out=rounded[0], dependent=dependent)
        for i, out in enumerate(outs):
            kernel.fp8_rows(rounded[i], matrix, out=out, dependent=dependent)
            round_rows(out, act_fp8=True, out=rounded[i + 1], dependent=dependent)

    chain(dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(dependent=True)
    for seed in range(3):
        x.copy_(torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)))
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        replayed = [out.clone() for out in outs]
        chain(dependent=False)
        assert all(torch.equal(a, b) for a, b in zip(replayed, outs, strict=True))
        assert bool((outs[-1] != 0).any()) and bool(outs[-1].isfinite().all())
