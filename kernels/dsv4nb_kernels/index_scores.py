"""How much each row of a step wants each compressed entry. Twin: `reference.index_scores`.

Traffic    reads the C·d keys once for all rows; writes T·C float32: bandwidth-bound. Of a chunk 2·T·C·Hi·d operations:
           bound by the tensor cores
Grid       (C / keys, T / rows); a program scores its keys for one row after the other
Order      keys that were there before the step are on their way before the kernel waits
Equality   the product of a row has the shape [keys, d] x [d, Hi] whoever else is there: row i of a step or a chunk is
           bitwise the row alone, and an entry's score depends on the entry alone
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._dots import dot_bf16
from dsv4nb_kernels._launch import (
    ALIGNMENT,
    CHUNK_ROWS_MAX,
    ROWS_MAX,
    Limits,
    cdiv,
    power_of_two,
    require,
    require_few,
    require_tensor,
    runs_ptx,
    runs_wgmma,
)
from dsv4nb_kernels._turns import take_turn

KEYS = 128  # C is a multiple of it, as the twin's
ENTRIES_MAX = 1 << 20  # C; a place among the scores of eight rows fits an int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the scores are cut; no part of it may depend on the number of rows.

    Attributes:
        keys: entries of one program, at most 128.
        warps: of one program.
        stages: rows whose queries are on their way at a time.
        rows: of one program.
        eager: whether the next kernel may start before this one has waited itself.
        early: whether keys are asked for before the wait; of programs of one row, since it takes registers.
    """

    keys: int = 128
    warps: int = 4
    stages: int = 1
    rows: int = 2
    eager: bool = False
    early: bool = False

    def __str__(self) -> str:
        name = f"{self.keys} keys, {self.warps} warps, {self.stages} stages"
        return f"{name}, {self.rows} rows{', early' if self.early else ''}{', eager' if self.eager else ''}"


# measured on an H200, see kernels/README.md; they differ in nothing that a sum depends on
TUNING = Tuning(rows=2)
ALONE = Tuning(rows=1)
FEW = Tuning(rows=1, early=True)
FEW_PROGRAMS = 64  # up to here keys are asked for early: more programs than that are in the way of the kernel ahead
PROGRAMS = 264  # two for each multiprocessor
CHUNK_TUNING = Tuning(stages=2, rows=32)
LIMITS = {
    "step": Limits(registers=200, shared_bytes=49 * 1024),
    "chunk": Limits(registers=168, shared_bytes=68 * 1024),
}


