"""FP8 rows on the matrices of V4-Flash: whole, and as one GPU of a pair holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import fp8_rows
from dsv4nb_kernels._e8m0 import scales_of
from dsv4nb_kernels._launch import WIDE, Tuning, columns, compiler_options
from dsv4nb_kernels._rounded_rows import RoundedRows, round_rows
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close

OP = "fp8_rows"
# N, K, groups and the cuts (tiles, warps, splits) to compare
SHAPES = {
    "q_b half": (16384, 1024, 1, ((1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1))),
    "o_b half": (4096, 4096, 1, ((1, 2, 4), (1, 4, 2), (1, 4, 4), (4, 1, 4))),
    "o_a half": (4096, 4096, 4, ((1, 2, 4),)),
    "q_b": (32768, 1024, 1, ((1, 2, 1), (4, 1, 1))),
    "o_a": (8192, 4096, 8, ((1, 2, 4), (1, 4, 2), (4, 1, 4))),
    "o_b": (4096, 8192, 1, ((1, 4, 4), (1, 2, 8), (1, 4, 2))),
    "q_a, kv": (1536, 4096, 1, ((1, 2, 8), (1, 4, 4), (1, 1, 16))),
    "index q_b": (8192, 1024, 1, ((1, 2, 1), (1, 4, 1))),
}
# chunks of weights on their way, chunks by which rows are requested in advance, cap of registers
PIPELINES = ((8, 0, 128), (8, 8, 128), (6, 4, 96), (4, 4, 80))
# of steps of eight columns
WIDE_PIPELINES = (
    (6, 0, 112),
    (6, 0, 104),
    (6, 0, 120),
    (6, 0, 128),
    (6, 1, 112),
    (6, 2, 112),
    (6, 2, 128),
    (6, 4, 128),
    (5, 0, 104),
    (5, 0, 112),
    (7, 0, 112),
    (7, 0, 128),
    (8, 0, 120),
    (8, 2, 128),
    (4, 0, 96),
    (4, 4, 112),
)
MORE_PIPELINES = ((8, 0, None), (8, 8, None), (6, 0, 112), (4, 8, None), (4, 0, 72), (2, 4, 64))
SWEPT_ROWS = (1, 6)
ROWS = (1, 2, 4, 6)
LIMIT = 1e-6  # before the result is rounded
BF16_LIMIT = 4e-3  # a peer's output is bfloat16


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape and T, the other cuts at T = 1 and 6, and the peers."""
    return [
        arm
        for name, (n, k, groups, cuts) in SHAPES.items()
        for rows in ROWS
        for arm in (*_own(device, name, n, k, groups, cuts, rows), *_peers(device, name, n, k, groups, rows))
    ]


def _cuts(n: int, k: int, token_columns: int, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Tuning]:
    for i, (tiles, warps, splits) in enumerate(shapes):
        pipelines: tuple[tuple[int, int, int | None], ...] = PIPELINES
        if n * k == 1 << 24:
            if i == 0:
                pipelines += MORE_PIPELINES
            if token_columns == WIDE:
                pipelines = WIDE_PIPELINES if i == 0 else WIDE_PIPELINES[:1]
        for depth, ahead, registers in pipelines:
            cut = Tuning(tiles=tiles, warps=warps, splits=splits, depth=depth, ahead=ahead, registers=registers)
            if cut != fp8_rows.tuning(n, k).at(token_columns) and depth * 64 * warps * splits <= k:
                yield cut


def _own(
    device: torch.device, name: str, n: int, k: int, groups: int, shapes: tuple[tuple[int, int, int], ...], rows: int
) -> Iterator[Arm]:
    product = fp8_rows.tuning(n, k).at(columns(rows))

    def arm(cut: Tuning, label: str, dependent: bool = True, token_columns: int | None = None) -> Arm:
        width = token_columns or columns(rows)
        return Arm(
            op=OP,
            shape=name,
            rows=rows,
            name=label,
            bytes_read=_bytes(n, k),
            make=partial(_make, device, n, k, groups, rows, cut, dependent, token_columns),
            compile=partial(_compile, n, k, groups, cut, width, dependent),
            check=partial(_check, device, n, k, groups, rows, cut, token_columns),
            is_product=label == str(product),
        )

    yield arm(product, str(product))
    if rows in SWEPT_ROWS:
        yield from (arm(cut, str(cut)) for cut in _cuts(n, k, columns(rows), shapes))
        yield arm(product, "not dependent", dependent=False)
        if rows == 1:
            yield arm(product, "eight columns", token_columns=8)


def _bytes(n: int, k: int) -> int:
    return n * k + n // 128 * (k // 128) * 4


