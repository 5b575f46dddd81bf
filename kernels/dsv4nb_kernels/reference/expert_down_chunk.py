"""The experts' down projections of a chunk and their sum (model.md 3.6)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.expert_up_chunk import Matrices
from dsv4nb_kernels.reference.fp8_rows import ACTIVATION_BLOCK


def expert_down_chunk(inner: Tensor, experts: Tensor, down: Matrices, *, act_fp8: bool) -> Tensor:
    """Run the lower halves of the chosen experts and of the shared one, and add them up for each row.

    Args:
        inner: [T, K + 1, I] from `expert_up_chunk`.
        experts: [T, K] int64, who each row chose.
        down: [E + 1, D, I], the shared expert last.
        act_fp8: round `inner` to e4m3 in blocks of 128 first.

    Returns:
        [T, D]: the shared expert, then the chosen ones by ascending id.
    """
    source = round_fp8(inner, ACTIVATION_BLOCK) if act_fp8 else inner
    total = source[:, -1] @ down[-1].t()
    for expert in experts.unique().tolist():
        row, choice = (experts == expert).nonzero(as_tuple=True)
        total[row] += source[row, choice] @ down[expert].t()
    return total
