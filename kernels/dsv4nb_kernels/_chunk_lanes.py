"""Products of a chunk on Hopper: packed weights go through registers into `wgmma`, activations through shared memory.

A program owns 128R rows of a matrix and 64C rows of activations. The packing of the decode kernels (`_fp4`,
`fp8_rows.pack`) is that of `wgmma`'s left operand too: warp w of a warpgroup holds tile w of 64 rows, and a lane's
words, decoded, are its registers. So no weight changes its lane.

Three warpgroups share the work. One copies chunks of 128 k of words and activations into a ring in shared memory; two
decode and multiply, each R times 64 rows. These two are not in step: while one decodes, the other has the tensor cores.

Every 128 k are summed by the tensor cores, from zero, and added in float32 to the sum so far: inside an instruction
they truncate, and a sum over all of K would be off by 1e-5.
"""

# mypy: disable-error-code="assignment, has-type, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005  (Triton compiles no starred tuples)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4nb_kernels._fp4 import DECODE

WARPS = 4  # of a warpgroup
STAGES = gl.constexpr(4)  # chunks of 128 k in the ring
OTHER_WARPS = gl.constexpr([4, 4])  # of the second warpgroup that multiplies, and of the one that copies
OTHER_REGISTERS = gl.constexpr([232, 40])
FIRST = gl.constexpr(0)  # of the warpgroups that multiply
SECOND = gl.constexpr(1)

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PRODUCT.value, k_width=2))
ROWS = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))  # of the matrix
COLUMNS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))  # rows of activations
WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [1, 4, 1, 1], [3, 2, 1, 0]))
LANES = gl.constexpr(gl.SliceLayout(3, WORDS.value))
COPIED_WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 1, 1, 32], [1, 1, 4, 1], [3, 2, 1, 0]))
COPIED_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
WORDS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
ROWS_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))

# eight codes of one row; their scale is byte J of four exponents
_FP4 = gl.constexpr(
    "{\n.reg .b32 a<4>, m;\nprmt.b32 m, $9, 0, %d;\n"
    + DECODE.format(r="a", word="$8")
    + "".join(f"mul.rn.f16x2 a{p}, a{p}, m;\nmov.b32 {{${2 * p},${2 * p + 1}}}, a{p};\n" for p in range(4))
    + "}"
)
_FP8 = gl.constexpr("""{
.reg .b16 h<2>;
.reg .b32 a<2>;
mov.b32 {h0,h1}, $4;
cvt.rn.f16x2.e4m3x2 a0, h0;
cvt.rn.f16x2.e4m3x2 a1, h1;
mov.b32 {$0,$1}, a0;
mov.b32 {$2,$3}, a1;
}""")
# of four stored bytes: 30 less what they lack to the row's largest (given one too large, four times), but at least 0,
# shifted to where the halves of a float16 pair have their exponents once `prmt` has moved them there
_EXPONENTS = gl.constexpr("""{
.reg .b32 d, far, e;
sub.u32 d, $2, $1;
and.b32 far, d, 0xE0E0E0E0;
shr.u32 far, far, 5;
add.u32 far, far, 0x07070707;
and.b32 far, far, 0x08080808;
shr.u32 far, far, 3;
mul.lo.u32 far, far, 31;
or.b32 d, d, far;
not.b32 e, d;
and.b32 e, e, 0x1F1F1F1F;
shl.b32 $0, e, 2;
}""")


@gluon.constexpr_function
def _fp4_asm(unit):
    # float16 keeps its exponent in the upper byte: [0, byte, 0, byte]
    return _FP4.value % (unit << 12 | 4 << 8 | unit << 4 | 4)


@gluon.jit
def _exponents(b_scales, b_peaks):
    """float16 exponents of four scale bytes for `_fp4_words`, relative to the row's largest, which becomes 30."""
    return gl.inline_asm_elementwise(_EXPONENTS, "=r,r,r", [b_scales, b_peaks], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _fp4_words(b_word, b_exponents, UNIT: gl.constexpr):
    return gl.inline_asm_elementwise(
        _fp4_asm(UNIT), "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [b_word, b_exponents],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _fp8_words(b_word):
    return gl.inline_asm_elementwise(
        _FP8, "=h,=h,=h,=h,r", [b_word], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1
    )


@gluon.jit
def _unit(e):
    """Eight columns of a unit of 32: [half, tile, lane] each -> [half, tile, lane, e, h, i]."""
    return gl.join(gl.join(gl.join(e[0], e[1]), gl.join(e[2], e[3])), gl.join(gl.join(e[4], e[5]), gl.join(e[6], e[7])))


@gluon.jit
def _left(b_first, b_second):
    """Two units as `wgmma`'s left operand, [64, 64]; the columns of a unit in the order of the instructions."""
    b_lanes = gl.reshape(gl.join(b_first, b_second), [2, 4, 8, 4, 2, 2, 2, 2])  # half, tile, g, t, e, h, i, unit
    b_rows = gl.permute(b_lanes, [1, 0, 2, 7, 6, 5, 3, 4])
    return gl.convert_layout(gl.reshape(b_rows, [64, 64]), LEFT, assert_trivial=True)


@gluon.jit
def _words(words_shared):
    """A lane's four words of each half: [2, 4, 32] four times."""
    b_lanes = gl.reshape(words_shared.load(COPIED_WORDS), [2, 4, 32, 4])
    b_words = gl.convert_layout(b_lanes, WORDS, assert_trivial=True)
    b_even, b_odd = gl.split(gl.reshape(b_words, [2, 4, 32, 2, 2]))
    w0, w2 = gl.split(b_even)
    w1, w3 = gl.split(b_odd)
    return (
        gl.convert_layout(w0, LANES, assert_trivial=True),
        gl.convert_layout(w1, LANES, assert_trivial=True),
        gl.convert_layout(w2, LANES, assert_trivial=True),
        gl.convert_layout(w3, LANES, assert_trivial=True),
    )


@gluon.jit
def _fp4_left(w, b_exponents, SIDE: gl.constexpr):
    """64 of 128 columns of 64 rows."""
    first = _unit(_fp4_words(w[2 * SIDE], b_exponents, 2 * SIDE))
    second = _unit(_fp4_words(w[2 * SIDE + 1], b_exponents, 2 * SIDE + 1))
    return _left(first, second)


@gluon.jit
def _fp8_left(w):
    """64 columns of 64 rows."""
    return _left(_unit(_fp8_words(w[0]) + _fp8_words(w[1])), _unit(_fp8_words(w[2]) + _fp8_words(w[3])))


@gluon.jit
def lane_places():
    """Half, tile and g of each lane of a warpgroup."""
    o_half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]
    o_tile = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    o_lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    return o_half, o_tile, o_lane // 4


@gluon.jit
def _word_places(R: gl.constexpr):
    P: gl.constexpr = COPIED_WORDS
    o_r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, P))))[:, None, None, None]
    o_half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, P))))[None, :, None, None]
    o_tile = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, P))))[None, None, :, None]
    o_word = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, P))))[None, None, None, :]
    return o_r, o_half, o_tile, o_word


