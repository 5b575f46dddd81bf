"""The choice of 512 entries in V4-Flash: of random scores, of equal ones, and behind the scores' kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import index_scores, top_entries
from dsv4nb_kernels.bench import index_scores as scores_bench
from dsv4nb_kernels.bench._driver import Arm, Launch
from dsv4nb_kernels.reference.top_entries import top_entries as twin
from dsv4nb_kernels.top_entries import Scratch, Tuning

OP = "top_entries"
K = 512
COUNTS = {"16384": 16384, "65536": 65536}
KINDS = ("random", "neighbours", "equal", "indexer")
ROWS = (1, 2, 4, 6)
SWEPT_ROWS = (1, 6)
CUTS = [
    Tuning(block=block, spare=spare, last=last, warps=warps)
    for block, spare, last, warps in (
        (4096, 2, 8192, (8, 16)), (4096, 2, 8192, (4, 8)), (4096, 2, 4096, (8, 16)), (4096, 2, 4096, (4, 8)),
        (4096, 1, 8192, (8, 16)), (4096, 1, 8192, (4, 8)), (8192, 2, 8192, (8, 8)), (8192, 2, 8192, (8, 16)),
        (8192, 2, 8192, (4, 16)), (8192, 2, 16384, (8, 16)), (4096, 2, 16384, (8, 32)),
    )
]  # fmt: skip
FEW = 16  # copies: the scores have just been written when they are read


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every problem and T, and the other cuts at T = 1 and 6 on random scores."""
    return [arm for kind in KINDS for name in COUNTS for rows in ROWS for arm in _own(device, kind, name, rows)]


def _own(device: torch.device, kind: str, name: str, rows: int) -> Iterator[Arm]:
    count, product = COUNTS[name], top_entries.TUNING
    keys_bytes = count * scores_bench.WIDTH * 2 if kind == "indexer" else 0

    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=f"{name}, {kind}",
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=rows * count * 4 + keys_bytes,
            make=partial(_make, device, kind, count, rows, cut, dependent),
            compile=partial(_compile, kind, count, cut, dependent),
            check=partial(_check, device, kind, count, rows, cut),
            is_product=cut == product and dependent,
            copies=None if keys_bytes else FEW,
        )

    yield arm(product)
    if rows in SWEPT_ROWS and kind in ("random", "indexer"):
        yield arm(product, dependent=False)
    if rows in SWEPT_ROWS and kind == "random":
        yield from (arm(cut) for cut in CUTS if cut != product)


def _compile(kind: str, count: int, cut: Tuning, dependent: bool) -> None:
    i32 = torch.int32
    rounds = cut.rounds(count, K)
    for i, each in enumerate(rounds):
        top_entries._top_entries_kernel.warmup(
            torch.float32, i32, i32, i32, i32, i32, each.width, grid=(1,), num_warps=each.warps, launch_pdl=dependent,
            **top_entries.constants(K, each, cut, i == 0, i == len(rounds) - 1, dependent),
        )  # fmt: skip
    if kind == "indexer":
        for scores in (index_scores.TUNING, index_scores.ALONE, index_scores.FEW):
            scores_bench.compile_scores(scores, dependent)


def _draw_scores(device: torch.device, kind: str, count: int, rows: int, copies: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    if kind == "equal":
        return torch.zeros(copies, rows, count, device=device)
    scores = torch.randn(copies, rows, count, generator=generator, device=device)
    if kind == "neighbours":
        scores[..., count // 3 : count // 3 + 400] += 10.0
    return scores


def _make(device: torch.device, kind: str, count: int, rows: int, cut: Tuning, dependent: bool, copies: int) -> Launch:
    scratch = Scratch.empty(rows, count, K, device, cut)
    out = torch.empty(rows, K, dtype=torch.int32, device=device)
    visible = torch.full((rows,), count, dtype=torch.int32, device=device)

    def choose(scores: Tensor) -> Tensor:
        return top_entries.launch(scores, visible, K, cut, scratch=scratch, out=out, dependent=dependent)

    if kind != "indexer":
        scores = _draw_scores(device, kind, count, rows, copies)
        return lambda i: choose(scores[i % copies])
    query, keys, weights, _ = scores_bench.draw_step(device, count, rows, copies)
    room = torch.empty(rows, count, device=device)

    def launch(i: int) -> Tensor:
        index_scores.index_scores(query, keys[i % copies], weights, visible, out=room, dependent=dependent)
        return choose(room)

    return launch


def _check(device: torch.device, kind: str, count: int, rows: int, cut: Tuning) -> None:
    scores = _draw_scores(device, kind, count, rows, 1)[0]
    visible = torch.full((rows,), count, dtype=torch.int32, device=device)
    chosen = top_entries.launch(scores, visible, K, cut)
    assert torch.equal(chosen.cpu().long(), twin(scores.cpu(), visible.cpu().long(), K)), (
        "other entries than the twin's"
    )
