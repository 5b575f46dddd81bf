"""One element per thread: the loads, shuffles and products that work on whole lanes of a warp.

A 1-D tensor with as many elements as the program has threads has element i in thread i (Triton's default layout; a GPU
test holds it to that). Inline PTX on such a tensor sees one lane, so it may load 16 bytes per lane, shuffle, and issue
`mma.sync` on operands that never pass through shared memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM108  (one branch is left after compilation)

from __future__ import annotations

import triton
import triton.language as tl

# weights are read once: they must not push the activations out of the L1
STREAM = tl.constexpr(".L1::no_allocate")
KEEP = tl.constexpr("")
# a program that starts early may share a processor with older ones: what it does not wait for must not come from its L1
SHARED = tl.constexpr(".cg")

_XOR_ADD = "{.reg .f32 t; shfl.sync.bfly.b32 t, $1, %d, 31, 0xffffffff; add.rn.f32 $0, $1, t;}"
_ADD_XOR1 = tl.constexpr(_XOR_ADD % 1)
_ADD_XOR2 = tl.constexpr(_XOR_ADD % 2)


@triton.constexpr_function
def _load_asm(loads, stride, cache):
    lines = []
    for i in range(loads):
        registers = ",".join(f"${4 * i + j}" for j in range(4))
        lines.append(f"ld.global{cache}.v4.b32 {{{registers}}}, [${4 * loads}+{i * stride}];")
    return "\n".join(lines)


@triton.constexpr_function
def _load_constraints(loads):
    return "=r," * (4 * loads) + "l"


@triton.constexpr_function
def _int32s(count):
    return (tl.int32,) * count


@triton.jit
def load_lanes(p_lane, LOADS: tl.constexpr, STRIDE: tl.constexpr, CACHE: tl.constexpr):
    """16 bytes per lane at each of `p_lane`, `p_lane` + STRIDE, ...: 4 LOADS registers, as a tuple of int32 tensors."""
    return tl.inline_asm_elementwise(
        _load_asm(LOADS, STRIDE, CACHE),
        _load_constraints(LOADS),
        [p_lane],
        _int32s(4 * LOADS),
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _pair_asm(cache):
    return f"ld.global{cache}.v2.f32 {{$0,$1}}, [$2];"


@triton.jit
def load_pair(p_lane, CACHE: tl.constexpr):
    """Two float32 per lane, 8-byte aligned."""
    return tl.inline_asm_elementwise(
        _pair_asm(CACHE), "=f,=f,l", [p_lane], (tl.float32, tl.float32), is_pure=False, pack=1
    )


@triton.jit
def after_loads(p_lane):
    """`p_lane`, unchanged: a warp barrier past which the assembler does not sink the loads above it."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 m; activemask.b32 m; bar.warp.sync m; mov.b64 $0, $1;}",
        "=l,l",
        [p_lane],
        tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_xor1(b_v):
    """v plus the v of the neighbour lane."""
    return tl.inline_asm_elementwise(_ADD_XOR1, "=f,f", [b_v], tl.float32, is_pure=False, pack=1)


@triton.jit
def add_xor2(b_v):
    """v plus the v of the lane two further in the group of four."""
    return tl.inline_asm_elementwise(_ADD_XOR2, "=f,f", [b_v], tl.float32, is_pure=False, pack=1)


@triton.jit
def row_offset(o_g, o_t, T, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Where in [T, WIDTH] 16-bit activations the lane's first load begins, in elements.

    With fewer than eight columns a load holds several units of the same rows: lane g the row g mod COLUMNS and the unit
    g / COLUMNS; of a single row, column 2t + e holds unit t + 4e, so that a lane keeps to one chain.
    """
    if COLUMNS == 1:
        o_unit = o_g // 2 + o_g % 2 * 4
    else:
        o_unit = o_g // COLUMNS
    # rows past T repeat the last one: their columns are computed and not stored
    return tl.minimum(o_g % COLUMNS, T - 1) * WIDTH + o_unit * 32 + o_t * 8


@triton.constexpr_function
def rows_loads(chunk, ahead, chunks, columns):
    """How many activation loads are under way when a chunk's turn comes, `ahead` chunks in advance."""
    return min(-(-(chunk + ahead) * columns // 4), chunks * columns // 4)


@triton.jit
def load_rows(
    p_x,
    CHUNK: tl.constexpr,
    NEXT: tl.constexpr,
    AHEAD: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """The activations to request between the turns of chunks CHUNK and NEXT; 0 and 0 for those before the first."""
    FIRST: tl.constexpr = rows_loads(CHUNK, AHEAD, CHUNKS, COLUMNS) if NEXT > 0 else 0
    LAST: tl.constexpr = rows_loads(NEXT, AHEAD, CHUNKS, COLUMNS)
    if LAST > FIRST:
        return load_lanes(p_x + FIRST * (512 // COLUMNS), LAST - FIRST, 512 // COLUMNS, CACHE)
    else:
        return ()
