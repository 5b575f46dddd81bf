"""The number formats the network was trained through, with straight-through gradients (model.md 4.2, 4.3).

Independent of the twins in `dsv4nb_kernels.reference`: the engine is tested against this package.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def _e2m1(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the e2m1 values and the midpoints between them; kept per device so that a graph can be captured."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    return values, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)


def pow2_at_least(x: Tensor) -> Tensor:
    """Return the smallest power of two >= x, elementwise, for positive normal float32."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2**exponent with mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def nearest_e2m1(x: Tensor) -> Tensor:
    """Round values in [-6, 6] to the e2m1 grid, ties to the even code."""
    size = x.abs()
    values, edges = _e2m1(x.device)
    above, at_or_above = torch.bucketize(size, edges), torch.bucketize(size, edges, right=True)
    # bucketize differs only on an edge, where code n meets n + 1: the even one of them wins
    code = torch.where(above % 2 == 0, above, at_or_above)
    return torch.copysign(values[code], x)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of `x`."""
    return x + (rounded - x).detach() if x.requires_grad else rounded


def fp8_blocks(x: Tensor, block: int) -> Tensor:
    """Round trailing blocks to e4m3 with one power-of-two scale each; float32 in and out."""
    groups = x.detach().unflatten(-1, (-1, block))
    scale = pow2_at_least(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1 / 448))
    rounded = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return straight_through(x, rounded.flatten(-2))


def fp4_blocks(x: Tensor, block: int = 32) -> Tensor:
    """Round trailing blocks to e2m1 with one power-of-two scale each; float32 in and out."""
    groups = x.detach().unflatten(-1, (-1, block))
    scale = pow2_at_least(groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) * (1 / 6))
    rounded = nearest_e2m1((groups / scale).clamp(-6, 6)) * scale
    return straight_through(x, rounded.flatten(-2))


def fp8_tiles(weight: Tensor) -> Tensor:
    """Round a matrix [N, K] to e4m3 with one power-of-two scale per 128x128 tile."""
    rows, cols = weight.shape
    tiles = weight.detach().view(rows // 128, 128, cols // 128, 128)
    scale = pow2_at_least(tiles.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / 448)
    rounded = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return straight_through(weight, rounded.view(rows, cols))


def bf16(x: Tensor) -> Tensor:
    """Round to bfloat16, kept as float32."""
    return straight_through(x, x.detach().bfloat16().float())


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last axis in Sylvester order, scaled to be orthogonal."""
    width = x.shape[-1]
    matrix: Tensor = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix * width**-0.5
    return x @ scaled
