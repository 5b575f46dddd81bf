"""Norms and rotations of V4-Flash: the low rows with the key/value row, and the heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import fp8_rows, norm_rope_write
from dsv4nb_kernels._kv_records import record_bytes
from dsv4nb_kernels._rounded_rows import RoundedRows
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference.norm_rope_write import norm_rope_heads as twin

OP = "norm_rope_write"
LATENT, WIDTH, TAIL, EPS, RING = 1024, 512, 64, 1e-6, 256
SPLITS = fp8_rows.tuning(LATENT + WIDTH, 4096).splits
HEADS = {"heads half": 32, "heads": 64}
SHAPES = ("rows", *HEADS)
ROWS = (1, 2, 4, 6)
FEW = 16  # copies: the product has just been written when it is read
LIMIT = 5e-2  # the low rows are rounded to e4m3
BF16_LIMIT = 5e-3


def arms(device: torch.device) -> list[Arm]:
    """Return the product on every shape and T; one launch after the other ends, too."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    for dependent in (True, False):
        yield Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name="dependent" if dependent else "not dependent",
            bytes_read=4 * rows * (SPLITS * (LATENT + WIDTH) if shape == "rows" else HEADS[shape] * WIDTH),
            make=partial(_make, device, shape, rows, dependent),
            compile=partial(_compile, shape, dependent),
            check=partial(_check, device, shape, rows),
            is_product=dependent,
            copies=FEW,
        )


def _compile(shape: str, dependent: bool) -> None:
    f32, f16 = torch.float32, torch.float16
    if shape == "rows":
        norm_rope_write._norm_rope_rows_kernel.warmup(
            f32, f32, f32, f32, f32, torch.int32, f16, f32, torch.uint8, EPS, grid=(1,), launch_pdl=dependent,
            num_warps=norm_rope_write.WARPS["rows"],
            **norm_rope_write.rows_constants(LATENT, WIDTH, TAIL, SPLITS, True, True, dependent=dependent),
        )  # fmt: skip
    else:
        norm_rope_write._norm_rope_heads_kernel.warmup(
            f32, f32, f32, torch.bfloat16, EPS, grid=(1,), launch_pdl=dependent,
            num_warps=norm_rope_write.WARPS["heads"],
            **norm_rope_write.heads_constants(HEADS[shape], WIDTH, TAIL, 1, dependent),
        )  # fmt: skip


def _angles(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, TAIL // 2, device=device) * 6
    return angle.cos().repeat_interleave(2, -1), torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)


def _launch_on(device: torch.device, shape: str, rows: int, dependent: bool, products: Tensor) -> Launch:
    cos, sin = _angles(device, rows)
    if shape == "rows":
        norms = torch.ones(LATENT, device=device), torch.ones(WIDTH, device=device)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        ring = torch.zeros(RING, record_bytes(WIDTH, TAIL), dtype=torch.uint8, device=device)
        latent = RoundedRows.empty(rows, LATENT, device)
        return lambda i: norm_rope_write.norm_rope_rows(
            products[i % len(products)], *norms, cos, sin, slots, ring, eps=EPS, act_fp8=True, kv_fp8=True, out=latent,
            dependent=dependent,
        )  # fmt: skip
    heads = HEADS[shape]
    out = torch.empty(rows, heads, WIDTH, dtype=torch.bfloat16, device=device)
    return lambda i: norm_rope_write.norm_rope_heads(
        products[i % len(products)], cos, sin, heads=heads, eps=EPS, out=out, dependent=dependent
    )


def _products(device: torch.device, shape: str, rows: int, count: int) -> Tensor:
    size = (SPLITS, rows, LATENT + WIDTH) if shape == "rows" else (1, rows, HEADS[shape] * WIDTH)
    return torch.randn(count, *size, generator=torch.Generator(device).manual_seed(rows), device=device)


def _make(device: torch.device, shape: str, rows: int, dependent: bool, count: int) -> Launch:
    return _launch_on(device, shape, rows, dependent, _products(device, shape, rows, count))


def _check(device: torch.device, shape: str, rows: int) -> None:
    products = _products(device, shape, rows, 1)
    out = _launch_on(device, shape, rows, False, products)(0)
    exact = products[0].sum(0).bfloat16().double()
    if isinstance(out, RoundedRows):
        found = out.codes.double() * out.scales[:, :rows].t().double().repeat_interleave(128, 1)
        require_close(found, rms_norm(exact[:, :LATENT], torch.ones(LATENT, device=device).double(), EPS), LIMIT)
    elif isinstance(out, Tensor):
        still = torch.ones(rows, TAIL, device=device).double(), torch.zeros(rows, TAIL, device=device).double()
        heads = twin(exact.unflatten(-1, (-1, WIDTH)), *still, eps=EPS)
        require_close(out[..., :-TAIL].flatten(1), heads[..., :-TAIL].flatten(1), BF16_LIMIT)
