"""Logits of a slice of the vocabulary, their best, and what a panel shows of them. Twin: `reference.head_argmax`.

Traffic    reads the N·K weights once, as the checkpoint has them; writes T·N float32: bandwidth-bound
Grid       (N / rows,), then a program for each row of the step, and one more for the panel
Equality   the product has one shape whoever is there, 16 columns of which T are rows of the step, and every number of a
           column comes from that column: row i of a step is bitwise the row alone. The best is a maximum of integers

Each program leaves the best of its rows of the matrix, as one integer (`_best`), and their sum of exponentials. The k
best of a row stand in the k parts whose best are the best, so the panel looks at those alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _best, _direct
from dsv4nb_kernels._best import IDS_MAX, NOTHING, Scored, candidate_id, candidate_value, candidates
from dsv4nb_kernels._dots import COLUMNS, dot_bf16
from dsv4nb_kernels._launch import ROWS_MAX, Limits, power_of_two, require, require_tensor, runs_ptx
from dsv4nb_kernels._turns import take_turn

PANEL_MAX = 20  # k
PANEL_WARPS = 4
PANEL_EAGER = True  # the next kernel may start before this one has waited itself
LIMITS = {
    "head": Limits(registers=64, shared_bytes=81 * 1024),
    "panel": Limits(registers=64, shared_bytes=128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the product is cut; no part of it may depend on the number of rows.

    Attributes:
        rows: rows of the matrix in one program.
        step: k of one product.
        stages: products whose operands are on their way at a time.
        warps: of one program.
        fresh: whether every product starts from zero and is added in float32.
        eager: whether the next kernel may start before this one has waited itself.
    """

    rows: int = 64
    step: int = 128
    stages: int = 4
    warps: int = 4
    fresh: bool = True
    eager: bool = True

    def __str__(self) -> str:
        name = f"{self.rows} rows x {self.step} k, {self.stages} stages, {self.warps} warps"
        return name + ("" if self.fresh else ", one sum") + ("" if self.eager else ", not eager")


TUNING = Tuning()  # measured on an H200, see kernels/README.md


class Panel(NamedTuple):
    """What a panel shows of one slice of the vocabulary.

    Attributes:
        values, ids: [T, k] float32 and int32, the best first; of equals the lowest id first.
        log_sums: [T] float32, log of the sum of exponentials of the slice.
    """

    values: Tensor
    ids: Tensor
    log_sums: Tensor

    @classmethod
    def empty(cls, rows: int, k: int, device: torch.device) -> Panel:
        """Return room for the `k` best of so many rows."""
        values, log_sums = torch.empty(rows, k, device=device), torch.empty(rows, device=device)
        return cls(values, torch.empty(rows, k, dtype=torch.int32, device=device), log_sums)


