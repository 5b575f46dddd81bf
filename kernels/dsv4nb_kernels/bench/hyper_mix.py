"""The boundary between two sublayers of V4-Flash, and the head's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import hyper_mix
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.hyper_mix import COEFFICIENTS, STREAMS, Boundary, HyperWeights, Tuning
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference.hyper_mix import balance, hyper_collapse, hyper_expand

OP = "hyper_mix"
HIDDEN, ITERATIONS, EPS = 4096, 20, 1e-6
# parts of the sublayer's output, and coefficients: behind wo_b on one GPU, behind the halves of a pair, before the head
SHAPES = {"boundary": (4, COEFFICIENTS), "boundary, pair": (8, COEFFICIENTS), "head": (4, STREAMS)}
ROWS = (1, 2, 4, 6)
SWEPT_ROWS = (1, 6)
CUTS = [
    Tuning(channels=channels, warps=(first, second), eager=eager)
    for channels, first, second in (
        (256, 8, 4), (256, 8, 2), (256, 4, 4), (256, 4, 2), (512, 8, 4), (128, 8, 4), (128, 4, 4), (128, 4, 2),
        (64, 4, 4),
    )
    for eager in (False, True)
]  # fmt: skip
LIMIT = 5e-3  # collapsed and normalised rows are rounded to bfloat16


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape and T, and the other cuts at T = 1 and 6."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    product = hyper_mix.TUNING

    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=SHAPES[shape][1] * STREAMS * HIDDEN * 4,
            make=partial(_make, device, shape, rows, cut, dependent),
            compile=partial(_compile, shape, cut, dependent),
            check=partial(_check, device, shape, rows, cut),
            is_product=cut == product and dependent,
        )

    yield arm(product)
    if rows in SWEPT_ROWS and shape == "boundary":
        yield from (arm(cut) for cut in CUTS if cut != product)
        yield arm(product, dependent=False)


def _compile(shape: str, cut: Tuning, dependent: bool) -> None:
    splits, n = SHAPES[shape]
    f32, bf16 = torch.float32, torch.bfloat16
    hyper_mix._expand_kernel.warmup(
        f32, bf16, f32, f32, f32, bf16, f32, 1, *[f32] * 4, 0, grid=(1,), num_warps=cut.warps[0], launch_pdl=dependent,
        **hyper_mix.expand_constants(HIDDEN, n, splits, cut, dependent=dependent),
    )  # fmt: skip
    hyper_mix._collapse_kernel.warmup(
        bf16, f32, f32, f32, f32, bf16, torch.float16, f32, f32, f32, bf16, f32, EPS, EPS, grid=(1,),
        num_warps=cut.warps[1], launch_pdl=dependent,
        **hyper_mix.collapse_constants(HIDDEN, cut, ITERATIONS, True, dependent=dependent),
    )  # fmt: skip


def _step(
    device: torch.device, shape: str, rows: int, count: int, channels: int
) -> tuple[Tensor, Tensor, Boundary, list[HyperWeights]]:
    splits, n = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    before = Boundary.empty(rows, HIDDEN, device, channels)
    before.post.uniform_(0, 2, generator=generator)
    before.comb.copy_(balance(draw(rows, STREAMS, STREAMS), ITERATIONS, EPS))
    fn = draw(count, n, STREAMS * HIDDEN).mul_(HIDDEN**-0.5)
    scale, base, norm = torch.full((n,), 0.7, device=device), draw(n), draw(HIDDEN) + 1
    weights = [HyperWeights(fn=fn[i], scale=scale, base=base, norm=norm) for i in range(count)]
    return draw(splits, rows, HIDDEN), draw(rows, STREAMS, HIDDEN).bfloat16(), before, weights


def _make(device: torch.device, shape: str, rows: int, cut: Tuning, dependent: bool, count: int) -> Launch:
    y, stream, before, weights = _step(device, shape, rows, count, cut.channels)
    out = Boundary.empty(rows, HIDDEN, device, cut.channels)

    def launch(i: int) -> Boundary:
        return hyper_mix.launch(
            y, stream, before, weights[i % count], cut, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS, act_fp8=True,
            out=out, dependent=dependent,
        )  # fmt: skip

    return launch


def _check(device: torch.device, shape: str, rows: int, cut: Tuning) -> None:
    y, stream, before, weights = _step(device, shape, 8, 1, cut.channels)
    out = hyper_mix.launch(
        y, stream, before, weights[0], cut, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS, act_fp8=True
    )
    added = y[0]
    for part in y[1:]:
        added = added + part
    exact = hyper_expand(added.bfloat16().double(), stream.double(), before.post.double(), before.comb.double())
    require_close(out.stream.flatten(1), exact.flatten(1), LIMIT)
    fn, scale, base = (t[:STREAMS].double() for t in (weights[0].fn, weights[0].scale, weights[0].base))
    collapsed = hyper_collapse(out.stream.double(), fn, scale, base, hc_eps=EPS, norm_eps=EPS)
    require_close(out.x, rms_norm(collapsed, weights[0].norm.double(), EPS), LIMIT)