@triton.jit(do_not_specialize=["T", "C"])
def _index_scores_kernel(
    query_ptr,  # [T, Hi, d] bfloat16
    keys_ptr,  # [C, d] bfloat16
    weights_ptr,  # [S, T, LINE] float32, of which Hi columns
    visible_ptr,  # [T] int32
    scores_ptr,  # [T, C] float32
    T,  # int, 1 … 4096
    C,  # int, multiple of 128
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    LINE: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    first = tl.program_id(0) * KEYS
    o_key = first + tl.arange(0, KEYS)
    o_head = tl.arange(0, HEADS)
    o_d = tl.arange(0, WIDTH)
    p_query = query_ptr + o_head[None, :] * WIDTH + o_d[:, None]
    p_weights = weights_ptr + o_head
    p_keys = keys_ptr + o_key.to(tl.int64)[:, None] * WIDTH + o_d[None, :]
    begin = tl.program_id(1) * ROWS
    end = tl.minimum(begin + ROWS, T)
    b_keys = tl.zeros([KEYS, WIDTH], tl.bfloat16)
    is_old = False
    visible = 0
    if EARLY:
        visible = tl.load(visible_ptr + begin)
        # the step itself ends no window before the last that its first row sees
        is_old = first + KEYS < tl.load(visible_ptr)
        if is_old:
            b_keys = tl.load(p_keys)
    take_turn(DEPENDENT, EAGER)
    if not EARLY:
        for i in range(begin, end):
            visible = tl.maximum(visible, tl.load(visible_ptr + i))
    if first < visible:
        if not is_old:
            b_keys = tl.load(p_keys)
        for i in tl.range(begin, end, num_stages=STAGES):
            b_weights = tl.load(p_weights + i * LINE)
            for s in tl.static_range(1, SPLITS):
                b_weights += tl.load(p_weights + (s * T + i) * LINE)
            b_query = tl.load(p_query + i * (HEADS * WIDTH))
            b_z = dot_bf16(b_keys, b_query, tl.zeros([KEYS, HEADS], tl.float32), TENSOR_CORES)
            b_scores = tl.sum(tl.maximum(b_z, 0.0) * b_weights[None, :], axis=1)
            tl.store(scores_ptr + i * C + o_key, b_scores)


def index_scores(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    visible: Tensor,
    *,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Sum relu(query · key) over the heads, weighted.

    Args:
        query: [T, Hi, d] bfloat16, T from 1 to 4096, Hi and d powers of two from 16 on.
        keys: [C, d] bfloat16, C a multiple of 128, T·C below 2^31: a long context takes a chunk in several calls.
        weights: [S, T, Hi] float32: the parts of the product that weighs the heads, added from left to right; or these
            columns of a wider product.
        visible: [T] int32, entries that each row may see; a row's columns from there on may be left alone.
        out: [T, C] float32 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `query` has ended, and wait for it inside. In a step `visible` is
            read before, and so are keys ahead of the last that its first row sees: what writes them must stand before a
            kernel that lets the next one start only after it has waited.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    cut = tuning(query.shape[0], keys.shape[0], is_hopper=runs_wgmma(query.device))
    return launch(query, keys, weights, visible, cut, out=out, dependent=dependent)


def tuning(rows: int, count: int, *, is_hopper: bool = True) -> Tuning:
    """Return the cut of `rows` rows and `count` keys: rows share the keys of a program only where programs are many.

    On other GPUs they always do: a row alone would have 568 bytes of its registers spilled there.
    """
    if rows > ROWS_MAX:
        return CHUNK_TUNING
    programs = rows * (count // TUNING.keys)
    if not is_hopper or (rows > 1 and programs > PROGRAMS):
        return TUNING
    return FEW if programs <= FEW_PROGRAMS else ALONE


def launch(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    visible: Tensor,
    cut: Tuning,
    *,
    out: Tensor | None = None,
    dependent: bool = False,
    tensor_cores: bool | None = None,
) -> Tensor:
    """`index_scores` with another cut or form: for benches and tests."""
    require(query.ndim == 3, "query must be [T, Hi, d]", tuple(query.shape))
    rows, heads, width = query.shape
    device = query.device
    require(1 <= rows <= CHUNK_ROWS_MAX, f"query must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    for name, size in (("heads", heads), ("channels", width)):
        require(size >= 16 and size == power_of_two(size), f"{name} must be a power of two from 16 on", size)
    require_tensor(query, "query", (rows, heads, width), torch.bfloat16)
    require(keys.ndim == 2, "keys must be [C, d]", tuple(keys.shape))
    count = keys.shape[0]
    require(
        0 < count <= ENTRIES_MAX and count % KEYS == 0,
        f"keys must have a multiple of {KEYS} entries up to {ENTRIES_MAX}",
        count,
    )
    require_tensor(keys, "keys", (count, width), torch.bfloat16, device)
    require(weights.ndim == 3 and weights.shape[0] > 0, "weights must be [S, T, Hi]", tuple(weights.shape))
    splits, line = weights.shape[0], weights.stride(1)
    if weights.is_contiguous():
        require_tensor(weights, "weights", (splits, rows, heads), torch.float32, device)
    else:
        _require_columns(weights, (splits, rows, heads), device)
    require_tensor(visible, "visible", (rows,), torch.int32, device)
    if out is None:
        out = torch.empty(rows, count, dtype=torch.float32, device=device)
    require_tensor(out, "out", (rows, count), torch.float32, device)
    require_few(out.numel(), "out")
    require(not cut.early or cut.rows == 1, "keys are asked for early in programs of one row", cut.rows)
    is_ptx = runs_ptx(device)
    by_cores = is_ptx if tensor_cores is None else tensor_cores
    _direct.call(
        _index_scores_kernel,
        (count // cut.keys, cdiv(rows, cut.rows)),
        query,
        keys,
        weights,
        visible,
        out,
        rows,
        count,
        **constants(heads, width, splits, cut, dependent and is_ptx, by_cores, line),
        **({"num_warps": cut.warps, "launch_pdl": dependent} if is_ptx else {}),
    )
    return out


def _require_columns(weights: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    """Refuse weights that are no columns of a product.

    Raises:
        ValueError: they have another shape, dtype or order, are elsewhere, or start off a 16-byte boundary.
    """
    require(tuple(weights.shape) == shape, f"weights must have shape {shape}", tuple(weights.shape))
    require(weights.dtype == torch.float32, "weights must be torch.float32", weights.dtype)
    require(weights.device == device, f"weights must be on {device}", weights.device)
    split, line, column = weights.stride()
    fits = column == 1 and line >= shape[2] and split == shape[1] * line
    require(fits, "weights must be columns of a contiguous product", f"strides {weights.stride()}")
    require(weights.data_ptr() % ALIGNMENT == 0, f"weights must start on a {ALIGNMENT}-byte boundary", "another")


def constants(
    heads: int,
    width: int,
    splits: int,
    cut: Tuning,
    dependent: bool = True,
    tensor_cores: bool = True,
    line: int | None = None,
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments; `line` columns of a row of the weights, else Hi."""
    return {
        "HEADS": heads,
        "WIDTH": width,
        "SPLITS": splits,
        "LINE": line or heads,
        "KEYS": cut.keys,
        "ROWS": cut.rows,
        "STAGES": cut.stages,
        "EARLY": cut.early,
        "TENSOR_CORES": tensor_cores,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }
