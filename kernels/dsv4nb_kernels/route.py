"""Which experts the rows of a step visit, and with what weight. Twin: `reference.route`.

Traffic    reads the S parts of the gate's product once; writes K ids and weights a row: latency-bound
Grid       (T,); one warp a row
Equality   no program sees two rows: row i of a step or a chunk is bitwise the row alone. Equal affinities: the
           lowest id first
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._launch import CHUNK_ROWS_MAX, Limits, power_of_two, require, require_tensor, runs_ptx
from dsv4nb_kernels._order import NEVER, ordered
from dsv4nb_kernels._turns import take_turn

CHOICES_MAX = 8  # K
EXPERTS_MAX = 1024  # E
WARPS = 1
EAGER = True  # the next kernel may start before the router has waited itself
LIMITS = Limits(registers=80)

_LINEAR_ABOVE = tl.constexpr(20.0)  # softplus(z) is z there to the last bit, and exp(z) would overflow further up
_LOG2_E = tl.constexpr(1.4426950216293335)  # a float32, and what it lacks
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)
_LN_2 = tl.constexpr(math.log(2))
_NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _exp(b_x):
    """e^x to the last bits: the rounding of x · log2(e) would cost as many bits as x has before its point."""
    b_power = b_x * _LOG2_E
    b_left = tl.fma(b_x, tl.full(b_x.shape, _LOG2_E, tl.float32), -b_power) + b_x * _LOG2_E_REST
    return tl.exp2(b_power) * (1.0 + b_left * _LN_2)


@triton.jit
def affinity(b_z):
    """sqrt(softplus(z))."""
    b_raised = _exp(tl.minimum(b_z, _LINEAR_ABOVE))
    # log(1 + e) of the rounded 1 + e, corrected by what the rounding took away
    b_sum = 1.0 + b_raised
    b_taken = b_sum - 1.0
    b_soft = tl.where(b_taken > 0, tl.log(b_sum) * (b_raised / tl.where(b_taken > 0, b_taken, 1.0)), b_raised)
    return tl.sqrt_rn(tl.where(b_z > _LINEAR_ABOVE, b_z, b_soft))


@triton.jit
def _route_kernel(
    logits_ptr,  # [S, T, E] float32
    bias_ptr,  # [E] float32
    table_ptr,  # [V, K] int32
    tokens_ptr,  # [T] int32
    experts_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    factor,  # float
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    HASHED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < E
    if not HASHED:
        b_bias = tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
    take_turn(DEPENDENT, EAGER)
    p_logits = logits_ptr + i_row * E + o_e
    b_logits = tl.load(p_logits, mask=m_e, other=0.0)
    for i in tl.static_range(1, SPLITS):
        b_logits += tl.load(p_logits + i * tl.num_programs(0) * E, mask=m_e, other=0.0)
    b_affinity = affinity(b_logits)
    b_bits = b_affinity.to(tl.int32, bitcast=True)  # not negative: they compare as the values do

    chosen = ()
    if HASHED:
        token = tl.load(tokens_ptr + i_row)
        for k in tl.static_range(K):
            chosen = chosen + (tl.load(table_ptr + token.to(tl.int64) * K + k),)
    else:
        b_key = tl.where(m_e, ordered(b_affinity + b_bias), NEVER)
        for _ in tl.static_range(K):
            best = tl.max(b_key, axis=0)
            expert = tl.min(tl.where(b_key == best, o_e, _NOBODY), axis=0)
            b_key = tl.where(o_e == expert, NEVER, b_key)
            chosen = chosen + (expert,)

    shares = ()
    total = 0.0
    for k in tl.static_range(K):
        b_share = tl.max(tl.where(o_e == chosen[k], b_bits, 0), axis=0).to(tl.float32, bitcast=True)
        shares = shares + (b_share,)
        total += b_share
    for k in tl.static_range(K):
        place = 0
        for other in tl.static_range(K):
            place += (chosen[other] < chosen[k]).to(tl.int32)
        tl.store(experts_ptr + i_row * K + place, chosen[k])
        tl.store(weights_ptr + i_row * K + place, shares[k] / total * factor)


def route(
    logits: Tensor,
    *,
    bias: Tensor | None,
    table: Tensor | None,
    tokens: Tensor | None,
    k: int,
    factor: float,
    out: tuple[Tensor, Tensor] | None = None,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose k experts a row by biased affinity or from a table, and share `factor` among them.

    Args:
        logits: [S, T, E] float32, T from 1 to 4096, E at most 1024: the parts of the gate's product, added from left to
            right.
        bias: [E] float32; shifts the choice and never the weights. -inf keeps an expert from being chosen as long as k
            others are left.
        table: [V, k] int32, of each token id the k distinct experts; exactly one of `bias` and `table` is given.
        tokens: [T] int32, the rows' token ids, for `table`.
        k: from 1 to 8.
        out: destinations, for graph capture; allocated when None.
        dependent: start before the kernel that writes `logits` has ended, and wait for it inside.

    Returns:
        experts [T, k] int32, ascending, and weights [T, k] float32.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    require(logits.ndim == 3 and logits.shape[0] > 0, "logits must be [S, T, E]", tuple(logits.shape))
    splits, rows, experts = logits.shape
    device = logits.device
    require(1 <= rows <= CHUNK_ROWS_MAX, f"logits must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require(1 <= k <= min(CHOICES_MAX, experts), f"k must be 1 to {min(CHOICES_MAX, experts)}", k)
    require(experts <= EXPERTS_MAX, f"logits must have at most {EXPERTS_MAX} experts", experts)
    require_tensor(logits, "logits", (splits, rows, experts), torch.float32)
    require((bias is None) != (table is None), "exactly one of bias and table must be given", "both or none")
    require((table is None) == (tokens is None), "table and tokens must be given together", "one of them")
    if bias is not None:
        require_tensor(bias, "bias", (experts,), torch.float32, device)
    if table is not None and tokens is not None:
        require_tensor(table, "table", (table.shape[0], k), torch.int32, device)
        require_tensor(tokens, "tokens", (rows,), torch.int32, device)
    if out is None:
        out = (
            torch.empty(rows, k, dtype=torch.int32, device=device),
            torch.empty(rows, k, dtype=torch.float32, device=device),
        )
    require_tensor(out[0], "out experts", (rows, k), torch.int32, device)
    require_tensor(out[1], "out weights", (rows, k), torch.float32, device)
    is_ptx = runs_ptx(device)
    _direct.call(
        _route_kernel,
        (rows,),
        logits,
        logits if bias is None else bias,
        out[0] if table is None else table,
        out[0] if tokens is None else tokens,
        *out,
        factor,
        **constants(experts, k, splits, table is not None, dependent and is_ptx),
        **({"num_warps": WARPS, "launch_pdl": dependent} if is_ptx else {}),
    )
    return out


def constants(experts: int, k: int, splits: int, hashed: bool, dependent: bool = True) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "E": experts,
        "BLOCK": power_of_two(experts),
        "K": k,
        "SPLITS": splits,
        "HASHED": hashed,
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }
