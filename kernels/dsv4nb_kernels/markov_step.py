"""The drafter's logits behind a token, and the best of them: the next draft. Twin: `reference.markov_step`.

Traffic    reads the N·r weights once for all rows; reads and writes T·N float32: bandwidth-bound
Grid       (N / rows,), then a program for each row of the step
Equality   the product has one shape whoever is there, 16 columns of which T are rows of the step, and every number of a
           column comes from that column: row i of a step is bitwise the row alone

A step needs the draft of the one before, so nothing of it can begin early but its weights: they are all on their way
before the wait. On one GPU of a pair they stay in the L2 from the first step of a round to the last.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _best, _direct
from dsv4nb_kernels._best import IDS_MAX, Scored, candidates
from dsv4nb_kernels._dots import COLUMNS, dot_bf16
from dsv4nb_kernels._launch import ROWS_MAX, Limits, power_of_two, require, require_tensor, runs_ptx
from dsv4nb_kernels._turns import take_turn

LIMITS = Limits(registers=40, shared_bytes=44 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the weights are cut; no part of it may depend on the number of rows.

    Attributes:
        rows: rows of the matrix in one program.
        warps: of one program.
        eager: whether the next kernel may start before this one has waited itself.
    """

    rows: int = 64
    warps: int = 4
    eager: bool = True

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.warps} warps" + ("" if self.eager else ", not eager")


TUNING = Tuning()  # measured on an H200, see kernels/README.md


@triton.jit(do_not_specialize=["T", "first_id"])
def _markov_kernel(
    base_ptr,  # [T, N] float32
    tokens_ptr,  # [T] int32
    in_ptr,  # [V, R] bfloat16
    out_ptr,  # [N, R] bfloat16
    logits_ptr,  # [T, N] float32
    parts_ptr,  # [T, N / ROWS] int64
    T,  # int, 1 … 8
    first_id,  # int, of the slice
    V,  # int
    N: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_program = tl.program_id(0)
    o_n = i_program * ROWS + tl.arange(0, ROWS)
    o_r = tl.arange(0, R)
    o_t = tl.arange(0, COLUMNS)
    m_t = o_t < T
    b_out = tl.load(out_ptr + o_n[:, None] * R + o_r[None, :])
    take_turn(DEPENDENT, EAGER)
    o_logit = o_t[None, :] * N + o_n[:, None]
    b_base = tl.load(base_ptr + o_logit, mask=m_t[None, :], other=0.0)
    # an id that is none, of a row without a finite best, must not be followed
    b_token = tl.minimum(tl.maximum(tl.load(tokens_ptr + o_t, mask=m_t, other=0), 0), V - 1)
    b_in = tl.load(in_ptr + b_token.to(tl.int64)[None, :] * R + o_r[:, None], mask=m_t[None, :], other=0.0)
    b_logit = b_base + dot_bf16(b_out, b_in, tl.zeros([ROWS, COLUMNS], tl.float32), TENSOR_CORES)
    tl.store(logits_ptr + o_logit, b_logit, mask=m_t[None, :])
    b_best = tl.max(candidates(b_logit, (first_id + o_n)[:, None]), axis=0)
    tl.store(parts_ptr + o_t * tl.num_programs(0) + i_program, b_best, mask=m_t)


def markov_step(
    base: Tensor,
    tokens: Tensor,
    markov_in: Tensor,
    markov_out: Tensor,
    first_id: int = 0,
    *,
    parts: Tensor | None = None,
    out: Scored | None = None,
    dependent: bool = False,
) -> Scored:
    """Add to each row what the token before it says of the next one, and find the best.

    Args:
        base: [T, N] float32, the drafter's logits of a slice of the vocabulary, T from 1 to 8.
        tokens: [T] int32, ids of the whole vocabulary; the best of the step before, where that is the draft.
        markov_in: [V, r] bfloat16, a line for each token; markov_out: [N, r] bfloat16, of the slice. r is a power of
            two from 16 to 512, N a multiple of the cut.
        first_id: of the slice's first logit.
        parts: [T, N / rows of the cut] int64, room between the kernels, for graph capture; allocated when None.
        out: destinations, for graph capture; allocated when None. The logits may be `base`.
        dependent: start before the kernel that writes `base` and `tokens` has ended: the weights are loaded, then it
            waits.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(base, tokens, markov_in, markov_out, first_id, TUNING, parts=parts, out=out, dependent=dependent)


def launch(
    base: Tensor,
    tokens: Tensor,
    markov_in: Tensor,
    markov_out: Tensor,
    first_id: int,
    cut: Tuning,
    *,
    parts: Tensor | None = None,
    out: Scored | None = None,
    dependent: bool = False,
    tensor_cores: bool | None = None,
) -> Scored:
    """`markov_step` with another cut: for benches and tests."""
    require(base.ndim == 2, "base must be [T, N]", tuple(base.shape))
    (rows, n), device = base.shape, base.device
    require(1 <= rows <= ROWS_MAX, f"base must have 1 to {ROWS_MAX} rows", rows)
    require(n > 0 and n % cut.rows == 0, f"base must have a multiple of {cut.rows} columns", n)
    require(n <= _best.PARTS_MAX * cut.rows, f"base must have at most {_best.PARTS_MAX * cut.rows} columns", n)
    require(0 <= first_id <= IDS_MAX - n, f"ids must be 0 to {IDS_MAX - 1}", first_id)
    require(markov_in.ndim == 2, "markov_in must be [V, r]", tuple(markov_in.shape))
    vocab, rank = markov_in.shape
    is_rank = 16 <= rank <= 512 and rank == power_of_two(rank)
    require(is_rank, "r must be a power of two from 16 to 512", rank)
    require(1 <= vocab <= IDS_MAX, f"markov_in must have 1 to {IDS_MAX} lines", vocab)
    require_tensor(base, "base", (rows, n), torch.float32)
    require_tensor(tokens, "tokens", (rows,), torch.int32, device)
    require_tensor(markov_in, "markov_in", (vocab, rank), torch.bfloat16, device)
    require_tensor(markov_out, "markov_out", (n, rank), torch.bfloat16, device)
    if parts is None:
        parts = torch.empty(rows, n // cut.rows, dtype=torch.int64, device=device)
    require_tensor(parts, "parts", (rows, n // cut.rows), torch.int64, device)
    out = Scored.empty(rows, n, device) if out is None else out
    out.require(rows, n, device)
    is_ptx = runs_ptx(device)
    by_cores = is_ptx if tensor_cores is None else tensor_cores
    _direct.call(
        _markov_kernel, (n // cut.rows,),
        base, tokens, markov_in, markov_out, out.logits, parts, rows, first_id, vocab,
        **constants(n, rank, cut, dependent and is_ptx, by_cores),
        **({"num_warps": cut.warps, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    _best.find_best(parts, out.best, dependent)
    return out


def constants(
    n: int, rank: int, cut: Tuning, dependent: bool = True, tensor_cores: bool = True
) -> dict[str, int | bool]:
    """Return the step's compile-time arguments."""
    return {
        "N": n,
        "R": rank,
        "ROWS": cut.rows,
        "COLUMNS": COLUMNS,
        "TENSOR_CORES": tensor_cores,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }
