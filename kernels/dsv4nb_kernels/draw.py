"""The next token of each row: bias, penalties, filters and the position-keyed draw. Twin: `reference.draw`.

Traffic    reads T·V float32 once, and from the L2 once more in each further launch: latency-bound
Grid       (T, V / 2048) in each launch but the last, (T,) there
Equality   no program sees two rows, and what decides is whole numbers or float64 rounded once per operation (`_fixed`):
           row i of a step is bitwise the row alone, and the host's draw of the row

First bias and penalties, and what each block has that is best; where a row is filtered, the end of its sorted list
(`_search`); then a race in which each block has a winner; then the winner of the row, and how likely the model found
it. What a row asks for stands in tensors (`Settings`), so that a captured step follows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4nb_kernels import _direct, _fixed
from dsv4nb_kernels._draw_kernels import finish_kernel, process_kernel, race_kernel, ties_kernel
from dsv4nb_kernels._draw_rules import NUMBERS, WHOLE, Settings, Stages
from dsv4nb_kernels._launch import ROWS_MAX, Limits, cdiv, power_of_two, require, require_tensor, runs_ptx
from dsv4nb_kernels._search import BINS, COPIES, FOLDED, STATE, STEPS, fold_kernel, search_kernel

IDS_MAX = (1 << 17) - 1  # V: so many masses fit into an int64
LIMITS = {
    "process": Limits(registers=96, shared_bytes=64),
    "search": Limits(registers=80, shared_bytes=16 * 1024),
    "fold": Limits(registers=40, shared_bytes=1024),
    "ties": Limits(registers=64, shared_bytes=128),
    "race": Limits(registers=128, shared_bytes=64),
    "finish": Limits(registers=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How rows are cut.

    Attributes:
        block: entries of one program, a power of two.
        warps: of one program.
    """

    block: int = 2048
    warps: int = 8

    def __str__(self) -> str:
        return f"blocks of {self.block}, {self.warps} warps"