def _compile(n: int, k: int, groups: int, cut: Tuning, token_columns: int, dependent: bool) -> None:
    fp8_rows._fp8_rows_kernel.warmup(
        torch.int32,
        torch.float32,
        torch.float16,
        torch.float32,
        torch.float32,
        1,
        grid=(1,),
        **fp8_rows.constants(n, k, cut, token_columns, groups, dependent),
        **compiler_options(cut, dependent),
    )


def _matrices(device: torch.device, n: int, k: int, count: int) -> list[fp8_rows.Fp8Matrix]:
    """Random codes without NaN, every e8m0 byte near that of real weights."""
    words = random_words(device, count * n * k // 4, ~0x40404040).view(count, -1)
    scale_bytes = random_words(device, count * (n // 128) * (k // 128)).remainder(16).add(112).to(torch.uint8)
    scales = scales_of(scale_bytes).view(count, n // 128, k // 128)
    return [fp8_rows.Fp8Matrix(words=words[i], scales=scales[i], n=n, k=k) for i in range(count)]


def _rows(device: torch.device, rows: int, width: int) -> RoundedRows:
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, width, device=device, generator=generator).to(torch.bfloat16)
    return round_rows(x, act_fp8=True)


def _make(
    device: torch.device,
    n: int,
    k: int,
    groups: int,
    rows: int,
    cut: Tuning,
    dependent: bool,
    token_columns: int | None,
    count: int,
) -> Launch:
    matrices = _matrices(device, n, k, count)
    x = _rows(device, rows, groups * k)
    out = torch.empty(cut.splits, rows, n, device=device)

    def launch(i: int) -> Tensor:
        return fp8_rows.launch(
            x, matrices[i % count], cut, groups=groups, out=out, dependent=dependent, token_columns=token_columns
        )

    return launch


def _weights(matrix: fp8_rows.Fp8Matrix) -> Tensor:
    codes, scale_bytes = fp8_rows.unpack(matrix)
    scales = scales_of(scale_bytes).double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.double() * scales


def _exact(x: RoundedRows, matrix: fp8_rows.Fp8Matrix, groups: int) -> Tensor:
    rows = x.codes.shape[0]
    scales = x.scales[:, :rows].t().double().repeat_interleave(128, 1)
    values = (x.codes.double() * scales).view(rows, groups, matrix.k)
    weights = _weights(matrix).view(groups, -1, matrix.k)
    return torch.einsum("tgk,gnk->tgn", values, weights).reshape(rows, matrix.n)


def _check(
    device: torch.device, n: int, k: int, groups: int, rows: int, cut: Tuning, token_columns: int | None
) -> None:
    matrix, x = _matrices(device, n, k, 1)[0], _rows(device, rows, groups * k)
    out = fp8_rows.launch(x, matrix, cut, groups=groups, token_columns=token_columns)
    require_close(out.sum(0), _exact(x, matrix, groups), LIMIT)


def _peers(device: torch.device, name: str, n: int, k: int, groups: int, rows: int) -> Iterator[Arm]:
    """torch._scaled_mm: rows padded to 16, one scale for all, and scales by block."""
    if rows not in SWEPT_ROWS or groups > 1:
        return
    forms: dict[str, Callable[..., Launch]] = {
        "torch._scaled_mm, one scale": _scaled_mm_whole,
        "torch._scaled_mm, blocks": _scaled_mm_blocks,
    }
    for label, form in forms.items():
        yield Arm(
            op=OP,
            shape=name,
            rows=rows,
            name=label,
            bytes_read=_bytes(n, k),
            make=partial(form, device, n, k),
            is_peer=True,
        )


def _codes(device: torch.device, n: int, k: int, count: int) -> Tensor:
    words = random_words(device, count * n * k // 4, ~0x40404040)
    return words.view(torch.float8_e4m3fn).view(count, n, k)


def _scaled_mm_whole(device: torch.device, n: int, k: int, count: int) -> Launch:
    weights, x = _codes(device, n, k, count), _codes(device, 16, k, 1)[0]
    one = torch.ones((), device=device)

    def launch(i: int) -> Tensor:
        return torch._scaled_mm(x, weights[i % count].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return launch


def _scaled_mm_blocks(device: torch.device, n: int, k: int, count: int) -> Launch:
    weights, x = _codes(device, n, k, count), _codes(device, 16, k, 1)[0]
    x_scales = torch.ones(k // 128, 16, device=device).t()
    w_scales = torch.ones(n // 128, k // 128, device=device).t()

    def launch(i: int) -> Tensor:
        return torch._scaled_mm(x, weights[i % count].t(), x_scales, w_scales, out_dtype=torch.bfloat16)

    return launch