class Parts(NamedTuple):
    """What the programs of a row leave: candidates [T, P] int64, and [T, P] float32 the sums of exponentials over them.

    P is N / rows of the cut.
    """

    best: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, rows: int, n: int, device: torch.device, cut: Tuning = TUNING) -> Parts:
        """Return room for rows of `n` logits."""
        shape = rows, n // cut.rows
        return cls(torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, device=device))

    def require(self, rows: int, n: int, device: torch.device, cut: Tuning) -> None:
        """Refuse room of another form.

        Raises:
            ValueError: it is not for so many rows and logits, of another dtype, or elsewhere.
        """
        require_tensor(self.best, "parts best", (rows, n // cut.rows), torch.int64, device)
        require_tensor(self.sums, "parts sums", (rows, n // cut.rows), torch.float32, device)


@triton.jit(do_not_specialize=["T", "first_id"])
def _head_kernel(
    x_ptr,  # [T, K] bfloat16
    weight_ptr,  # [N, K] bfloat16
    logits_ptr,  # [T, N] float32
    parts_ptr,  # [T, N / ROWS] int64
    sums_ptr,  # [T, N / ROWS] float32
    T,  # int, 1 … 8
    first_id,  # int, of the slice
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    FRESH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_program = tl.program_id(0)
    o_n = i_program * ROWS + tl.arange(0, ROWS)
    o_t = tl.arange(0, COLUMNS)
    o_k = tl.arange(0, STEP)
    m_t = o_t < T
    p_weight = weight_ptr + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    p_x = x_ptr + o_t[None, :] * K + o_k[:, None]
    take_turn(DEPENDENT, EAGER)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K, STEP):
        b_weight = tl.load(p_weight + k, eviction_policy="evict_first")
        b_x = tl.load(p_x + k, mask=m_t[None, :], other=0.0)
        if FRESH:
            # added by the tensor cores, each of K / 16 sums would lose what is below its last bit, always downwards
            b_product = dot_bf16(b_weight, b_x, tl.zeros([ROWS, COLUMNS], tl.float32), TENSOR_CORES)
            acc = tl.fma(b_product, tl.full([ROWS, COLUMNS], 1.0, tl.float32), acc)
        else:
            acc = dot_bf16(b_weight, b_x, acc, TENSOR_CORES)
    tl.store(logits_ptr + o_t[None, :] * N + o_n[:, None], acc, mask=m_t[None, :])
    b_best = tl.max(candidates(acc, (first_id + o_n)[:, None]), axis=0)
    o_part = o_t * tl.num_programs(0) + i_program
    tl.store(parts_ptr + o_part, b_best, mask=m_t)
    b_sum = tl.sum(tl.exp(acc - candidate_value(b_best)[None, :]), axis=0)
    tl.store(sums_ptr + o_part, b_sum, mask=m_t)


@triton.jit(do_not_specialize=["first_id"])
def _panel_kernel(
    logits_ptr,  # [T, N] float32
    parts_ptr,  # [T, N / ROWS] int64
    sums_ptr,  # [T, N / ROWS] float32
    values_ptr,  # [T, K] float32
    ids_ptr,  # [T, K] int32
    log_sums_ptr,  # [T] float32
    first_id,  # int, of the slice
    N: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    PARTS: tl.constexpr = N // ROWS
    i_row = tl.program_id(0)
    o_part = tl.arange(0, BLOCK)
    o_k = tl.arange(0, BLOCK_K)
    o_row = tl.arange(0, ROWS)
    take_turn(DEPENDENT, EAGER)
    b_part = tl.load(parts_ptr + i_row * PARTS + o_part, mask=o_part < PARTS, other=NOTHING)
    b_sum = tl.load(sums_ptr + i_row * PARTS + o_part, mask=o_part < PARTS, other=0.0)
    top = candidate_value(tl.max(b_part, axis=0))
    b_scale = tl.exp(tl.where(o_part < PARTS, candidate_value(b_part), top) - top)
    tl.store(log_sums_ptr + i_row, top + tl.log(tl.sum(b_sum * b_scale, axis=0)))

    # the K best stand in the K parts whose best are the best
    b_tile = tl.full([BLOCK_K], PARTS, tl.int32)
    for k in range(K):
        best = tl.max(b_part, axis=0)
        tile = tl.where(best == NOTHING, PARTS, (candidate_id(best) - first_id) // ROWS)
        b_tile = tl.where(o_k == k, tile, b_tile)
        b_part = tl.where(b_part == best, NOTHING, b_part)
    o_n = b_tile[:, None] * ROWS + o_row[None, :]
    b_logit = tl.load(logits_ptr + i_row * N + o_n, mask=o_n < N, other=0.0)
    b_left = tl.reshape(tl.where(o_n < N, candidates(b_logit, first_id + o_n), NOTHING), [BLOCK_K * ROWS])
    for k in range(K):
        best = tl.max(b_left, axis=0)
        tl.store(values_ptr + i_row * K + k, candidate_value(best))
        tl.store(ids_ptr + i_row * K + k, candidate_id(best))
        b_left = tl.where(b_left == best, NOTHING, b_left)


def head_argmax(
    x: Tensor,
    weight: Tensor,
    first_id: int = 0,
    *,
    parts: Parts | None = None,
    out: Scored | None = None,
    dependent: bool = False,
) -> Scored:
    """Multiply rows by a slice of the head and find the best of each.

    Args:
        x: [T, K] bfloat16, T from 1 to 8.
        weight: [N, K] bfloat16, the slice's rows as the checkpoint has them; N and K multiples of the cut.
        first_id: of the slice's first row.
        parts: room between the kernels, which the panel reads, for graph capture; allocated when None.
        out: destinations, for graph capture; allocated when None.
        dependent: start before the kernel that writes `x` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(x, weight, first_id, TUNING, parts=parts, out=out, dependent=dependent)


def launch(
    x: Tensor,
    weight: Tensor,
    first_id: int,
    cut: Tuning,
    *,
    parts: Parts | None = None,
    out: Scored | None = None,
    dependent: bool = False,
    tensor_cores: bool | None = None,
) -> Scored:
    """`head_argmax` with another cut or form: for benches and tests."""
    require(x.ndim == 2 and 1 <= x.shape[0] <= ROWS_MAX, f"x must be 1 to {ROWS_MAX} rows", tuple(x.shape))
    require(weight.ndim == 2, "weight must be [N, K]", tuple(weight.shape))
    rows, (n, k), device = x.shape[0], weight.shape, weight.device
    require(n > 0 and n % cut.rows == 0, f"weight must have a multiple of {cut.rows} rows", n)
    require(k > 0 and k % cut.step == 0, f"weight must have a multiple of {cut.step} columns", k)
    require(0 <= first_id <= IDS_MAX - n, f"ids must be 0 to {IDS_MAX - 1}", first_id)
    require_tensor(weight, "weight", (n, k), torch.bfloat16)
    require_tensor(x, "x", (rows, k), torch.bfloat16, device)
    programs = n // cut.rows
    require(programs <= _best.PARTS_MAX, f"weight must have at most {_best.PARTS_MAX * cut.rows} rows", n)
    parts = Parts.empty(rows, n, device, cut) if parts is None else parts
    parts.require(rows, n, device, cut)
    out = Scored.empty(rows, n, device) if out is None else out
    out.require(rows, n, device)
    is_ptx = runs_ptx(device)
    by_cores = is_ptx if tensor_cores is None else tensor_cores
    _direct.call(
        _head_kernel, (programs,),
        x, weight, out.logits, *parts, rows, first_id,
        **constants(n, k, cut, dependent and is_ptx, by_cores),
        **(options(cut, dependent) if is_ptx else {}),
    )  # fmt: skip
    _best.find_best(parts.best, out.best, dependent)
    return out


def constants(n: int, k: int, cut: Tuning, dependent: bool = True, tensor_cores: bool = True) -> dict[str, int | bool]:
    """Return the product's compile-time arguments."""
    return {
        "N": n,
        "K": k,
        "ROWS": cut.rows,
        "STEP": cut.step,
        "FRESH": cut.fresh,
        "COLUMNS": COLUMNS,
        "TENSOR_CORES": tensor_cores,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }


def options(cut: Tuning, dependent: bool) -> dict[str, int | bool]:
    """Return how Triton compiles the product."""
    return {"num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": dependent}


def panel(
    logits: Tensor,
    parts: Parts,
    k: int,
    first_id: int = 0,
    *,
    out: Panel | None = None,
    dependent: bool = False,
) -> Panel:
    """Find the k best of each row of logits, and the log of its sum of exponentials.

    Args:
        logits: [T, N] float32, as `head_argmax` left them, T from 1 to 8, finite.
        parts: as it left them.
        k: from 1 to 20, at most N.
        first_id: of the slice's first logit, as then.
        out: destinations, for graph capture; allocated when None.
        dependent: start before the kernel that finds the best has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch_panel(logits, parts, k, first_id, TUNING, out=out, dependent=dependent)


def launch_panel(
    logits: Tensor,
    parts: Parts,
    k: int,
    first_id: int,
    cut: Tuning,
    *,
    out: Panel | None = None,
    dependent: bool = False,
) -> Panel:
    """`panel` of a head with another cut: for benches and tests."""
    require(logits.ndim == 2, "logits must be [T, N]", tuple(logits.shape))
    rows, n = logits.shape
    device = logits.device
    require(1 <= rows <= ROWS_MAX, f"logits must have 1 to {ROWS_MAX} rows", rows)
    require_tensor(logits, "logits", (rows, n), torch.float32)
    parts.require(rows, n, device, cut)
    require(1 <= k <= min(PANEL_MAX, n), f"k must be 1 to {min(PANEL_MAX, n)}", k)
    require(0 <= first_id <= IDS_MAX - n, f"ids must be 0 to {IDS_MAX - 1}", first_id)
    out = Panel.empty(rows, k, device) if out is None else out
    require_tensor(out.values, "out values", (rows, k), torch.float32, device)
    require_tensor(out.ids, "out ids", (rows, k), torch.int32, device)
    require_tensor(out.log_sums, "out log_sums", (rows,), torch.float32, device)
    is_ptx = runs_ptx(device)
    _direct.call(
        _panel_kernel, (rows,),
        logits, *parts, *out, first_id, **panel_constants(n, k, cut, dependent and is_ptx),
        **({"num_warps": PANEL_WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def panel_constants(n: int, k: int, cut: Tuning, dependent: bool = True) -> dict[str, int | bool]:
    """Return the panel's compile-time arguments."""
    return {
        "N": n,
        "ROWS": cut.rows,
        "K": k,
        "BLOCK": power_of_two(n // cut.rows),
        "BLOCK_K": power_of_two(k),
        "DEPENDENT": dependent,
        "EAGER": PANEL_EAGER,
    }