@gluon.jit
def words_of(words_ptr, i_tile, K: gl.constexpr, R: gl.constexpr, FP4: gl.constexpr):
    """Pointers to the words of the first 128 k of 8R tiles: what `copy` takes."""
    if FP4:
        o_r, o_half, o_tile, o_word = _word_places(2 * R)
        p_tiles = words_ptr + i_tile.to(gl.int64) * (K // 256 * 544)
        p_w = p_tiles + (o_r * 4 + o_tile) * (K // 256 * 544) + o_half * 128 + o_word
    else:
        o_side, o_half, o_tile, o_word = _word_places(4 * R)
        p_tiles = words_ptr + i_tile.to(gl.int64) * (K * 4)
        p_w = p_tiles + (o_side // 2 * 4 + o_tile) * (K * 4) + o_side % 2 * 256 + o_half * 128 + o_word
    return p_w


@gluon.jit
def fp4_scales(words_ptr, i_tile, K: gl.constexpr, R: gl.constexpr):
    """Of 4R tiles, R times: pointers to the scales of the first 128 k."""
    o_half, o_tile, o_g = lane_places()
    p_tiles = words_ptr + i_tile.to(gl.int64) * (K // 256 * 544) + 512
    p_s = ()
    for r in gl.static_range(R):
        p_s = p_s + (p_tiles + (r * 4 + o_tile) * (K // 256 * 544) + (o_g * 4 + o_half),)
    return p_s


@gluon.jit
def fp4_peaks(peaks_ptr, i_tile, R: gl.constexpr):
    """Of 4R tiles, R times: the largest scale bytes as `multiply` takes them, and the scales of its rows."""
    o_half, o_tile, o_g = lane_places()
    o_row = gl.arange(0, 64, ROWS)
    p_peaks = peaks_ptr + i_tile.to(gl.int64) * 16
    b_peaks = ()
    s_rows = ()
    for r in gl.static_range(R):
        b_peak = gl.load(p_peaks + (r * 64 + o_tile * 16 + o_half * 8 + o_g)).to(gl.int32)
        b_peaks = b_peaks + ((b_peak + 1) * 0x01010101,)
        b_bits = (gl.load(p_peaks + (r * 64 + o_row)).to(gl.int32) - 14) << 23
        # 2^-127 is no normal number
        s_rows = s_rows + (gl.where(b_bits == 0, 0x00400000, b_bits).to(gl.float32, bitcast=True) * 0.5,)
    return b_peaks, s_rows


@gluon.jit
def row_pointers(x_ptr, i_rows, WIDTH: gl.constexpr):
    """Pointers to the first 128 activations of rows, given as a slice of `COPIED_ROWS`."""
    o_k = gl.arange(0, 128, gl.SliceLayout(0, COPIED_ROWS))
    return x_ptr + gl.expand_dims(i_rows.to(gl.int64) * WIDTH, 1) + gl.expand_dims(o_k, 0)


@gluon.jit
def ring(R: gl.constexpr, C: gl.constexpr, FP4: gl.constexpr):
    """The ring: room for words and activations, and the barriers of a stage that is full and of one that is empty."""
    SIDES: gl.constexpr = 2 * R if FP4 else 4 * R
    words_shared = gl.allocate_shared_memory(gl.int32, [STAGES, SIDES, 2, 4, 128], WORDS_SHARED)
    rows_shared = gl.allocate_shared_memory(gl.float16, [STAGES, C * 64, 128], ROWS_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # threads that copy
        mbarrier.init(empty.index(i), count=2)
    return words_shared, rows_shared, full, empty


@gluon.jit
def copy(p_w, p_x, words_shared, rows_shared, full, empty, CHUNKS, FP4: gl.constexpr):
    """Fill the ring, chunk by chunk."""
    for i_chunk in range(CHUNKS):
        i_stage = i_chunk % STAGES
        mbarrier.wait(empty.index(i_stage), i_chunk // STAGES % 2 ^ 1)
        o_chunk = i_chunk // 2 * 544 + i_chunk % 2 * 256 if FP4 else i_chunk * 512
        async_copy.async_copy_global_to_shared(words_shared.index(i_stage), p_w + o_chunk)
        async_copy.async_copy_global_to_shared(rows_shared.index(i_stage), p_x + i_chunk * 128)
        async_copy.mbarrier_arrive(full.index(i_stage), increment_count=False)


@gluon.jit
def _scales(p_s, i_chunk, R: gl.constexpr, FP4: gl.constexpr):
    o_chunk = i_chunk // 2 * 544 + i_chunk % 2 * 2 if FP4 else i_chunk
    s = ()
    for r in gl.static_range(R):
        s = s + (gl.load(p_s[r] + o_chunk),)
    return s


@gluon.jit
def _add(acc, b_d, s, PLACE: gl.constexpr, FP4: gl.constexpr):
    """Add a product of 128 k to the sum in PLACE."""
    b_sum = acc[PLACE] + b_d if FP4 else acc[PLACE] + b_d * gl.expand_dims(s, 1)
    return acc[:PLACE] + (b_sum,) + acc[PLACE + 1 :]


@gluon.jit
def _first(stage, s, b_peaks, PART: gl.constexpr, r: gl.constexpr, R: gl.constexpr, FP4: gl.constexpr):
    """The words, exponents and first 64 columns of 64 rows of a chunk."""
    if FP4:
        w = _words(stage.slice(PART * R + r, 1))
        b_exponents = _exponents(s[r], b_peaks[r])
        return w, b_exponents, _fp4_left(w, b_exponents, 0)
    else:
        w = _words(stage.slice((PART * R + r) * 2, 1))
        return w, w[0], _fp8_left(w)


@gluon.jit
def first_scales(p_s, R: gl.constexpr, FP4: gl.constexpr):
    """The scales of the first two chunks: what `multiply_from` begins with."""
    return _scales(p_s, 0, R, FP4), _scales(p_s, 1, R, FP4)


@gluon.jit
def multiply(
    p_s,
    b_peaks,
    words_shared,
    rows_shared,
    full,
    empty,
    CHUNKS,
    PART: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    FP4: gl.constexpr,
):
    """`multiply_from` of scales that nobody has asked for yet."""
    s, s_next = first_scales(p_s, R, FP4)
    return multiply_from(p_s, s, s_next, b_peaks, words_shared, rows_shared, full, empty, CHUNKS, PART, R, C, FP4)


@gluon.jit
def multiply_from(
    p_s,
    s,
    s_next,
    b_peaks,
    words_shared,
    rows_shared,
    full,
    empty,
    CHUNKS,
    PART: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    FP4: gl.constexpr,
):
    """The products of R times 64 rows of a matrix with C times 64 rows of activations: R · C tensors [64, 64].

    Args:
        p_s: R pointers to scales of the first 128 k: FP4 [2, 4, 32] int32, [half, tile, lane]; FP8 [64] float32.
        s, s_next: what `first_scales` found there.
        b_peaks: of FP4, R times [2, 4, 32] int32: one more than the row's largest scale byte, in each of four bytes.
        words_shared, rows_shared, full, empty: the ring.
        CHUNKS: how many times 128 k.
        PART: which of the two warpgroups this is.

    Returns:
        float32; of FP4 without the row's scale, which is 2^(largest byte - 142).
    """
    z = gl.zeros([64, 64], gl.float32, PRODUCT)
    acc = ()
    for _ in gl.static_range(R * C):
        acc = acc + (z,)
    mbarrier.wait(full.index(0), 0)
    w, b_exponents, b_first = _first(words_shared.index(0), s, b_peaks, PART, 0, R, FP4)
    for i_chunk in range(CHUNKS):
        i_stage = i_chunk % STAGES
        stage = words_shared.index(i_stage)
        s_later = _scales(p_s, gl.minimum(i_chunk + 2, CHUNKS - 1), R, FP4)
        for r in gl.static_range(R):
            for c in gl.static_range(C):
                x = rows_shared.index(i_stage).slice(c * 64, 64).slice(0, 64, dim=1).permute([1, 0])
                b_d = warpgroup_mma(b_first, x, z, use_acc=False, is_async=True)
                if r + c > 0:
                    b_done = warpgroup_mma_wait(1, [under_way])  # noqa: F821 - of the turn before
                    acc = _add(acc, b_done, s[(r * C + c - 1) // C], r * C + c - 1, FP4)
                if c == 0:
                    if FP4:
                        b_second = _fp4_left(w, b_exponents, 1)
                    else:
                        b_second = _fp8_left(_words(stage.slice((PART * R + r) * 2 + 1, 1)))
                x = rows_shared.index(i_stage).slice(c * 64, 64).slice(64, 64, dim=1).permute([1, 0])
                under_way = warpgroup_mma(b_second, x, b_d, is_async=True)
            if r + 1 < R:
                w, b_exponents, b_first = _first(stage, s, b_peaks, PART, r + 1, R, FP4)
        # the first weights of the next chunk, before the wait for the last product of this one
        i_next = (i_chunk + 1) % STAGES
        mbarrier.wait(full.index(i_next), (i_chunk + 1) // STAGES % 2, pred=i_chunk + 1 < CHUNKS)
        w, b_exponents, b_first = _first(words_shared.index(i_next), s_next, b_peaks, PART, 0, R, FP4)
        b_done = warpgroup_mma_wait(0, [under_way])
        mbarrier.arrive(empty.index(i_stage), count=1)
        acc = _add(acc, b_done, s[R - 1], R * C - 1, FP4)
        s = s_next
        s_next = s_later
    return acc
