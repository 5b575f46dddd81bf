"""A chunk's rows on the bfloat16 matrices of V4-Flash: compressors, router, index weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import bf16_chunk
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close
from dsv4nb_kernels.bf16_chunk import Tuning
from dsv4nb_kernels.bf16_rows import Bf16Matrix, unpack

OP = "bf16_chunk"
ROWS = 2048
WIDTH = 4096
# N and other cuts
SHAPES = {
    "compress 4": (2048, (Tuning(), Tuning(columns=256, stages=3), Tuning(warps=4, stages=3))),
    "compress 128": (
        1024,
        (Tuning(columns=256, splits=2, stages=3), Tuning(rows=64, columns=128, warps=4), Tuning(depth=128, stages=3)),
    ),
    "index kv": (512, (Tuning(columns=64), Tuning(splits=2, stages=3), Tuning(rows=64, columns=128, warps=4))),
    "gate": (256, (Tuning(columns=64, splits=2), Tuning(rows=64, warps=4, splits=2), Tuning(splits=2))),
    "index heads": (64, (Tuning(rows=64, columns=64, warps=4, splits=4), Tuning(columns=64, warps=4, splits=4))),
}
LIMIT = 3e-5


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every matrix, other cuts and the peer."""
    return [arm for name in SHAPES for arm in _own(device, name)]


def _own(device: torch.device, name: str) -> Iterator[Arm]:
    n, cuts = SHAPES[name]
    product = bf16_chunk.tuning(n, WIDTH)
    for cut in dict.fromkeys((product, *cuts)):
        yield Arm(
            op=OP,
            shape=name,
            rows=ROWS,
            name=str(cut),
            bytes_read=2 * (n + ROWS) * WIDTH,
            make=partial(_make, device, n, cut),
            compile=partial(_compile, n, cut),
            check=partial(_check, device, n, cut),
            is_product=cut == product,
        )
    yield Arm(
        op=OP,
        shape=name,
        rows=ROWS,
        name="torch.mm",
        bytes_read=2 * (n + ROWS) * WIDTH,
        make=partial(_make_peer, device, n),
        is_peer=True,
    )


def _compile(n: int, cut: Tuning) -> None:
    bf16_chunk._bf16_chunk_kernel.warmup(
        torch.bfloat16, torch.bfloat16, torch.float32, 1, grid=(1,), num_warps=cut.warps, launch_pdl=True,
        **bf16_chunk.constants(n, WIDTH, cut),
    )  # fmt: skip


def matrices(device: torch.device, n: int, count: int) -> list[Bf16Matrix]:
    """Random bits with exponents from 2^-64 to 1."""
    words = random_words(device, count * n * WIDTH // 2, ~0x40004000).view(count, -1)
    return [Bf16Matrix(words=words[i], n=n, k=WIDTH) for i in range(count)]


def _rows(device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator, device=device).bfloat16()


def _make(device: torch.device, n: int, cut: Tuning, count: int) -> Launch:
    weights, x = matrices(device, n, count), _rows(device)
    out = torch.empty(cut.splits, ROWS, n, device=device)
    return lambda i: bf16_chunk.launch(x, weights[i % count], cut, out=out, dependent=True)


def _make_peer(device: torch.device, n: int, count: int) -> Launch:
    weights = [unpack(matrix).t() for matrix in matrices(device, n, count)]
    x, out = _rows(device), torch.empty(ROWS, n, dtype=torch.bfloat16, device=device)
    return lambda i: torch.mm(x, weights[i % count], out=out)


def _check(device: torch.device, n: int, cut: Tuning) -> None:
    matrix, x = matrices(device, n, 1)[0], _rows(device)
    exact = x.double() @ unpack(matrix).double().t()
    require_close(bf16_chunk.launch(x, matrix, cut).double().sum(0), exact, LIMIT)
