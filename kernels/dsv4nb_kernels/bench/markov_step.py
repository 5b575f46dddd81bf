"""The drafter's steps of V4-Flash, whole and by half: one with its weights out of the cache, and a round of five."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import _best, markov_step
from dsv4nb_kernels._best import Scored
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close
from dsv4nb_kernels.markov_step import Tuning
from dsv4nb_kernels.reference.head_argmax import best
from dsv4nb_kernels.reference.markov_step import markov_step as twin

OP = "markov_step"
VOCABULARY, RANK = 129280, 256
SLICES = {"half": VOCABULARY // 2, "whole": VOCABULARY}
STEPS = (1, 5)
ROWS = (1, 2, 4, 6)
SWEPT_ROWS = (1, 6)
CUTS = [
    *(Tuning(rows=rows, warps=warps) for rows, warps in ((32, 4), (32, 2), (64, 4), (64, 8), (128, 4), (128, 8))),
    Tuning(eager=False),
]
LIMIT = 1e-6


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every slice, number of steps and T, and the other cuts at T = 1 and 6."""
    return [arm for name in SLICES for steps in STEPS for rows in ROWS for arm in _own(device, name, steps, rows)]


def _own(device: torch.device, name: str, steps: int, rows: int) -> Iterator[Arm]:
    n = SLICES[name]

    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=name if steps == 1 else f"{name}, {steps} steps",
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=2 * n * RANK * steps,
            make=partial(_make, device, n, steps, rows, cut, dependent),
            compile=partial(_compile, n, cut, dependent),
            check=partial(_check, device, n, rows, cut),
            is_product=cut == markov_step.TUNING and dependent,
            copies=-(-(1 << 29) // (2 * n * RANK)),
        )

    yield arm(markov_step.TUNING)
    if rows in SWEPT_ROWS:
        yield arm(markov_step.TUNING, dependent=False)
        yield from (arm(cut) for cut in CUTS if cut != markov_step.TUNING)


def _compile(n: int, cut: Tuning, dependent: bool) -> None:
    f32, bf16, i32, i64 = torch.float32, torch.bfloat16, torch.int32, torch.int64
    markov_step._markov_kernel.warmup(
        f32, i32, bf16, bf16, f32, i64, 1, 0, VOCABULARY, grid=(1,), num_warps=cut.warps, launch_pdl=dependent,
        **markov_step.constants(n, RANK, cut, dependent),
    )  # fmt: skip
    _best._best_kernel.warmup(
        i64, f32, i32, grid=(1,), num_warps=_best.WARPS, launch_pdl=dependent,
        **_best.constants(n // cut.rows, dependent),
    )  # fmt: skip


def _factors(device: torch.device, n: int, count: int) -> tuple[Tensor, Tensor]:
    """[V, r] and [count, N, r] bfloat16 of random bits."""
    words = random_words(device, VOCABULARY * RANK // 2, ~0x40004000).view(torch.bfloat16)
    outs = random_words(device, count * n * RANK // 2, ~0x40004000).view(torch.bfloat16)
    return words.view(VOCABULARY, RANK), outs.view(count, n, RANK)


def _base(device: torch.device, n: int, rows: int) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator(device).manual_seed(rows), device=device)


def _make(device: torch.device, n: int, steps: int, rows: int, cut: Tuning, dependent: bool, count: int) -> Launch:
    markov_in, outs = _factors(device, n, count)
    bases, tokens = [_base(device, n, rows) for _ in range(steps)], torch.zeros(rows, dtype=torch.int32, device=device)
    scored = [Scored.empty(rows, n, device) for _ in range(steps)]
    parts = torch.empty(rows, n // cut.rows, dtype=torch.int64, device=device)

    def launch(i: int) -> None:
        before = tokens
        for base, out in zip(bases, scored, strict=True):
            markov_step.launch(
                base, before, markov_in, outs[i % count], 0, cut, parts=parts, out=out, dependent=dependent
            )
            before = out.best.ids

    return launch


def _check(device: torch.device, n: int, rows: int, cut: Tuning) -> None:
    markov_in, outs = _factors(device, n, 1)
    base, tokens = _base(device, n, rows), torch.arange(rows, dtype=torch.int32, device=device) * 999
    logits, found = markov_step.launch(base, tokens, markov_in, outs[0], 3, cut)
    exact = twin(base.double(), tokens.long(), markov_in.double(), outs[0].double(), 3)[0]
    require_close(logits, exact, LIMIT)
    values, ids = best(logits, 3)
    assert torch.equal(found.values, values) and torch.equal(found.ids.long(), ids), "another best than the twin's"
