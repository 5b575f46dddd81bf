"""bfloat16 rows on the matrices of V4-Flash: compressors, router, head whole and by half."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import bf16_rows
from dsv4nb_kernels._launch import Tuning, columns, compiler_options
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close

OP = "bf16_rows"
# N, K and the cuts (tiles, warps, splits) to compare
SHAPES = {
    "head half": (64640, 4096, ((4, 1, 1), (1, 4, 1), (1, 8, 1), (4, 2, 1))),
    "head": (129280, 4096, ()),
    "compress 4": (2048, 4096, ((1, 2, 4), (1, 2, 8), (1, 4, 4), (1, 4, 2))),
    "compress 128": (1024, 4096, ((1, 2, 8), (1, 4, 4))),
    "index kv": (512, 4096, ((1, 2, 8), (1, 4, 4))),
    "gate": (256, 4096, ((1, 2, 8), (1, 4, 4), (1, 8, 2))),
}
# chunks of weights on their way, chunks by which rows are requested in advance, cap of registers
PIPELINES = ((4, 0, 128), (4, 4, 128), (3, 2, 96), (2, 2, 80))
SWEPT_ROWS = (1, 6)
ROWS = (1, 2, 4, 6)
LIMIT = 1e-6
BF16_LIMIT = 4e-3  # a peer's output is bfloat16


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape and T, the other cuts at T = 1 and 6, and the peers."""
    return [
        arm
        for name, (n, k, cuts) in SHAPES.items()
        for rows in ROWS
        for arm in (*_own(device, name, n, k, cuts, rows), *_peers(device, name, n, k, rows))
    ]


def _cuts(n: int, k: int, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Tuning]:
    for tiles, warps, splits in shapes:
        for depth, ahead, registers in PIPELINES:
            cut = Tuning(tiles=tiles, warps=warps, splits=splits, depth=depth, ahead=ahead, registers=registers)
            if cut != bf16_rows.tuning(n, k):
                yield cut


def _own(
    device: torch.device, name: str, n: int, k: int, shapes: tuple[tuple[int, int, int], ...], rows: int
) -> Iterator[Arm]:
    product = bf16_rows.tuning(n, k)

    def arm(cut: Tuning, label: str, dependent: bool = True, token_columns: int | None = None) -> Arm:
        width = token_columns or columns(rows)
        return Arm(
            op=OP,
            shape=name,
            rows=rows,
            name=label,
            bytes_read=2 * n * k,
            make=partial(_make, device, n, k, rows, cut, dependent, token_columns),
            compile=partial(_compile, n, k, cut, width, dependent),
            check=partial(_check, device, n, k, rows, cut, token_columns),
            is_product=label == str(product),
        )

    yield arm(product, str(product))
    if rows in SWEPT_ROWS:
        yield from (arm(cut, str(cut)) for cut in _cuts(n, k, shapes))
        yield arm(product, "not dependent", dependent=False)
        if rows == 1:
            yield arm(product, "eight columns", token_columns=8)


def _compile(n: int, k: int, cut: Tuning, token_columns: int, dependent: bool) -> None:
    bf16_rows._bf16_rows_kernel.warmup(
        torch.int32,
        torch.bfloat16,
        torch.float32,
        1,
        grid=(1,),
        **bf16_rows.constants(n, k, cut, token_columns, dependent),
        **compiler_options(cut, dependent),
    )


def _weights(device: torch.device, n: int, k: int, count: int) -> Tensor:
    """[count, N, K] bfloat16 of random bits with exponents from 2^-64 to 1; the order in memory does not matter."""
    words = random_words(device, count * n * k // 2, ~0x40004000)
    return words.view(torch.bfloat16).view(count, n, k)


def _rows(device: torch.device, rows: int, k: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn(rows, k, device=device, generator=generator).to(torch.bfloat16)


def _matrices(device: torch.device, n: int, k: int, count: int) -> list[bf16_rows.Bf16Matrix]:
    words = random_words(device, count * n * k // 2, ~0x40004000).view(count, -1)
    return [bf16_rows.Bf16Matrix(words=words[i], n=n, k=k) for i in range(count)]


def _make(
    device: torch.device,
    n: int,
    k: int,
    rows: int,
    cut: Tuning,
    dependent: bool,
    token_columns: int | None,
    count: int,
) -> Launch:
    matrices, x = _matrices(device, n, k, count), _rows(device, rows, k)
    out = torch.empty(cut.splits, rows, n, device=device)

    def launch(i: int) -> Tensor:
        return bf16_rows.launch(x, matrices[i % count], cut, out=out, dependent=dependent, token_columns=token_columns)

    return launch


def _check(device: torch.device, n: int, k: int, rows: int, cut: Tuning, token_columns: int | None) -> None:
    matrix, x = _matrices(device, n, k, 1)[0], _rows(device, rows, k)
    out = bf16_rows.launch(x, matrix, cut, token_columns=token_columns)
    require_close(out.sum(0), x.double() @ bf16_rows.unpack(matrix).double().t(), LIMIT)


def _peers(device: torch.device, name: str, n: int, k: int, rows: int) -> Iterator[Arm]:
    """cuBLAS through torch.mm, and the plain Triton product on the checkpoint's layout."""
    if rows not in SWEPT_ROWS:
        return
    yield Arm(
        op=OP,
        shape=name,
        rows=rows,
        name="torch.mm",
        bytes_read=2 * n * k,
        make=partial(_make_mm, device, n, k, rows),
        is_peer=True,
    )
    if n * k > 1 << 27:
        yield Arm(
            op=OP,
            shape=name,
            rows=rows,
            name="tl.dot, 64 rows x 128 k, 4 stages",
            bytes_read=2 * n * k,
            make=partial(_make_dot, device, n, k, rows),
            is_peer=True,
        )


def _make_mm(device: torch.device, n: int, k: int, rows: int, count: int) -> Launch:
    weights, x = _weights(device, n, k, count), _rows(device, rows, k)
    return lambda i: torch.mm(x, weights[i % count].t())


@triton.jit
def _dot_kernel(w_ptr, x_ptr, out_ptr, T, N: tl.constexpr, K: tl.constexpr):
    o_n = tl.program_id(0) * 64 + tl.arange(0, 64)
    o_t = tl.arange(0, 16)
    o_k = tl.arange(0, 128)
    acc = tl.zeros((64, 16), tl.float32)
    for k in range(0, K, 128):
        b_w = tl.load(w_ptr + o_n[:, None].to(tl.int64) * K + (k + o_k)[None, :], eviction_policy="evict_first")
        b_x = tl.load(x_ptr + o_t[None, :] * K + (k + o_k)[:, None], mask=o_t[None, :] < T, other=0.0)
        acc = tl.dot(b_w, b_x, acc)
    tl.store(out_ptr + o_t[None, :] * N + o_n[:, None], acc, mask=o_t[None, :] < T)


def _make_dot(device: torch.device, n: int, k: int, rows: int, count: int) -> Launch:
    weights, x = _weights(device, n, k, count), _rows(device, rows, k)
    out = torch.empty(rows, n, device=device)

    def launch(i: int) -> object:
        return _dot_kernel[(n // 64,)](weights[i % count], x, out, rows, N=n, K=k, num_warps=4, num_stages=4)

    return launch
