"""The best visible entries of each row of a step, exactly. Twin: `reference.top_entries`.

Traffic    reads the visible scores once, from the L2, and those of the entries that are left in each further round
Grid       (T, blocks) in each round; a program looks at one block of one row, of a step as of a chunk
Equality   no program sees two rows; the result is a set, in ascending order, and no sum of floats takes part in it

Scores become integers that compare alike. A program keeps its block in registers and looks for a bound that few enough
entries reach, four at a time (`_bounds`). In the last round k reach it; before that a block may keep some more, which
saves most of the search. What the blocks keep is the row of the next round.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct
from dsv4nb_kernels._bounds import find, take
from dsv4nb_kernels._launch import (
    CHUNK_ROWS_MAX,
    ROWS_MAX,
    Limits,
    cdiv,
    power_of_two,
    require,
    require_few,
    require_tensor,
    runs_ptx,
)
from dsv4nb_kernels._order import NEVER, ordered
from dsv4nb_kernels._turns import take_turn

ABSENT = -1
ENTRIES_MAX = 1 << 20  # C
LIMITS = Limits(registers=112, stack_bytes=16, shared_bytes=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How rows are cut into blocks; powers of two.

    Attributes:
        block: entries of a program, in every round but the last.
        spare: how many times k a block may keep, but in the last round.
        last: entries from which on a row is cut.
        warps: of a program that looks at 4096 entries or fewer, and of one that looks at more.
        eager: whether a round lets the next one start before it has waited itself.
    """

    block: int = 4096
    spare: int = 2
    last: int = 8192
    warps: tuple[int, int] = (8, 16)
    eager: bool = False

    def rounds(self, count: int, k: int) -> list[Round]:
        """Return what is left of `count` entries, round by round."""
        found = []
        while count > self.last:
            blocks, kept = cdiv(count, self.block), self.spare * k
            found.append(Round(count, blocks, self.block, kept, self.warps[self.block > 4096]))
            count = blocks * kept
        block = power_of_two(count)
        return [*found, Round(count, 1, block, k, self.warps[block > 4096])]

    def __str__(self) -> str:
        first, second = self.warps
        name = f"blocks of {self.block} from {self.last}, {self.spare} k kept, {first} and {second} warps"
        return name + (", eager" if self.eager else "")


class Round(NamedTuple):
    """One launch.

    Attributes:
        width: entries of a row that are left.
        blocks: programs of a row.
        block: entries of a program.
        kept: how many a program may keep.
        warps: of a program.
    """

    width: int
    blocks: int
    block: int
    kept: int
    warps: int


# measured on an H200, see kernels/README.md; the entries do not depend on the cut
TUNING = Tuning()
CHUNK_TUNING = Tuning(last=4096, warps=(4, 8))


def tuning(rows: int) -> Tuning:
    """Return how `rows` rows are cut."""
    return TUNING if rows <= ROWS_MAX else CHUNK_TUNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """What the rounds but the last leave: keys and entries, each [T, blocks · kept] int32."""

    rounds: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def empty(cls, rows: int, count: int, k: int, device: torch.device, cut: Tuning | None = None) -> Scratch:
        """Return room for rows of `count` scores."""

        cut = cut or tuning(rows)

        def ints(each: Round) -> Tensor:
            return torch.empty(rows, each.blocks * each.kept, dtype=torch.int32, device=device)

        return cls(rounds=tuple((ints(each), ints(each)) for each in cut.rounds(count, k)[:-1]))


