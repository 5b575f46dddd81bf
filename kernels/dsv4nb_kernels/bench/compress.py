"""The compressors of V4-Flash behind their products: steps that end windows, and one that ends none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4nb_kernels import bf16_rows, compress
from dsv4nb_kernels._kv_records import record_bytes
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference._records import unpack_records
from dsv4nb_kernels.reference.compress import compress as twin

OP = "compress"
WIDTH, TAIL, EPS = 512, 64, 1e-6
# ratio, halves, and the position of a step's last row in its window
SHAPES = {"4": (4, 2, 3), "128": (128, 1, 127), "128, none": (128, 1, 63)}
ROWS = (1, 2, 4, 6)
FEW = 16  # copies: the product has just been written when it is read
LIMIT = 3e-2  # entries are rounded to e4m3


def arms(device: torch.device) -> list[Arm]:
    """Return the product on every shape and T; one launch after the other ends, too."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _splits(shape: str) -> int:
    return bf16_rows.tuning(2 * SHAPES[shape][1] * WIDTH, 4096).splits


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    _, halves, _ = SHAPES[shape]
    for dependent in (True, False):
        yield Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name="dependent" if dependent else "not dependent",
            bytes_read=4 * rows * _splits(shape) * 2 * halves * WIDTH,
            make=partial(_make, device, shape, rows, dependent),
            compile=partial(_compile, shape, dependent),
            check=partial(_check, device, shape, rows),
            is_product=dependent,
            copies=FEW,
        )


def _held(shape: str) -> int:
    ratio, halves, _ = SHAPES[shape]
    return ratio * halves + 8


def _compile(shape: str, dependent: bool) -> None:
    ratio, halves, _ = SHAPES[shape]
    f32, i32, held = torch.float32, torch.int32, _held(shape)
    compress._source_kernel.warmup(
        f32, f32, i32, f32, 1, grid=(1,), num_warps=compress.SOURCE_WARPS, launch_pdl=dependent,
        **compress.source_constants(ratio, held, 2 * halves * WIDTH, WIDTH, _splits(shape), dependent),
    )  # fmt: skip
    compress._pool_kernel.warmup(
        i32, f32, f32, f32, f32, torch.uint8, EPS, grid=(1,), num_warps=compress.pool_warps(ratio, halves),
        launch_pdl=dependent,
        **compress.pool_constants(ratio, halves, held, WIDTH, TAIL, "kv", dependent),
    )  # fmt: skip


def _step(device: torch.device, shape: str, rows: int, count: int) -> tuple[Tensor, dict[str, Any]]:
    ratio, halves, last = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    line = 2 * halves * WIDTH
    position = 8 * ratio + last - rows + 1
    return draw(count, _splits(shape), rows, line), {
        "offset": draw(ratio, line),
        "position": torch.tensor([position], dtype=torch.int32, device=device),
        "ring": draw(_held(shape), line),
        "norm": torch.ones(WIDTH, device=device),
        "cos": torch.ones(rows, TAIL, device=device),
        "sin": torch.zeros(rows, TAIL, device=device),
        "entries": torch.zeros(16, record_bytes(WIDTH, TAIL), dtype=torch.uint8, device=device),
    }


def _make(device: torch.device, shape: str, rows: int, dependent: bool, count: int) -> Launch:
    products, rest = _step(device, shape, rows, count)
    return lambda i: compress.compress(products[i % count], **rest, eps=EPS, rounding="kv", dependent=dependent)


def _check(device: torch.device, shape: str, rows: int) -> None:
    ratio, halves, last = SHAPES[shape]
    products, rest = _step(device, shape, rows, 1)
    compress.compress(products[0], **rest, eps=EPS, rounding="kv")
    if last != ratio - 1:
        assert not rest["entries"].any(), "an entry for a window that has not ended"
        return
    # the step's rows are in the ring by now
    ends = int(rest["position"]) + rows
    places = torch.arange(ends - halves * ratio, ends, device=device) % _held(shape)
    values, scores = rest["ring"][places].double().chunk(2, -1)
    if halves == 2:
        values, scores = (torch.cat((t[:ratio, :WIDTH], t[ratio:, WIDTH:])) for t in (values, scores))
    exact = rms_norm(twin(values[None], scores[None]), rest["norm"].double(), EPS)
    require_close(unpack_records(rest["entries"][8:9], WIDTH, TAIL), exact, LIMIT)
