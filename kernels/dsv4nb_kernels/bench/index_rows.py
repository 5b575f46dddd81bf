"""The indexer's queries of V4-Flash behind their product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import index_rows
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference._hadamard import hadamard
from dsv4nb_kernels.reference.index_rows import index_rows as twin

OP = "index_rows"
HEADS, WIDTH, TAIL = 64, 128, 64
ROWS = (1, 2, 4, 6)
FEW = 16  # copies: the product has just been written when it is read
LIMIT = 2e-2  # of a row's length: a value beside a boundary goes a step of e2m1 further


def arms(device: torch.device) -> list[Arm]:
    """Return the product at every T; one launch after the other ends, too."""
    return [arm for rows in ROWS for arm in _own(device, rows)]


def _own(device: torch.device, rows: int) -> Iterator[Arm]:
    for dependent in (True, False):
        yield Arm(
            op=OP,
            shape=f"{HEADS}x{WIDTH}",
            rows=rows,
            name="dependent" if dependent else "not dependent",
            bytes_read=4 * rows * HEADS * WIDTH,
            make=partial(_make, device, rows, dependent),
            compile=partial(_compile, dependent),
            check=partial(_check, device, rows),
            is_product=dependent,
            copies=FEW,
        )


def _compile(dependent: bool) -> None:
    f32 = torch.float32
    index_rows._index_rows_kernel.warmup(
        f32, f32, f32, torch.bfloat16, 1, grid=(1,), num_warps=index_rows.WARPS, launch_pdl=dependent,
        **index_rows.constants(HEADS, WIDTH, TAIL, 1, True, dependent=dependent),
    )  # fmt: skip


def _step(device: torch.device, rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(rows)
    angle = torch.rand(rows, TAIL // 2, generator=generator, device=device) * 6
    products = torch.randn(count, 1, rows, HEADS * WIDTH, generator=generator, device=device)
    return products, angle.cos().repeat_interleave(2, -1), torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)


def _make(device: torch.device, rows: int, dependent: bool, count: int) -> Launch:
    products, cos, sin = _step(device, rows, count)
    out = torch.empty(rows, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
    return lambda i: index_rows.index_rows(
        products[i % count], cos, sin, heads=HEADS, index_fp4=True, out=out, dependent=dependent
    )


def _check(device: torch.device, rows: int) -> None:
    products, cos, sin = _step(device, rows, 1)
    out = index_rows.index_rows(products[0], cos, sin, heads=HEADS, index_fp4=True)
    products, cos, sin = products.cpu(), cos.cpu(), sin.cpu()
    x = products[0, 0].bfloat16().float().unflatten(-1, (HEADS, WIDTH))
    turned = twin(x, cos, sin, index_fp4=False).bfloat16().float()
    exact = round_fp4(hadamard(turned).bfloat16().float())
    require_close(out.cpu().flatten(1), exact.double().flatten(1), LIMIT)