@triton.jit
def _top_entries_kernel(
    scores_ptr,  # [T, width] float32, read in the first round
    visible_ptr,  # [T] int32, likewise
    keys_ptr,  # [T, width] int32, read in the later rounds
    entries_ptr,  # [T, width] int32, likewise
    keys_out_ptr,  # [T, blocks · KEPT] int32, written in all rounds but the last
    entries_out_ptr,  # [T, blocks · KEPT] int32
    width,  # int, entries that are left
    K: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EAGER: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_block = tl.program_id(1)
    o_left = i_block * BLOCK + tl.arange(0, BLOCK)
    take_turn(DEPENDENT, EAGER)
    if FIRST:
        m_left = o_left < tl.minimum(tl.load(visible_ptr + i_row), width)
        b_score = tl.load(scores_ptr + i_row * width + o_left, mask=m_left, other=0.0)
        b_key = tl.where(m_left, ordered(b_score), NEVER)
        b_entry = o_left
    else:
        b_key = tl.load(keys_ptr + i_row * width + o_left, mask=o_left < width, other=NEVER)
        b_entry = tl.load(entries_ptr + i_row * width + o_left, mask=o_left < width, other=-1)

    bound, found = find(b_key, KEPT, K)
    b_taken, count = take(b_key, bound, found, KEPT, K)
    o_place = (i_row * tl.num_programs(1) + i_block) * KEPT + tl.cumsum(b_taken, axis=0) - 1
    o_rest = tl.arange(0, BLOCK_KEPT)
    m_rest = (o_rest >= count) & (o_rest < KEPT)
    o_rest += (i_row * tl.num_programs(1) + i_block) * KEPT
    tl.store(entries_out_ptr + o_place, b_entry, mask=b_taken > 0)
    tl.store(entries_out_ptr + o_rest, tl.full([BLOCK_KEPT], -1, tl.int32), mask=m_rest)
    if not LAST:
        tl.store(keys_out_ptr + o_place, b_key, mask=b_taken > 0)
        tl.store(keys_out_ptr + o_rest, tl.full([BLOCK_KEPT], NEVER, tl.int32), mask=m_rest)


def top_entries(
    scores: Tensor,
    visible: Tensor,
    k: int,
    *,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Choose the k highest scores among the first `visible` of each row, ties to the lowest index.

    Args:
        scores: [T, C] float32, T from 1 to 4096, C at most 2^20, T·C below 2^31, no NaN among what is visible; columns
            from `visible` on may hold anything.
        visible: [T] int32.
        k: from 1 to 512; a block must hold four times what it may keep.
        scratch: room between the rounds, for graph capture; allocated when None.
        out: [T, min(k, C)] int32 destination, for graph capture; allocated when None.
        dependent: start before the kernel that writes `scores` has ended, and wait for it inside.

    Returns:
        [T, min(k, C)] int32, ascending; -1 fills the end of a row with fewer visible entries.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    cut = tuning(scores.shape[0])
    return launch(scores, visible, k, cut, scratch=scratch, out=out, dependent=dependent)


def launch(
    scores: Tensor,
    visible: Tensor,
    k: int,
    cut: Tuning,
    *,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """`top_entries` with another cut: for benches and tests."""
    require(scores.ndim == 2, "scores must be [T, C]", tuple(scores.shape))
    rows, count = scores.shape
    device = scores.device
    require(1 <= rows <= CHUNK_ROWS_MAX, f"scores must have 1 to {CHUNK_ROWS_MAX} rows", rows)
    require(0 < count <= ENTRIES_MAX, f"scores must have 1 to {ENTRIES_MAX} columns", count)
    require_tensor(scores, "scores", (rows, count), torch.float32)
    require_few(rows * count, "scores")
    require_tensor(visible, "visible", (rows,), torch.int32, device)
    most = cut.block // (4 * cut.spare)
    require(1 <= k <= most, f"k must be 1 to {most}", k)
    k = min(k, count)
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=device)
    require_tensor(out, "out", (rows, k), torch.int32, device)
    rounds = cut.rounds(count, k)
    if scratch is None:
        scratch = Scratch.empty(rows, count, k, device, cut)
    require(len(scratch.rounds) == len(rounds) - 1, f"scratch must be of {len(rounds) - 1} rounds", len(scratch.rounds))
    for (keys, entries), each in zip(scratch.rounds, rounds, strict=False):
        require_tensor(keys, "scratch keys", (rows, each.blocks * each.kept), torch.int32, device)
        require_tensor(entries, "scratch entries", (rows, each.blocks * each.kept), torch.int32, device)
    is_ptx = runs_ptx(device)
    source = (out, out)
    for i, (each, target) in enumerate(zip(rounds, (*scratch.rounds, (out, out)), strict=True)):
        _direct.call(
            _top_entries_kernel, (rows, each.blocks),
            scores, visible, *source, *target, each.width,
            **constants(k, each, cut, i == 0, i == len(rounds) - 1, dependent and is_ptx),
            **({"num_warps": each.warps, "launch_pdl": dependent} if is_ptx else {}),
        )  # fmt: skip
        source = target
    return out


def constants(
    k: int, each: Round, cut: Tuning, is_first: bool, is_last: bool, dependent: bool = True
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments in one round."""
    return {
        "K": k,
        "KEPT": each.kept,
        "BLOCK_KEPT": power_of_two(each.kept),
        "BLOCK": each.block,
        "FIRST": is_first,
        "LAST": is_last,
        "DEPENDENT": dependent,
        "EAGER": cut.eager,
    }
