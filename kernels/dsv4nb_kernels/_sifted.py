"""The best entries of long rows whose peaks are known: two launches, the second of one program a row.

A row's peaks are the largest scores of groups of entries, which `index_scores` leaves with them. K of the peaks are K
entries, so the bound that K peaks reach leaves out nothing of the best K, and where groups are many and small little
more reaches it. So every program of the first launch looks for that bound among the peaks, and keeps what reaches it in
its own block; the second launch looks for the exact bound among these few. A block in which more than it may keep
reach the bound keeps its own best. Where what is kept is much in all, the last program goes through it block by block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._bounds import between, fifth, find, narrow, reached, take
from dsv4nb_kernels._launch import Limits, cdiv, power_of_two, require, require_tensor, runs_ptx
from dsv4nb_kernels._order import NEVER, ordered
from dsv4nb_kernels._turns import take_turn

KEYS = 128  # entries of one program of `index_scores`
GROUP = 8  # of them share a peak: entry g of a program, g + 16, and so on, so that neighbours do not
PEAKS = 4096  # that a program compares; of more, every so many are one again
LIMITS = {
    "sift": Limits(registers=128, stack_bytes=8, shared_bytes=512),
    "settle": Limits(registers=255, shared_bytes=4096),
}

_AT_ONCE = tl.constexpr(16)  # blocks whose beginnings are compared with a place


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How rows are cut; powers of two, and no part of the choice.

    Attributes:
        block: entries of a program of the first launch.
        spare: how many times k a block may keep.
        few: how many times k the last program holds in its registers.
        slack: a bound is good enough that one part in so many of k more peaks than k reach.
        warps: of the programs of both launches.
        eager: whether the next launch may start before a program has waited itself.
    """

    block: int = 4096
    spare: int = 2
    few: int = 4
    slack: int = 8
    warps: int = 8
    eager: bool = True

    def __str__(self) -> str:
        name = f"peaks, blocks of {self.block}, {self.spare} k kept, {self.few} k at last, slack {self.slack}"
        return f"{name}, {self.warps} warps" + (", eager" if self.eager else "")


