"""Queries and keys of the indexer: rotate, and in the rounded contract Hadamard and e2m1 (model.md 3.5, 4.3)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference._hadamard import hadamard
from dsv4nb_kernels.reference._rotary import rotate_tail


def index_rows(x: Tensor, cos: Tensor, sin: Tensor, *, index_fp4: bool) -> Tensor:
    """Make the rows whose products are the index scores.

    Args:
        x: [R, Hi, d] queries, or keys with Hi = 1; keys come normalised.
        cos, sin: [R, rd].
        index_fp4: rotate by the Hadamard matrix and round to e2m1 in blocks of 32. The matrix is orthogonal,
            so without the rounding it is left out.
    """
    x = rotate_tail(x, cos[:, None], sin[:, None])
    return round_fp4(hadamard(x)) if index_fp4 else x
