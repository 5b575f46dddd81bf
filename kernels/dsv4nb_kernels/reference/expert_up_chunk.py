"""The experts' gate and up projections of a chunk and their clamped SwiGLU (model.md 3.6)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_up import clamped_swiglu
from dsv4nb_kernels.reference.fp8_rows import ACTIVATION_BLOCK


class Matrices(Protocol):
    """A tensor of matrices, or what makes them one at a time."""

    def __getitem__(self, expert: int, /) -> Tensor: ...


def expert_up_chunk(
    x: Tensor, experts: Tensor, weights: Tensor, up: Matrices, *, limit: float, act_fp8: bool
) -> Tensor:
    """Run the upper halves of the chosen experts and of the shared one.

    Args:
        x: [T, D].
        experts: [T, K] int64, who each row chose.
        weights: [T, K], the routing weights; applied before the down projection.
        up: [E + 1, 2I, D], gate rows first, the shared expert last.
        limit: bound of the clamps.
        act_fp8: round `x` to e4m3 in blocks of 128 first.

    Returns:
        [T, K + 1, I]: a row's choices in the order of `experts`, then the shared expert.
    """
    source = round_fp8(x, ACTIVATION_BLOCK) if act_fp8 else x
    shared = clamped_swiglu(source @ up[-1].t(), limit)
    out = shared.new_empty(*experts.shape, shared.shape[1])
    for expert in experts.unique().tolist():
        row, choice = (experts == expert).nonzero(as_tuple=True)
        inner = clamped_swiglu(source[row] @ up[expert].t(), limit)
        out[row, choice] = inner * weights[row, choice, None]
    return torch.cat((out, shared[:, None]), dim=1)