CUT = Cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the first launch leaves.

    Attributes:
        keys, entries: [T, blocks, kept] int32, from the beginning of each block on.
        counts: [T, blocks + 1] int32, how many of each block there are, and the row's bound.
    """

    keys: Tensor
    entries: Tensor
    counts: Tensor


@triton.jit
def _sift_kernel(
    scores_ptr,  # [T, C] float32
    visible_ptr,  # [T] int32
    peaks_ptr,  # [T, C / GROUP] float32
    keys_ptr,  # [T, blocks, KEPT] int32
    entries_ptr,  # [T, blocks, KEPT] int32
    counts_ptr,  # [T, blocks + 1] int32
    C,  # int
    K: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    PEAKS: tl.constexpr,
    FOLDS: tl.constexpr,
    ENOUGH: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_block = tl.program_id(1)
    blocks = tl.num_programs(1)
    o_entry = i_block * BLOCK + tl.arange(0, BLOCK)
    TOGETHER: tl.constexpr = KEYS // GROUP
    peaks = C // GROUP
    take_turn(DEPENDENT, EAGER)
    b_score = tl.load(scores_ptr + i_row * C + o_entry, mask=o_entry < C, other=0.0)
    visible = tl.minimum(tl.load(visible_ptr + i_row), C)
    b_peak_key = tl.full([PEAKS], NEVER, tl.int32)
    for fold in tl.static_range(FOLDS):
        o_peak = fold * PEAKS + tl.arange(0, PEAKS)
        b_peak = tl.load(peaks_ptr + i_row * peaks + o_peak, mask=o_peak < peaks, other=0.0)
        # the first entry of a group: where it is hidden, all are
        m_seen = o_peak // TOGETHER * KEYS + o_peak % TOGETHER < visible
        b_peak_key = tl.maximum(b_peak_key, tl.where(m_seen, ordered(b_peak), NEVER))
    b_key = tl.where(o_entry < visible, ordered(b_score), NEVER)

    bound, _ = find(b_peak_key, ENOUGH, K)
    count = tl.sum((b_key >= bound.to(tl.int32)).to(tl.int32), axis=0).to(tl.int64)
    low = bound
    if count > KEPT:
        top = tl.max(b_key, axis=0).to(tl.int64)
        low, count = narrow(b_key, low, top + 1, count, KEPT, K)
    b_taken, kept = take(b_key, low, count, KEPT, K)
    o_place = (i_row * blocks + i_block) * KEPT + tl.cumsum(b_taken, axis=0) - 1
    tl.store(keys_ptr + o_place, b_key, mask=b_taken > 0)
    tl.store(entries_ptr + o_place, o_entry, mask=b_taken > 0)
    p_counts = counts_ptr + i_row * (blocks + 1)
    tl.store(p_counts + i_block, kept)
    if i_block == 0:
        tl.store(p_counts + blocks, bound.to(tl.int32))


@triton.jit
def _settle_kernel(
    keys_ptr,  # [T, blocks, KEPT] int32
    entries_ptr,  # [T, blocks, KEPT] int32
    counts_ptr,  # [T, blocks + 1] int32
    out_ptr,  # [T, K] int32
    blocks,  # int
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEW: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_block = tl.arange(0, _AT_ONCE)
    o_few = tl.arange(0, FEW)
    o_kept = tl.arange(0, KEPT)
    p_keys = keys_ptr + i_row * blocks * KEPT
    p_entries = entries_ptr + i_row * blocks * KEPT
    p_counts = counts_ptr + i_row * (blocks + 1)
    p_out = out_ptr + i_row * K
    take_turn(DEPENDENT, EAGER)
    # a row is its blocks' entries, one block behind the other: place `o_few` is in the block before which so many end
    total = tl.full((), 0, tl.int32)
    b_block = tl.zeros([FEW], tl.int32)
    b_begin = tl.zeros([FEW], tl.int32)
    for first in range(0, BLOCKS, _AT_ONCE):
        b_count = tl.load(p_counts + first + o_block, mask=first + o_block < blocks, other=0)
        b_end = total + tl.cumsum(b_count, axis=0)
        m_before = b_end[None, :] <= o_few[:, None]
        b_block += tl.sum(m_before.to(tl.int32), axis=1)
        b_begin += tl.sum(tl.where(m_before, b_count[None, :], 0), axis=1)
        total += tl.sum(b_count, axis=0)
    low = tl.load(p_counts + blocks).to(tl.int64)
    found = total.to(tl.int64)
    if total <= FEW:
        o_slot = b_block * KEPT + o_few - b_begin
        b_key = tl.load(p_keys + o_slot, mask=o_few < total, other=NEVER)
        b_entry = tl.load(p_entries + o_slot, mask=o_few < total, other=-1)
        low, found = narrow(b_key, low, tl.max(b_key, axis=0).to(tl.int64) + 1, found, K, K)
        b_taken, count = take(b_key, low, found, K, K)
        tl.store(p_out + tl.cumsum(b_taken, axis=0) - 1, b_entry, mask=b_taken > 0)
        o_rest = tl.arange(0, BLOCK_K)
        tl.store(p_out + o_rest, tl.full([BLOCK_K], -1, tl.int32), mask=(o_rest >= count) & (o_rest < K))
    else:
        top = low
        for i in range(blocks):
            b_key = tl.load(p_keys + i * KEPT + o_kept, mask=o_kept < tl.load(p_counts + i), other=NEVER)
            top = tl.maximum(top, tl.max(b_key, axis=0).to(tl.int64))
        high = top + 1
        while (found > K) & (high - low > 1):
            step = fifth(low, high)
            t2 = tl.minimum(low + 2 * step, high)
            t3 = tl.minimum(low + 3 * step, high)
            t4 = tl.minimum(low + 4 * step, high)
            c1 = tl.full((), 0, tl.int64)
            c2 = c1
            c3 = c1
            c4 = c1
            for i in range(blocks):
                b_key = tl.load(p_keys + i * KEPT + o_kept, mask=o_kept < tl.load(p_counts + i), other=NEVER)
                n1, n2, n3, n4 = reached(b_key, low + step, t2, t3, t4)
                c1 += n1
                c2 += n2
                c3 += n3
                c4 += n4
            low, high, found = between(low, high, found, step, c1, c2, c3, c4, K)
        bound = low.to(tl.int32)
        above = tl.full((), 0, tl.int32)  # of keys equal to the bound, the first take what these leave
        for i in range(blocks):
            b_key = tl.load(p_keys + i * KEPT + o_kept, mask=o_kept < tl.load(p_counts + i), other=NEVER)
            above += tl.sum((b_key > bound).to(tl.int32), axis=0)
        begin = tl.full((), 0, tl.int32)
        equal = tl.full((), 0, tl.int32)
        for i in range(blocks):
            m_kept = o_kept < tl.load(p_counts + i)
            b_key = tl.load(p_keys + i * KEPT + o_kept, mask=m_kept, other=NEVER)
            b_entry = tl.load(p_entries + i * KEPT + o_kept, mask=m_kept, other=-1)
            b_equal = (b_key == bound).to(tl.int32)
            m_first = (b_equal > 0) & (equal + tl.cumsum(b_equal, axis=0) <= K - above)
            b_taken = ((b_key > bound) | m_first).to(tl.int32)
            tl.store(p_out + begin + tl.cumsum(b_taken, axis=0) - 1, b_entry, mask=b_taken > 0)
            begin += tl.sum(b_taken, axis=0)
            equal += tl.sum(b_equal, axis=0)


def room_shapes(rows: int, count: int, k: int, cut: Cut = CUT) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the shapes of a `Room`'s keys and counts for rows of `count` scores."""
    blocks = cdiv(count, cut.block)
    return (rows, blocks, cut.spare * power_of_two(k)), (rows, blocks + 1)


