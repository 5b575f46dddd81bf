"""Normalise and rotate query heads; make key/value rows and write them. Twin: `reference.norm_rope_write`.

Traffic    reads the parts of a product and writes its rows once: latency-bound
Grid       (T, 2) for the product that holds both low rows, (H, T) for the heads
Equality   no program sees two rows: row i of a step or a chunk is bitwise the row alone
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._chunk_rows import ChunkRows, require_chunk, to_places
from dsv4nb_kernels._expert_rows import share_scale
from dsv4nb_kernels._kv_records import KV_BLOCK, record_bytes, require_cache, store_record
from dsv4nb_kernels._kv_rows import inverse_rms
from dsv4nb_kernels._launch import (
    CHUNK_ROWS_MAX,
    ROWS_MAX,
    Limits,
    power_of_two,
    require,
    require_few,
    require_tensor,
    runs_ptx,
)
from dsv4nb_kernels._rotary import angles_of, require_angles, turn_tail
from dsv4nb_kernels._rounded_rows import RoundedRows, codes_of, require_rows, round_bf16
from dsv4nb_kernels._turns import take_turn

WARPS = {"rows": 4, "heads": 2}
EAGER = True  # measured on an H200, see kernels/README.md
LIMITS = {
    "rows": Limits(registers=56, shared_bytes=2048),
    "heads": Limits(registers=40, shared_bytes=64),
}


@triton.jit
def _sum_row(p_row, WIDTH: tl.constexpr, SPLITS: tl.constexpr, stride):
    """A product's row, its parts added from left to right, as bfloat16 holds it."""
    o_d = tl.arange(0, WIDTH)
    b_x = tl.load(p_row + o_d)
    for i in tl.static_range(1, SPLITS):
        b_x += tl.load(p_row + i * stride + o_d)
    return round_bf16(b_x)


