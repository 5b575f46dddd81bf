"""Sums whose order does not depend on the number of rows.

K is cut into units of 32. Unit u of a warp's slice is added to chain u mod 4, in ascending order; a warp ends with
(c0 + c1) + (c2 + c3); the warps along K are added pairwise, neighbours first; the programs along K from left to right.
The number of token columns in use decides only where a chain lives: in other lanes, or in other registers.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005, SIM116  (Triton compiles neither starred tuples nor dictionaries)

from __future__ import annotations

import triton
import triton.language as tl

from dsv4nb_kernels._lanes import add_xor1, add_xor2


@triton.jit
def no_chains(THREADS: tl.constexpr, COLUMNS: tl.constexpr):
    """The accumulators of one lane, all zero."""
    z = tl.zeros([THREADS], tl.float32)
    if COLUMNS == 1:
        return (z, z)
    elif COLUMNS == 2:
        return (z, z, z, z)
    elif COLUMNS == 4:
        return (z, z, z, z, z, z, z, z)
    else:
        return (z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z)


@triton.jit
def add_unit(acc, b_d, s_even, s_odd, o_t, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the product of unit UNIT (of the eight in a stage), times its scales, to its chain.

    With fewer than eight tokens the columns of one instruction hold several units of the same tokens, and a lane's
    result is right only in the columns of UNIT; elsewhere its scale is zero, which changes no bit of a chain.
    `s_even`, `s_odd`: the scales at the lane's two columns.
    """
    if COLUMNS == 8:
        C8: tl.constexpr = UNIT % 4 * 4
        return acc[:C8] + _fold(acc[C8 : C8 + 4], b_d, s_even, s_odd) + acc[C8 + 4 :]
    elif COLUMNS == 4:
        C4: tl.constexpr = UNIT // 2 % 2 * 4
        m_unit = o_t // 2 == UNIT % 2
        s_even = tl.where(m_unit, s_even, 0.0)
        s_odd = tl.where(m_unit, s_odd, 0.0)
        return acc[:C4] + _fold(acc[C4 : C4 + 4], b_d, s_even, s_odd) + acc[C4 + 4 :]
    elif COLUMNS == 2:
        m_unit = o_t == UNIT % 4
        return _fold(acc, b_d, tl.where(m_unit, s_even, 0.0), tl.where(m_unit, s_odd, 0.0))
    else:
        # columns 2t and 2t + 1 hold units t and t + 4
        s = tl.where(o_t == UNIT % 4, s_even, 0.0)
        E: tl.constexpr = UNIT // 4
        return (tl.fma(b_d[E], s, acc[0]), tl.fma(b_d[2 + E], s, acc[1]))


@triton.jit
def _fold(acc, b_d, s_even, s_odd):
    return (
        tl.fma(b_d[0], s_even, acc[0]),
        tl.fma(b_d[1], s_odd, acc[1]),
        tl.fma(b_d[2], s_even, acc[2]),
        tl.fma(b_d[3], s_odd, acc[3]),
    )


@triton.jit
def sum_chains(acc, COLUMNS: tl.constexpr):
    """(c0 + c1) + (c2 + c3) of row g at the lane's two columns, then of row g + 8; with one column, one value each."""
    if COLUMNS == 1:
        return (add_xor2(add_xor1(acc[0])), add_xor2(add_xor1(acc[1])))
    elif COLUMNS == 2:
        return (
            add_xor2(add_xor1(acc[0])),
            add_xor2(add_xor1(acc[1])),
            add_xor2(add_xor1(acc[2])),
            add_xor2(add_xor1(acc[3])),
        )
    elif COLUMNS == 4:
        return (
            add_xor2(acc[0]) + add_xor2(acc[4]),
            add_xor2(acc[1]) + add_xor2(acc[5]),
            add_xor2(acc[2]) + add_xor2(acc[6]),
            add_xor2(acc[3]) + add_xor2(acc[7]),
        )
    else:
        return (
            (acc[0] + acc[4]) + (acc[8] + acc[12]),
            (acc[1] + acc[5]) + (acc[9] + acc[13]),
            (acc[2] + acc[6]) + (acc[10] + acc[14]),
            (acc[3] + acc[7]) + (acc[11] + acc[15]),
        )