TUNING = Tuning()  # measured on an H200, see kernels/README.md
FEW_WARPS = {"fold": 4, "finish": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Room between the launches.

    Attributes:
        row: [T, V] float32, the processed row.
        best, raced: [T, B] int64, candidates of the blocks.
        sums: [T, B, 2] float32, largest logit and sum of exponentials of the blocks.
        state: [T, 7, 8] int64; bins: [T, 6, 2048] int64; copies: [T, 2, 2048, 16] int64; ties: [T, B] int32, of the
            search.
    """

    row: Tensor
    best: Tensor
    raced: Tensor
    sums: Tensor
    state: Tensor
    bins: Tensor
    copies: Tensor
    ties: Tensor

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device, cut: Tuning = TUNING) -> Scratch:
        """Return room for rows of `vocab` logits."""
        shapes = _scratch_shapes(rows, vocab, cut)
        return cls(**{name: torch.empty(shape, dtype=kind, device=device) for name, (shape, kind) in shapes.items()})

    def require(self, rows: int, vocab: int, device: torch.device, cut: Tuning) -> None:
        """Refuse room of another form.

        Raises:
            ValueError: it is not for so many rows and logits, of another dtype, or elsewhere.
        """
        for name, (shape, kind) in _scratch_shapes(rows, vocab, cut).items():
            require_tensor(getattr(self, name), f"scratch {name}", shape, kind, device)


def _scratch_shapes(rows: int, vocab: int, cut: Tuning) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    blocks = cdiv(vocab, cut.block)
    return {
        "row": ((rows, vocab), torch.float32),
        "best": ((rows, blocks), torch.int64),
        "raced": ((rows, blocks), torch.int64),
        "sums": ((rows, blocks, 2), torch.float32),
        "state": ((rows, STEPS + 1, STATE), torch.int64),
        "bins": ((rows, STEPS, BINS), torch.int64),
        "copies": ((rows, 2, BINS, COPIES), torch.int64),
        "ties": ((rows, blocks), torch.int32),
    }


class Drawn(NamedTuple):
    """What was drawn from each row.

    Attributes:
        ids: [T] int32; -1 where the best of the processed row is not finite.
        log_probs: [T] float32, log-softmax of the row as given at the id, temperature 1; NaN where there is none.
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Drawn:
        """Return room for one token of so many rows."""
        return cls(torch.empty(rows, dtype=torch.int32, device=device), torch.empty(rows, device=device))


def draw(
    logits: Tensor,
    settings: Settings,
    stages: Stages,
    *,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    scratch: Scratch | None = None,
    out: Drawn | None = None,
    dependent: bool = False,
) -> Drawn:
    """Draw one token of each row.

    Args:
        logits: [T, V] float32, T from 1 to 8, V at most 131,071; not changed.
        settings: of the rows.
        stages: which launches take place; they must cover what the settings ask for.
        bias: [T, V] float64, added; -inf bans an id, as a mask does. Given when the stages say so.
        counts: [T, V] int32, how often each id stands in the window of the penalties; likewise.
        scratch: room between the launches, for graph capture; allocated when None.
        out: destinations, for graph capture; allocated when None.
        dependent: start before the kernel that writes `logits` has ended, and wait for it inside.

    Raises:
        ValueError: a shape, dtype, stride, device or alignment does not fit.
    """
    return launch(
        logits, settings, stages, TUNING, bias=bias, counts=counts, scratch=scratch, out=out, dependent=dependent
    )


def launch(
    logits: Tensor,
    settings: Settings,
    stages: Stages,
    cut: Tuning,
    *,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    scratch: Scratch | None = None,
    out: Drawn | None = None,
    dependent: bool = False,
) -> Drawn:
    """`draw` with another cut: for benches and tests."""
    require(logits.ndim == 2, "logits must be [T, V]", tuple(logits.shape))
    (rows, vocab), device = logits.shape, logits.device
    require(1 <= rows <= ROWS_MAX, f"logits must have 1 to {ROWS_MAX} rows", rows)
    require(1 <= vocab <= IDS_MAX, f"logits must have 1 to {IDS_MAX} columns", vocab)
    require_tensor(logits, "logits", (rows, vocab), torch.float32)
    require_tensor(settings.numbers, "settings numbers", (rows, NUMBERS), torch.float64, device)
    require_tensor(settings.whole, "settings whole", (rows, WHOLE), torch.int64, device)
    require((bias is not None) == stages.biased, "bias must be given when the stages have it", "one without the other")
    require(
        (counts is not None) == stages.penalised,
        "counts must be given when the stages have them",
        "one without the other",
    )
    if bias is not None:
        require_tensor(bias, "bias", (rows, vocab), torch.float64, device)
    if counts is not None:
        require_tensor(counts, "counts", (rows, vocab), torch.int32, device)
    scratch = Scratch.empty(rows, vocab, device, cut) if scratch is None else scratch
    scratch.require(rows, vocab, device, cut)
    out = Drawn.empty(rows, device) if out is None else out
    require_tensor(out.ids, "out ids", (rows,), torch.int32, device)
    require_tensor(out.log_probs, "out log_probs", (rows,), torch.float32, device)
    is_ptx = runs_ptx(device)
    row = scratch.row if stages.biased or stages.penalised else logits
    numbers, whole = settings.numbers, settings.whole
    searched = scratch.best, numbers, whole, scratch.state, scratch.bins
    grid = rows, cdiv(vocab, cut.block)
    arguments = {
        "process": (
            logits, numbers if bias is None else bias, scratch.ties if counts is None else counts, numbers,
            scratch.row, scratch.best, scratch.sums, scratch.bins, scratch.copies,
        ),
        "search": (row, *searched, scratch.copies),
        "fold": (scratch.copies, scratch.bins),
        "ties": (row, *searched, scratch.ties),
        "race": (row, scratch.best, numbers, whole, scratch.state, scratch.ties, scratch.raced),
        "finish": (logits, numbers, scratch.best, scratch.raced, scratch.sums, *out),
    }  # fmt: skip
    for name, constants in launches(vocab, stages, cut, dependent and is_ptx):
        given = {**options(name, cut), "launch_pdl": dependent} if is_ptx else {}
        programs = {"finish": (rows,), "fold": (rows, BINS // FOLDED)}.get(name, grid)
        _direct.call(KERNELS[name], programs, *arguments[name], **constants, **given)
    return out


KERNELS = {
    "process": process_kernel,
    "search": search_kernel,
    "fold": fold_kernel,
    "ties": ties_kernel,
    "race": race_kernel,
    "finish": finish_kernel,
}


def options(name: str, cut: Tuning) -> dict[str, int | bool]:
    """Return how Triton compiles a launch."""
    return {**_fixed.EXACT, "num_warps": FEW_WARPS.get(name, cut.warps)}


def launches(
    vocab: int, stages: Stages, cut: Tuning, dependent: bool = True
) -> list[tuple[str, dict[str, int | bool]]]:
    """Return each launch of a draw in order, with its compile-time arguments."""
    blocks = cdiv(vocab, cut.block)
    turn = {"DEPENDENT": dependent}
    of_row = {"V": vocab, "BLOCKS": blocks, "NUMBERS": NUMBERS}
    of_blocks = {"BLOCK_BLOCKS": power_of_two(blocks)}
    in_block = {"BLOCK": cut.block}
    steps = [step for step in range(STEPS) if (stages.by_number if step < STEPS // 2 else stages.by_mass)]
    is_searched = stages.races and bool(steps)
    all_copies = 2 * BINS * COPIES
    cleared, copies_cleared = (power_of_two(cdiv(n, blocks)) for n in (STEPS * BINS, all_copies))
    found: list[tuple[str, dict[str, int | bool]]] = [
        ("process", {
            **of_row, **in_block, **turn, "BIASED": stages.biased, "PENALISED": stages.penalised,
            "ALL_BINS": STEPS * BINS if is_searched else 0, "CLEARED": cleared,
            "ALL_COPIES": all_copies, "COPIES_CLEARED": copies_cleared,
        })
    ]  # fmt: skip
    of_search = {**of_row, **of_blocks, **in_block, **turn, "WHOLE": WHOLE}
    states = {"STATES": (STEPS + 1) * STATE}
    if is_searched:
        by_number = {"BY_NUMBER": stages.by_number}
        for step in steps:
            found.append(("search", {**of_search, **by_number, "STEP": step}))
            if step % (STEPS // 2) == 0:
                found.append(("fold", {**turn, "STEP": step}))
        found.append(("ties", {**of_search, **states, **by_number, "ALL_BINS": STEPS * BINS, "STEP": steps[-1] + 1}))
    if stages.races:
        border = (steps[-1] + 1) * STATE + 3 if is_searched else 0
        found.append(("race", {**of_search, **states, "BORDER": border}))
    found.append(("finish", {**of_row, **of_blocks, **turn, "RACES": stages.races}))
    return found
