"""The residual streams between two sublayers: mix in, collapse, normalise. Twin: `reference.hyper_mix`.

Traffic    reads N·HC·D float32 of weights once, and for further rows again from the L2; the streams and the last
           product once, and the streams again from the L2: latency-bound
Grid       (T, D / channels), each for the same channels of every stream, then (T, 2): one program collapses a row, one
           makes its coefficients for the next boundary. Of a chunk a first program takes sixteen rows, one after the
           other, and its weights stay in registers
Equality   no sum sees two rows, and what the programs of a row leave is added up in one order: row i of a step or a
           chunk is bitwise the row alone

The weights are on their way before the first kernel waits for the sublayer that ends here. The balancing of `comb`,
forty dependent steps, runs beside the collapse and not before it: nobody needs it until the next boundary. On a pair
the first kernel also joins the two GPUs' halves of that sublayer, each program those of its own channels.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator, var-annotated"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._balance import balance
from dsv4nb_kernels._chunk_rows import ChunkRows, require_chunk, to_places
from dsv4nb_kernels._expert_rows import ExpertRows, share_scale
from dsv4nb_kernels._expert_rows import require_rows as require_expert_rows
from dsv4nb_kernels._launch import (
    CHUNK_ROWS_MAX,
    ROWS_MAX,
    Limits,
    cdiv,
    columns,
    power_of_two,
    require,
    require_tensor,
    runs_ptx,
)
from dsv4nb_kernels._peer import CHANNELS, Link, push, require_link, take
from dsv4nb_kernels._rounded_rows import RoundedRows, codes_of, require_rows, round_bf16
from dsv4nb_kernels._turns import take_turn

STREAMS = 4  # HC; the balancing is written out for it
COEFFICIENTS = STREAMS * (STREAMS + 2)  # pre, post, comb
CHUNK_ROWS = 16  # rows of a chunk in one program of the first kernel
LINE = 32  # floats that a program leaves for a row: the products, and last the sum of squares
LIMITS = {"expand": Limits(registers=254, shared_bytes=1024), "collapse": Limits(registers=128, shared_bytes=128)}
CHUNK_LIMITS = {
    "expand": Limits(registers=255, stack_bytes=48, shared_bytes=1024),
    "collapse": Limits(registers=128, shared_bytes=2 * 1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a boundary is cut; no part of it may depend on the number of rows.

    Attributes:
        channels: of one program of the first kernel.
        warps: of a program of the first and of the second kernel.
        eager: whether a kernel lets the next one start before it has waited itself.
    """

    channels: int = 256
    warps: tuple[int, int] = (4, 4)
    eager: bool = False

    def __str__(self) -> str:
        first, second = self.warps
        return f"{self.channels} channels, {first} and {second} warps" + (", eager" if self.eager else "")


TUNING = Tuning()  # measured on an H200, see kernels/README.md


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """A boundary's weights.

    Attributes:
        fn: [N, HC·D] float32, N = 24 for a sublayer and 4 for the head.
        scale, base: [N] float32, the scales each repeated over its part.
        norm: [D] float32.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a boundary hands on.

    Attributes:
        stream: [T, HC, D] bfloat16.
        x: [T, D] bfloat16, the next sublayer's normalised input.
        rounded: the same for `fp8_rows`; of more than 8 rows it is empty.
        arranged: the same for the products of a chunk, of more than 8 rows.
        post: [T, HC] float32, how much of that sublayer's output each stream takes.
        comb: [T, HC, HC] float32, from stream j to stream k.
        parts: [T, 32, D / channels] float32, left by the first kernel for the second.
    """

    stream: Tensor
    x: Tensor
    rounded: RoundedRows
    post: Tensor
    comb: Tensor
    parts: Tensor
    arranged: ChunkRows | None = None

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device, channels: int = TUNING.channels) -> Boundary:
        """Return room for `rows` rows of HC streams of `width` channels."""

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            stream=torch.empty(rows, STREAMS, width, dtype=torch.bfloat16, device=device),
            x=torch.empty(rows, width, dtype=torch.bfloat16, device=device),
            rounded=RoundedRows.empty(rows if rows <= ROWS_MAX else 0, width, device),
            post=floats(rows, STREAMS),
            comb=floats(rows, STREAMS, STREAMS),
            parts=floats(rows, LINE, width // channels),
            arranged=None if rows <= ROWS_MAX else ChunkRows.empty(rows, width, device),
        )


@triton.jit(do_not_specialize=["T", "polls"])
def _expand_kernel(
    y_ptr,  # [S, T, D] float32
    stream_ptr,  # [T, HC, D] bfloat16
    post_ptr,  # [T, HC] float32
    comb_ptr,  # [T, HC, HC] float32
    fn_ptr,  # [N, HC · D] float32
    out_ptr,  # [T, HC, D] bfloat16
    parts_ptr,  # [T, 32, P] float32
    T,  # int, 1 … 4096
    theirs_ptr,  # [2, 8, D] int64, on the other GPU
    mine_ptr,  # [2, 8, D] int64
    counts_ptr,  # [8, D / channels] int32
    error_ptr,  # [4] int32
    polls,  # int
    D: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: there is no product to add
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PUSHES: tl.constexpr,
    TAKES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    HC: tl.constexpr = 4
    first = tl.program_id(0) * ROWS
    i_part = tl.program_id(1)
    o_d = i_part * CHANNELS + tl.arange(0, CHANNELS)
    o_n = tl.arange(0, 32)[:, None]
    p_fn = fn_ptr + o_n * (HC * D) + o_d[None, :]
    fn = ()
    for k in tl.static_range(HC):
        fn = fn + (tl.load(p_fn + k * D, mask=o_n < N, other=0.0),)
    take_turn(DEPENDENT, EAGER)
    # a loop of one turn, known to be so, is none
    for turn in range(1 if ROWS == 1 else tl.minimum(ROWS, T - first)):
        i_row = first + turn
        streams = ()
        for j in tl.static_range(HC):
            streams = streams + (tl.load(stream_ptr + (i_row * HC + j) * D + o_d).to(tl.float32),)
        if SPLITS > 0:
            # now, with all the others: behind a store, or the wait for the other GPU, each would take its time alone
            post, comb = (), ()
            for k in tl.static_range(HC):
                post = post + (tl.load(post_ptr + i_row * HC + k),)
            for jk in tl.static_range(HC * HC):
                comb = comb + (tl.load(comb_ptr + i_row * (HC * HC) + jk),)
            p_y = y_ptr + i_row * D + o_d
            b_y = tl.load(p_y)
            for i in tl.static_range(1, SPLITS):
                b_y += tl.load(p_y + i * T * D)
            if TAKES:
                p_count = counts_ptr + i_row * (D // CHANNELS) + i_part
                number = tl.load(p_count) + 1
                o_word = ((number & 1) * 8 + i_row) * D + o_d
                if PUSHES:
                    push(theirs_ptr + o_word, b_y, number, True)
                b_y += take(mine_ptr + o_word, number, error_ptr, polls)
                tl.store(p_count, number)
            b_y = round_bf16(b_y)
        acc = tl.zeros([32, CHANNELS], tl.float32)
        for k in tl.static_range(HC):
            b_out = streams[k]
            if SPLITS > 0:
                b_out = post[k] * b_y
                for j in tl.static_range(HC):
                    b_out += comb[j * HC + k] * streams[j]
                b_out = round_bf16(b_out)
            tl.store(out_ptr + (i_row * HC + k) * D + o_d, b_out.to(tl.bfloat16))
            # the last line holds the squares
            acc += tl.where(o_n == 31, b_out[None, :], fn[k]) * b_out[None, :]
        p_line = parts_ptr + (i_row * 32 + tl.arange(0, 32)) * (D // CHANNELS) + i_part
        tl.store(p_line, tl.sum(acc, axis=1))


@triton.jit
def _sum_parts(p_parts, FIRST: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Columns of a row's parts, each added up; every warp does them alone. All are asked for before one is added."""
    o_part = tl.arange(0, 32)
    parts = ()
    for n in tl.static_range(COUNT):
        for i in tl.static_range((PARTS + 31) // 32):
            m_part = o_part + i * 32 < PARTS
            parts = parts + (tl.load(p_parts + (FIRST + n) * PARTS + i * 32 + o_part, mask=m_part, other=0.0),)
    sums = ()
    for n in tl.static_range(COUNT):
        b_sum = tl.zeros([32], tl.float32)
        for i in tl.static_range((PARTS + 31) // 32):
            b_sum += parts[n * ((PARTS + 31) // 32) + i]
        sums = sums + (tl.sum(b_sum, axis=0),)
    return sums


@triton.jit
def _weights_of(scale_ptr, base_ptr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Scales of coefficients, and behind them what is added to each."""
    found = ()
    for n in tl.static_range(COUNT):
        found = found + (tl.load(scale_ptr + FIRST + n),)
    for n in tl.static_range(COUNT):
        found = found + (tl.load(base_ptr + FIRST + n),)
    return found


@triton.jit
def _leave_mixes(
    p_parts,
    scale_ptr,
    base_ptr,
    p_post,
    p_comb,
    hc_eps,
    norm_eps,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    """Make post and comb of a row for the next boundary."""
    HC: tl.constexpr = 4
    COUNT: tl.constexpr = HC * (HC + 1)
    weights = _weights_of(scale_ptr, base_ptr, HC, COUNT)
    take_turn(DEPENDENT, EAGER)
    squares = _sum_parts(p_parts, 31, 1, PARTS)
    sums = _sum_parts(p_parts, HC, COUNT, PARTS)
    inverse = tl.rsqrt(squares[0] / (HC * D) + norm_eps)
    mixes = ()
    for n in tl.static_range(COUNT):
        mixes = mixes + (sums[n] * inverse * weights[n] + weights[COUNT + n],)
    comb = balance(mixes[HC:], hc_eps, ITERATIONS)
    for k in tl.static_range(HC):
        tl.store(p_post + k, tl.sigmoid(mixes[k]) * 2.0)
    for jk in tl.static_range(HC * HC):
        tl.store(p_comb + jk, comb[jk])


@triton.jit
def _collapse_kernel(
    stream_ptr,  # [T, HC, D] bfloat16
    parts_ptr,  # [T, 32, P] float32
    scale_ptr,  # [N] float32
    base_ptr,  # [N] float32
    norm_ptr,  # [D] float32
    x_ptr,  # [T, D] bfloat16
    codes_ptr,  # [T, D] float16
    scales_ptr,  # [D/128, 8] float32, of a chunk [T]
    post_ptr,  # [T, HC] float32
    comb_ptr,  # [T, HC, HC] float32
    values_ptr,  # [D/32, COLUMNS, 32] float16, for the experts
    row_scales_ptr,  # [8] float32, likewise
    hc_eps,  # float
    norm_eps,  # float
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FP8: tl.constexpr,
    COLUMNS: tl.constexpr,  # 0: no experts follow
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    HC: tl.constexpr = 4
    i_row = tl.program_id(0)
    p_parts = parts_ptr + i_row * (PARTS * 32)
    if tl.program_id(1) == 0:
        o_block = tl.arange(0, BLOCKS)
        o_d = o_block[:, None] * 128 + tl.arange(0, 128)[None, :]
        m_d = o_d < D
        b_norm = tl.load(norm_ptr + o_d, mask=m_d, other=0.0)
        weights = _weights_of(scale_ptr, base_ptr, 0, HC)
        take_turn(DEPENDENT, EAGER)
        streams = ()
        for j in tl.static_range(HC):
            streams = streams + (tl.load(stream_ptr + (i_row * HC + j) * D + o_d, mask=m_d, other=0.0),)
        tl.debug_barrier()  # the compiler would ask for most of them once the sums are there
        squares = _sum_parts(p_parts, 31, 1, PARTS)
        sums = _sum_parts(p_parts, 0, HC, PARTS)
        inverse = tl.rsqrt(squares[0] / (HC * D) + norm_eps)
        b_x = tl.zeros([BLOCKS, 128], tl.float32)
        for j in tl.static_range(HC):
            pre = tl.sigmoid(sums[j] * inverse * weights[j] + weights[HC + j]) + hc_eps
            b_x += pre * streams[j].to(tl.float32)
        b_x = round_bf16(b_x)
        mean = tl.sum(tl.sum(b_x * b_x, axis=1), axis=0) / D
        b_x = round_bf16(b_norm * (b_x * tl.rsqrt(mean + norm_eps)))
        tl.store(x_ptr + i_row * D + o_d, b_x.to(tl.bfloat16), mask=m_d)
        b_codes, s_x = codes_of(b_x, FP8)
        if CHUNK:
            b_values, s_row = share_scale(b_codes, s_x, FP8)
            tl.store(codes_ptr + i_row * D + o_d, to_places(b_values, BLOCKS), mask=m_d)
            tl.store(scales_ptr + i_row, s_row)
        else:
            tl.store(codes_ptr + i_row * D + o_d, b_codes, mask=m_d)
            tl.store(scales_ptr + o_block * 8 + i_row, s_x, mask=o_block * 128 < D)
        if COLUMNS > 0:
            b_values, s_row = share_scale(b_codes, s_x)
            tl.store(row_scales_ptr + i_row, s_row)
            tl.store(values_ptr + i_row * 32 + o_d // 32 * (COLUMNS * 32) + o_d % 32, b_values, mask=m_d)
    else:
        _leave_mixes(
            p_parts, scale_ptr, base_ptr, post_ptr + i_row * HC, comb_ptr + i_row * (HC * HC), hc_eps, norm_eps,
            D, PARTS, ITERATIONS, DEPENDENT, EAGER,
        )  # fmt: skip


def hyper_mix(
    y: Tensor | None,
    stream: Tensor,
    before: Boundary | None,
    weights: HyperWeights,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    act_fp8: bool,
    spread: ExpertRows | None = None,
    out: Boundary | None = None,
    dependent: bool = False,
    link: Link | None = None,
    pushed: bool = False,
) -> Boundary:
    """Add a sublayer's output to the streams and make the next sublayer's input of them.

    Args:
        y: [S, T, D] float32, T from 1 to 4096: the parts of the sublayer's output, added from left to right and rounded
            to bfloat16; None where no sublayer ran before, so that the streams pass.
        stream: [T, HC, D] bfloat16, D a multiple of 128.
        before: the boundary that made that sublayer's input: `post` and `comb` are read.
        weights: of 24 rows; with 4 rows the streams are collapsed for the head, and post and comb are not written.
        iterations: passes over the columns of `comb`.
        act_fp8: whether `rounded` and `arranged` are rounded to e4m3 as a product wants it, or hold bfloat16 values.
        spread: where to leave the same rows for `expert_up`, if it follows; needs `act_fp8` and at most 8 rows.
        out: destination, for graph capture; allocated when None. It may be `before`, and its stream `stream`.
        dependent: start before the kernel that writes `y` has ended, and wait for it inside.
        link: this GPU's end of a pair. `y` is then this GPU's parts, and the other GPU's are added as `peer_join` adds
            them; at most 8 rows.
        pushed: whether the sum of `y` is on its way to the other GPU already.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(
        y, stream, before, weights, TUNING, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps, act_fp8=act_fp8,
        spread=spread, out=out, dependent=dependent, link=link, pushed=pushed,
    )  # fmt: skip


def launch(
    y: Tensor | None,
    stream: Tensor,
    before: Boundary | None,
    weights: HyperWeights,
    cut: Tuning,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    act_fp8: bool,
    spread: ExpertRows | None = None,
    out: Boundary | None = None,
    dependent: bool = False,
    link: Link | None = None,
    pushed: bool = False,
) -> Boundary:
    """`hyper_mix` with another cut: for benches and tests."""
    require(stream.ndim == 3 and stream.shape[1] == STREAMS, f"stream must be [T, {STREAMS}, D]", tuple(stream.shape))
    rows, _, width = stream.shape
    device = stream.device
    require(1 <= rows <= CHUNK_ROWS_MAX, f"stream must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    whole = max(128, cut.channels)
    require(width % whole == 0 and whole % cut.channels == 0, f"stream must have a multiple of {whole} channels", width)
    require_tensor(stream, "stream", (rows, STREAMS, width), torch.bfloat16)
    require((y is None) == (before is None), "y and before must be given together", "one of them")
    _require_weights(weights, width, device)
    require(iterations > 0, "iterations must be positive", iterations)
    if out is None:
        out = Boundary.empty(rows, width, device, cut.channels)
    codes = _require_boundary(out, rows, width, cut, device)
    if spread is not None:
        require(act_fp8, "act_fp8 must be true for the rows of the experts", act_fp8)
        require(rows <= ROWS_MAX, f"stream must have at most {ROWS_MAX} rows for `spread`", rows)
        require_expert_rows(spread, rows, width, device)
    splits = 0
    if y is not None and before is not None:
        require(y.ndim == 3 and y.shape[0] > 0, "y must be [S, T, D]", tuple(y.shape))
        splits = y.shape[0]
        require_tensor(y, "y", (splits, rows, width), torch.float32, device)
        require_tensor(before.post, "before.post", (rows, STREAMS), torch.float32, device)
        require_tensor(before.comb, "before.comb", (rows, STREAMS, STREAMS), torch.float32, device)
    is_ptx = runs_ptx(device)
    joins = (out.parts,) * 4 if link is None else _require_joins(link, rows, width, cut, splits, pushed, device)
    source = out if before is None else before
    together = 1 if rows <= ROWS_MAX else CHUNK_ROWS
    _direct.call(
        _expand_kernel, (cdiv(rows, together), width // cut.channels),
        stream if y is None else y, stream, source.post, source.comb, weights.fn, out.stream, out.parts, rows,
        *joins, 0 if link is None else link.polls,
        **expand_constants(
            width, weights.fn.shape[0], splits, cut, together, dependent and is_ptx,
            pushes=link is not None and not pushed, takes=link is not None,
        ),
        **({"num_warps": cut.warps[0], "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    # of rows for no expert nothing is written
    values, row_scales = (out.x, out.parts) if spread is None else (spread.values, spread.scales)
    token_columns = 0 if spread is None else columns(rows)
    _direct.call(
        _collapse_kernel, (rows, 2 if weights.fn.shape[0] == COEFFICIENTS else 1),
        out.stream, out.parts, weights.scale, weights.base, weights.norm, out.x, *codes,
        out.post, out.comb, values, row_scales, hc_eps, norm_eps,
        **collapse_constants(width, cut, iterations, act_fp8, token_columns, rows > ROWS_MAX, dependent and is_ptx),
        **({"num_warps": cut.warps[1], "launch_pdl": dependent} if is_ptx else {}),
    )  # fmt: skip
    return out


def expand_constants(
    width: int,
    n: int,
    splits: int,
    cut: Tuning,
    together: int = 1,
    dependent: bool = True,
    *,
    pushes: bool = False,
    takes: bool = False,
) -> dict[str, int | bool]:
    """Return the first kernel's compile-time arguments; `together` rows in one program."""
    return {
        "D": width,
        "N": n,
        "SPLITS": splits,
        "CHANNELS": cut.channels,
        "ROWS": together,
        "PUSHES": pushes,
        "TAKES": takes,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }


def collapse_constants(
    width: int,
    cut: Tuning,
    iterations: int,
    act_fp8: bool,
    token_columns: int = 0,
    chunk: bool = False,
    dependent: bool = True,
) -> dict[str, int | bool]:
    """Return the second kernel's compile-time arguments."""
    return {
        "D": width,
        "PARTS": width // cut.channels,
        "BLOCKS": power_of_two(width // 128),
        "ITERATIONS": iterations,
        "FP8": act_fp8,
        "COLUMNS": token_columns,
        "CHUNK": chunk,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }


def _require_weights(weights: HyperWeights, width: int, device: torch.device) -> None:
    n = weights.fn.shape[0]
    require(n in (STREAMS, COEFFICIENTS), f"fn must have {STREAMS} or {COEFFICIENTS} rows", n)
    require_tensor(weights.fn, "fn", (n, STREAMS * width), torch.float32, device)
    require_tensor(weights.scale, "scale", (n,), torch.float32, device)
    require_tensor(weights.base, "base", (n,), torch.float32, device)
    require_tensor(weights.norm, "norm", (width,), torch.float32, device)


def _require_boundary(out: Boundary, rows: int, width: int, cut: Tuning, device: torch.device) -> tuple[Tensor, Tensor]:
    """Refuse room that does not fit; return where the rows for the next product go."""
    require_tensor(out.stream, "out.stream", (rows, STREAMS, width), torch.bfloat16, device)
    require_tensor(out.x, "out.x", (rows, width), torch.bfloat16, device)
    require_tensor(out.post, "out.post", (rows, STREAMS), torch.float32, device)
    require_tensor(out.comb, "out.comb", (rows, STREAMS, STREAMS), torch.float32, device)
    require_tensor(out.parts, "out.parts", (rows, LINE, width // cut.channels), torch.float32, device)
    if rows <= ROWS_MAX:
        require_rows(out.rounded, rows, width, device)
        return out.rounded.codes, out.rounded.scales
    if out.arranged is None:
        raise ValueError(f"out.arranged must be there for more than {ROWS_MAX} rows; got None")
    require_chunk(out.arranged, rows, width, device)
    return out.arranged.values, out.arranged.scales


def _require_joins(
    link: Link, rows: int, width: int, cut: Tuning, splits: int, pushed: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Refuse an end of a pair that does not fit; return what the kernel reads and writes of it."""
    require(rows <= ROWS_MAX, f"stream must have at most {ROWS_MAX} rows for `link`", rows)
    require(splits > 0, "y must be given for `link`", None)
    require(cut.channels == CHANNELS, f"programs that join must take {CHANNELS} channels", cut.channels)
    require(pushed or runs_ptx(device), "pushed must be true where the GPUs are emulated in turn", pushed)
    require_link(link, width, device)
    return link.theirs.words, link.mine.words, link.mine.counts, link.mine.error