@triton.jit
def _norm_rope_rows_kernel(
    product_ptr,  # [S, T, L + hd] float32
    latent_norm_ptr,  # [L] float32
    kv_norm_ptr,  # [hd] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    slots_ptr,  # [T] int32
    codes_ptr,  # [T, L] float16
    scales_ptr,  # [L/128, 8] float32, of a chunk [T]
    ring_ptr,  # [C, hd] bfloat16, or [C, R] uint8 records
    eps,  # float
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    SPLITS: tl.constexpr,
    ACT_FP8: tl.constexpr,
    KV_FP8: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    stride = tl.num_programs(0) * (LATENT + WIDTH)
    p_row = product_ptr + i_row * (LATENT + WIDTH)
    if tl.program_id(1) == 0:
        b_latent_norm = tl.load(latent_norm_ptr + tl.arange(0, LATENT))
        take_turn(DEPENDENT, EAGER)
        b_latent = _sum_row(p_row, LATENT, SPLITS, stride)
        b_latent = round_bf16(b_latent_norm * (b_latent * inverse_rms(b_latent, LATENT, eps)))
        b_codes, s_latent = codes_of(tl.reshape(b_latent, [LATENT // 128, 128]), ACT_FP8)
        o_block = tl.arange(0, LATENT // 128)
        o_code = o_block[:, None] * 128 + tl.arange(0, 128)[None, :]
        if CHUNK:
            b_codes, s_row = share_scale(b_codes, s_latent, ACT_FP8)
            tl.store(codes_ptr + i_row * LATENT + o_code, to_places(b_codes, LATENT // 128))
            tl.store(scales_ptr + i_row, s_row)
        else:
            tl.store(codes_ptr + i_row * LATENT + o_code, b_codes)
            tl.store(scales_ptr + o_block * 8 + i_row, s_latent)
    else:
        o_d = tl.arange(0, WIDTH)
        b_norm = tl.load(kv_norm_ptr + o_d)
        take_turn(DEPENDENT, EAGER)
        slot = tl.load(slots_ptr + i_row)
        b_cos, b_sin = angles_of(cos_ptr + i_row * TAIL, sin_ptr + i_row * TAIL, WIDTH, TAIL)
        tl.debug_barrier()  # the compiler would ask for the angles behind the sum
        b_x = _sum_row(p_row + LATENT, WIDTH, SPLITS, stride)
        b_x = round_bf16(b_norm * (b_x * inverse_rms(b_x, WIDTH, eps)))
        b_x = round_bf16(turn_tail(b_x, b_cos, b_sin, WIDTH, TAIL))
        if KV_FP8:
            store_record(ring_ptr + slot.to(tl.int64) * record_bytes(WIDTH, TAIL), b_x, WIDTH, TAIL)
        else:
            tl.store(ring_ptr + slot.to(tl.int64) * WIDTH + o_d, b_x.to(tl.bfloat16))


@triton.jit
def _norm_rope_heads_kernel(
    product_ptr,  # [S, T, H · hd] float32
    cos_ptr,  # [T, rd] float32
    sin_ptr,  # [T, rd] float32
    out_ptr,  # [T, H, hd] bfloat16
    eps,  # float
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(1)
    o_head = (i_row * H + tl.program_id(0)) * WIDTH
    take_turn(DEPENDENT, EAGER)
    b_cos, b_sin = angles_of(cos_ptr + i_row * TAIL, sin_ptr + i_row * TAIL, WIDTH, TAIL)
    tl.debug_barrier()  # the compiler would ask for the angles behind the sum
    b_x = _sum_row(product_ptr + o_head, WIDTH, SPLITS, tl.num_programs(1) * (H * WIDTH))
    b_x = round_bf16(b_x * inverse_rms(b_x, WIDTH, eps))
    b_x = round_bf16(turn_tail(b_x, b_cos, b_sin, WIDTH, TAIL))
    tl.store(out_ptr + o_head + tl.arange(0, WIDTH), b_x.to(tl.bfloat16))


def norm_rope_rows(
    product: Tensor,
    latent_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    ring: Tensor,
    *,
    eps: float,
    act_fp8: bool,
    kv_fp8: bool,
    out: RoundedRows | None = None,
    dependent: bool = False,
) -> RoundedRows:
    """Normalise the low query rows for their product, and make key/value rows and write them, in one launch.

    Args:
        product: [S, T, L + hd] float32, T from 1 to 8: parts, added from left to right; of a row first the low query,
            then key and value.
        latent_norm: [L] float32; kv_norm: [hd] float32. L and hd are powers of two from 128 on.
        cos, sin: [T, rd] float32: each angle stands twice, the sine of an even element is negated; hd - rd is a
            multiple of 64.
        slots: [T] int32, rows of `ring`, all different.
        ring: [C, R] uint8 records (`_kv_records`), or [C, hd] bfloat16 without `kv_fp8`; written at `slots`.
        act_fp8: whether the result is rounded to e4m3 as `fp8_rows` wants it, or holds bfloat16 values.
        kv_fp8: round everything outside the rotated tail to e4m3, blocks of 64, and write records.
        out: [T, L] destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `product` has ended, and wait for it inside.

    Returns:
        [T, L] for `fp8_rows`.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    rows = _require_product(product, ROWS_MAX)
    latent = latent_norm.shape[0]
    if out is None:
        out = RoundedRows.empty(rows, latent, product.device)
    require_rows(out, rows, latent, product.device)
    given = (product, latent_norm, kv_norm, cos, sin, slots, ring)
    _launch_rows(*given, (out.codes, out.scales), eps, act_fp8, kv_fp8, False, dependent)
    return out


def norm_rope_chunk(
    product: Tensor,
    latent_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    ring: Tensor,
    *,
    eps: float,
    act_fp8: bool,
    kv_fp8: bool,
    out: ChunkRows | None = None,
    dependent: bool = False,
) -> ChunkRows:
    """`norm_rope_rows` for T from 1 to 4096 rows; the low query rows are left for the products of a chunk.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    rows = _require_product(product, CHUNK_ROWS_MAX)
    latent = latent_norm.shape[0]
    if out is None:
        out = ChunkRows.empty(rows, latent, product.device)
    require_chunk(out, rows, latent, product.device)
    given = (product, latent_norm, kv_norm, cos, sin, slots, ring)
    _launch_rows(*given, (out.values, out.scales), eps, act_fp8, kv_fp8, True, dependent)
    return out


def _launch_rows(
    product: Tensor,
    latent_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    ring: Tensor,
    room: tuple[Tensor, Tensor],
    eps: float,
    act_fp8: bool,
    kv_fp8: bool,
    chunk: bool,
    dependent: bool,
) -> None:
    splits, rows, _ = product.shape
    device = product.device
    latent, width = latent_norm.shape[0], kv_norm.shape[0]
    for name, size in (("latent_norm", latent), ("kv_norm", width)):
        require(size >= 128 and size == power_of_two(size), f"{name} must be a power of two from 128 on", size)
    require_tensor(product, "product", (splits, rows, latent + width), torch.float32)
    require_tensor(latent_norm, "latent_norm", (latent,), torch.float32, device)
    require_tensor(kv_norm, "kv_norm", (width,), torch.float32, device)
    tail = require_angles(cos, sin, rows, width, device)
    require((width - tail) % KV_BLOCK == 0, f"hd - rd must be a multiple of {KV_BLOCK}", (width, tail))
    require_tensor(slots, "slots", (rows,), torch.int32, device)
    require_cache(ring, "ring", width, tail, kv_fp8, device)
    is_ptx = runs_ptx(device)
    _direct.call(
        _norm_rope_rows_kernel, (rows, 2),
        product, latent_norm, kv_norm, cos, sin, slots, *room, ring, eps,
        **rows_constants(latent, width, tail, splits, act_fp8, kv_fp8, chunk, dependent and is_ptx),
        **({"num_warps": WARPS["rows"], "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip


def norm_rope_heads(
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    eps: float,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Divide each head by its rms, without a weight, and rotate it.

    Args:
        product: [S, T, H · hd] float32, T from 1 to 4096: parts, added from left to right; hd a power of two from 128
            on.
        cos, sin: [T, rd] float32: each angle stands twice, the sine of an even element is negated.
        heads: H.
        out: [T, H, hd] bfloat16 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `product` has ended, and wait for it inside.

    Returns:
        [T, H, hd] bfloat16.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    rows = _require_product(product, CHUNK_ROWS_MAX)
    splits = product.shape[0]
    device = product.device
    require(heads > 0 and product.shape[2] % heads == 0, "product must have whole heads", (product.shape[2], heads))
    width = product.shape[2] // heads
    require(width >= 128 and width == power_of_two(width), "hd must be a power of two from 128 on", width)
    require_tensor(product, "product", (splits, rows, heads * width), torch.float32)
    tail = require_angles(cos, sin, rows, width, device)
    if out is None:
        out = torch.empty(rows, heads, width, dtype=torch.bfloat16, device=device)
    require_tensor(out, "out", (rows, heads, width), torch.bfloat16, device)
    is_ptx = runs_ptx(device)
    _direct.call(
        _norm_rope_heads_kernel, (heads, rows),
        product, cos, sin, out, eps,
        **heads_constants(heads, width, tail, splits, dependent and is_ptx),
        **({"num_warps": WARPS["heads"], "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def rows_constants(
    latent: int,
    width: int,
    tail: int,
    splits: int,
    act_fp8: bool,
    kv_fp8: bool,
    chunk: bool = False,
    dependent: bool = True,
) -> dict[str, int | bool]:
    """Return the compile-time arguments of the kernel of rows."""
    return {
        "LATENT": latent,
        "WIDTH": width,
        "TAIL": tail,
        "SPLITS": splits,
        "ACT_FP8": act_fp8,
        "KV_FP8": kv_fp8,
        "CHUNK": chunk,
        "DEPENDENT": dependent,
        "EAGER": EAGER,
    }


def heads_constants(heads: int, width: int, tail: int, splits: int, dependent: bool = True) -> dict[str, int | bool]:
    """Return the compile-time arguments of the kernel of heads."""
    return {"H": heads, "WIDTH": width, "TAIL": tail, "SPLITS": splits, "DEPENDENT": dependent, "EAGER": EAGER}


def _require_product(product: Tensor, most: int) -> int:
    require(product.ndim == 3 and product.shape[0] > 0, "product must be [S, T, N]", tuple(product.shape))
    rows = product.shape[1]
    require(1 <= rows <= most, f"product must have 1 to {most} rows", rows)
    require_few(product.numel(), "product")
    return rows