def empty_room(rows: int, count: int, k: int, device: torch.device, cut: Cut = CUT) -> Room:
    """Return room for rows of `count` scores."""
    kept, counts = room_shapes(rows, count, k, cut)
    keys, entries, each = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (kept, kept, counts))
    return Room(keys=keys, entries=entries, counts=each)


def launch(
    scores: Tensor, visible: Tensor, peaks: Tensor, k: int, room: Room, out: Tensor, cut: Cut, dependent: bool
) -> None:
    """Write the best `k` of each row to `out` [T, k]; the rest is as of `top_entries`, which has looked at it.

    Args:
        peaks: [T, C / GROUP] float32, the largest visible score of each group; what groups without a visible entry hold
            is not looked at.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    rows, count = scores.shape
    device = scores.device
    require(count % KEYS == 0, f"scores with peaks must have a multiple of {KEYS} columns", count)
    require_tensor(peaks, "peaks", (rows, count // GROUP), torch.float32, device)
    kept, counts = room_shapes(rows, count, k, cut)
    require_tensor(room.keys, "room keys", kept, torch.int32, device)
    require_tensor(room.entries, "room entries", kept, torch.int32, device)
    require_tensor(room.counts, "room counts", counts, torch.int32, device)
    is_ptx = runs_ptx(device)
    options = {"num_warps": cut.warps, "launch_pdl": dependent} if is_ptx else {}
    _direct.call(
        _sift_kernel, (rows, kept[1]),
        scores, visible, peaks, room.keys, room.entries, room.counts, count,
        **sift_constants(count, k, cut, dependent and is_ptx), **options,
    )  # fmt: skip
    _direct.call(
        _settle_kernel, (rows,),
        room.keys, room.entries, room.counts, out, kept[1],
        **settle_constants(count, k, cut, dependent and is_ptx), **options,
    )  # fmt: skip


def sift_constants(count: int, k: int, cut: Cut = CUT, dependent: bool = True) -> dict[str, int | bool]:
    """Return the first kernel's compile-time arguments."""
    return {
        "K": k,
        "KEPT": cut.spare * power_of_two(k),
        "BLOCK": cut.block,
        "GROUP": GROUP,
        "KEYS": KEYS,
        "PEAKS": min(PEAKS, power_of_two(count // GROUP)),
        "FOLDS": cdiv(count // GROUP, PEAKS),
        "ENOUGH": k + k // cut.slack,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }


def settle_constants(count: int, k: int, cut: Cut = CUT, dependent: bool = True) -> dict[str, int | bool]:
    """Return the second kernel's compile-time arguments."""
    return {
        "K": k,
        "BLOCK_K": power_of_two(k),
        "KEPT": cut.spare * power_of_two(k),
        "BLOCKS": power_of_two(cdiv(count, cut.block)),
        "FEW": cut.few * power_of_two(k),
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }
