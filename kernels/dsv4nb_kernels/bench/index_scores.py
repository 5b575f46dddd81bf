"""The indexer of V4-Flash: scores over all entries of a long context."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import index_scores
from dsv4nb_kernels.bench._driver import Arm, Launch
from dsv4nb_kernels.index_scores import Tuning
from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference.index_scores import index_scores as twin

OP = "index_scores"
HEADS, WIDTH, SPLITS = 64, 128, 8
SHAPES = {"16384": 16384, "65536": 65536}
ROWS = (1, 2, 4, 6)
SWEPT_ROWS = (1, 6)
CUTS = [
    Tuning(keys=keys, warps=warps, stages=stages, rows=rows, eager=eager)
    for keys, warps, stages, rows in (
        (128, 4, 1, 1), (128, 4, 1, 2), (128, 4, 1, 3), (128, 4, 1, 8), (128, 4, 2, 8), (128, 4, 3, 8), (64, 4, 1, 2),
        (128, 8, 1, 2),
    )
    for eager in (False, True)
]  # fmt: skip
ROUNDING = 1e-6  # of the sum of a score's terms without their signs


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape and T, and the other cuts at T = 1 and 6."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    count = SHAPES[shape]
    product = index_scores.tuning(rows, count)

    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=count * WIDTH * 2,
            make=partial(_make, device, count, rows, cut, dependent),
            compile=partial(compile_scores, cut, dependent),
            check=partial(_check, device, rows, cut),
            is_product=cut == product and dependent,
        )

    yield arm(product)
    if rows in SWEPT_ROWS:
        yield from (arm(cut) for cut in CUTS if cut != product)
        yield arm(product, dependent=False)


def compile_scores(cut: Tuning, dependent: bool) -> None:
    """Fill Triton's cache."""
    bf16, f32 = torch.bfloat16, torch.float32
    index_scores._index_scores_kernel.warmup(
        bf16, bf16, f32, torch.int32, f32, 1, 128, grid=(1,), num_warps=cut.warps, launch_pdl=dependent,
        **index_scores.constants(HEADS, WIDTH, SPLITS, cut, dependent),
    )  # fmt: skip


def draw_step(device: torch.device, count: int, rows: int, copies: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys of so many copies, weights of the heads, and how many entries are visible: all."""
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    keys = torch.stack([round_fp4(draw(count, WIDTH)).bfloat16() for _ in range(copies)])
    visible = torch.full((rows,), count, dtype=torch.int32, device=device)
    return round_fp4(draw(rows, HEADS, WIDTH)).bfloat16(), keys, draw(SPLITS, rows, HEADS), visible


def _make(device: torch.device, count: int, rows: int, cut: Tuning, dependent: bool, copies: int) -> Launch:
    query, keys, weights, visible = draw_step(device, count, rows, copies)
    out = torch.empty(rows, count, device=device)
    return lambda i: index_scores.launch(query, keys[i % copies], weights, visible, cut, out=out, dependent=dependent)


def _check(device: torch.device, rows: int, cut: Tuning) -> None:
    query, keys, weights, visible = draw_step(device, 4096, rows, 1)
    scores = index_scores.launch(query, keys[0], weights, visible, cut)
    added = weights[0]
    for part in weights[1:]:
        added = added + part
    given = query.double(), keys[0].double()
    error = (scores.double() - twin(*given, added.double())).abs()
    assert bool((error <= ROUNDING * twin(*given, added.double().abs())).all()), "scores differ from the twin's"