@triton.jit
def sum_parts(parts, COUNT: tl.constexpr):
    """Add up a tuple in the order of `sum_warps`."""
    if COUNT == 1:
        return parts[0]
    elif COUNT == 2:
        return parts[0] + parts[1]
    elif COUNT == 4:
        return (parts[0] + parts[1]) + (parts[2] + parts[3])
    else:
        b_left = (parts[0] + parts[1]) + (parts[2] + parts[3])
        b_right = (parts[4] + parts[5]) + (parts[6] + parts[7])
        return b_left + b_right


@triton.constexpr_function
def _sum_warps_asm(values, warps, program_warps):
    """Every warp but the first of a tile leaves its values in shared memory; the first adds them to its own.

    Inputs are the values, the thread and the warp's place along K.
    """
    width = f".v{values}.f32"
    warp_bytes = 32 * values * 4

    def names(warp):
        return [f"p{warp * values + i}" for i in range(values)]

    lines = [
        "{",
        f".shared .align 16 .b8 partial[{program_warps * warp_bytes}];",
        ".reg .pred first;",
        ".reg .b32 own;",
        f".reg .f32 p<{warps * values}>;",
        "mov.u32 own, partial;",
        f"mad.lo.u32 own, ${2 * values}, {values * 4}, own;",
        f"setp.eq.u32 first, ${2 * values + 1}, 0;",
    ]
    lines += [f"mov.f32 {name}, ${values + i};" for i, name in enumerate(names(0))]
    lines += [f"@!first st.shared{width} [own], {{{','.join(names(0))}}};", "bar.sync 0;"]
    for warp in range(1, warps):
        lines.append(f"@first ld.shared{width} {{{','.join(names(warp))}}}, [own+{warp * warp_bytes}];")
    step = 1
    while step < warps:
        for warp in range(0, warps, 2 * step):
            pairs = zip(names(warp), names(warp + step), strict=True)
            lines += [f"@first add.rn.f32 {left}, {left}, {right};" for left, right in pairs]
        step *= 2
    lines += [f"mov.f32 ${i}, {name};" for i, name in enumerate(names(0))]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _sum_warps_constraints(values):
    return "=f," * values + "f," * values + "r,r"


@triton.constexpr_function
def _float32s(count):
    return (tl.float32,) * count


@triton.jit
def sum_warps(acc, o_thread, i_warp, WARPS: tl.constexpr, PROGRAM_WARPS: tl.constexpr):
    """Add up the tuples of the WARPS warps of a tile pairwise, neighbours first; right in warps with `i_warp` 0.

    `tl.sum` picks its order by the layout, so by the shape; and a change of layout lets the compiler move what stands
    before it to other threads, which `mma.sync` and shuffles do not survive. So no tensor changes its layout here.
    """
    if WARPS > 1:
        acc = tl.inline_asm_elementwise(
            _sum_warps_asm(len(acc), WARPS, PROGRAM_WARPS),
            _sum_warps_constraints(len(acc)),
            acc + (o_thread, i_warp),
            _float32s(len(acc)),
            is_pure=False,
            pack=1,
        )
    return acc


@triton.jit
def store_lanes(
    p_out, acc, T, i_tile, N: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up the chains, then the warps of each tile, and write its 16 rows of every token.

    `p_out`: [T, N]; `i_tile`: the program's first tile; `acc`: of TILES · WARPS warps.
    """
    o_thread = tl.arange(0, 32 * TILES * WARPS)
    i_warp = o_thread // 32 % WARPS
    acc = sum_warps(sum_chains(acc, COLUMNS), o_thread, i_warp, WARPS, TILES * WARPS)
    o_column = o_thread % 4 * 2
    p_lane = p_out + o_column * N + (i_tile + o_thread // 32 // WARPS) * 16 + o_thread % 32 // 4
    # where columns repeat, the lanes beyond the first hold what lies past T
    m_even = (i_warp == 0) & (o_column < T)
    if COLUMNS == 1:
        tl.store(p_lane, acc[0], mask=m_even)
        tl.store(p_lane + 8, acc[1], mask=m_even)
    else:
        m_odd = (i_warp == 0) & (o_column + 1 < T)
        tl.store(p_lane, acc[0], mask=m_even)
        tl.store(p_lane + N, acc[1], mask=m_odd)
        tl.store(p_lane + 8, acc[2], mask=m_even)
        tl.store(p_lane + N + 8, acc[3], mask=m_odd)
