"""The best of a row: parts that programs leave, and the kernel that ends the search.

A candidate is one int64: above, its number as an integer that compares alike; below, its id with all bits turned round.
So the maximum of any grouping is the best, of equals the one of the lowest id. A NaN is above every number: the first
of them is the best, as numpy has it, and its value tells.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._launch import Limits, power_of_two, require_tensor, runs_ptx
from dsv4nb_kernels._order import ordered
from dsv4nb_kernels._turns import take_turn

IDS_MAX = 1 << 30
PARTS_MAX = 1 << 13  # of a row
WARPS = 4
EAGER = True  # the next kernel may start before this one has waited itself
LIMITS = Limits(registers=40, shared_bytes=32)

LAST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-0x8000000000000000)  # below every candidate
_NAN = tl.constexpr(0x7FFFFFFF)


class Best(NamedTuple):
    """The best of each row.

    Attributes:
        values: [T] float32; NaN where the row holds one.
        ids: [T] int32, of equals the lowest.
    """

    values: Tensor
    ids: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Best:
        """Return room for the best of so many rows."""
        return cls(torch.empty(rows, device=device), torch.empty(rows, dtype=torch.int32, device=device))

    def require(self, rows: int, device: torch.device) -> None:
        """Refuse room of another form.

        Raises:
            ValueError: it is not for so many rows, of another dtype, or elsewhere.
        """
        require_tensor(self.values, "out values", (rows,), torch.float32, device)
        require_tensor(self.ids, "out ids", (rows,), torch.int32, device)


class Scored(NamedTuple):
    """What one slice of the vocabulary says of a step.

    Attributes:
        logits: [T, N] float32.
        best: of each row; ids count the whole vocabulary.
    """

    logits: Tensor
    best: Best

    @classmethod
    def empty(cls, rows: int, n: int, device: torch.device) -> Scored:
        """Return room for rows of `n` logits."""
        return cls(torch.empty(rows, n, device=device), Best.empty(rows, device))

    def require(self, rows: int, n: int, device: torch.device) -> None:
        """Refuse room of another form.

        Raises:
            ValueError: it is not for so many rows and logits, of another dtype, or elsewhere.
        """
        require_tensor(self.logits, "out logits", (rows, n), torch.float32, device)
        self.best.require(rows, device)


@triton.jit
def candidates(b_x, o_id):
    """int64 of numbers and their ids."""
    b_key = tl.where(b_x == b_x, ordered(b_x), _NAN)
    return (b_key.to(tl.int64) << 32) | (o_id ^ LAST_ID).to(tl.int64)


@triton.jit
def candidate_id(b_candidate):
    """The id of a candidate."""
    return b_candidate.to(tl.int32) ^ LAST_ID


@triton.jit
def candidate_value(b_candidate):
    """The number of a candidate, NaN of a NaN."""
    b_key = (b_candidate >> 32).to(tl.int32)
    return tl.where(b_key < 0, b_key ^ 0x7FFFFFFF, b_key).to(tl.float32, bitcast=True)


@triton.jit
def _best_kernel(
    parts_ptr,  # [T, parts] int64
    values_ptr,  # [T] float32
    ids_ptr,  # [T] int32
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_part = tl.arange(0, BLOCK)
    take_turn(DEPENDENT, EAGER)
    best = tl.max(tl.load(parts_ptr + i_row * PARTS + o_part, mask=o_part < PARTS, other=NOTHING), axis=0)
    tl.store(values_ptr + i_row, candidate_value(best))
    tl.store(ids_ptr + i_row, candidate_id(best))


def find_best(parts: Tensor, out: Best, dependent: bool) -> None:
    """Write the best of each row of parts [T, P] int64."""
    rows, count = parts.shape
    is_ptx = runs_ptx(parts.device)
    _direct.call(
        _best_kernel,
        (rows,),
        parts,
        *out,
        **constants(count, dependent and is_ptx),
        **({"num_warps": WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )


def constants(parts: int, dependent: bool = True) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "PARTS": parts,
        "BLOCK": power_of_two(parts),
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }
