"""The chosen experts' down projections and their sum (model.md 3.6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._tiles import TILE
from dsv4nb_kernels.reference.expert_up import Span
from dsv4nb_kernels.reference.fp8_rows import ACTIVATION_BLOCK


def expert_down(inner: Tensor, places: Tensor, down: Tensor, spans: Sequence[Span], *, act_fp8: bool) -> Tensor:
    """Run each expert's lower half on its tiles and add up what belongs to one row.

    Args:
        inner: [n, 8, I], weighted.
        places: [R, k] int64, where in the n·8 rows the k contributions to each row stand; added from left to right.
        down: [E, D, I]; spans: as in `expert_up`.
        act_fp8: round `inner` to e4m3 in blocks of 128 first.

    Returns:
        [R, D].
    """
    if act_fp8:
        inner = round_fp8(inner, ACTIVATION_BLOCK)
    out = inner.new_empty(inner.shape[0], TILE, down.shape[1])
    for expert, first, last in spans:
        torch.bmm(inner[first:last], down[expert].t().expand(last - first, -1, -1), out=out[first:last])
    flat = out.flatten(0, 1)
    total = flat[places[:, 0]]
    for column in range(1, places.shape[1]):
        total += flat[places[:, column]]
    return total
